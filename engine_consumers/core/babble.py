"""What the `sim` engine says: tokens that follow from a key and their position alone, and the bytes they stand for.

Tokens are drawn in pairs, since some characters take two: as with real byte-level tokenizers, a token may end in the middle
of a character. The mixing function is SplitMix64's (Steele, Lea and Flood, 2014).
"""

from collections.abc import Sequence

_WORDS = [
    "the",
    "river",
    "a",
    "stream",
    "water",
    "turns",
    "slowly",
    "over",
    "under",
    "gates",
    "while",
    "turbines",
    "hum",
    "and",
    "wait",
    "for",
    "more",
    "than",
    "they",
    "can",
    "use",
    "today",
    "in",
    "spring",
    "every",
    "valley",
    "keeps",
    "its",
    "own",
    "café",
    "naïve",
    "señor",
    "über",
    "straße",
    "水車",
    "река",
    "мост",
]
_SYMBOLS = "💧🌊⚡🏞"

VOCABULARY: tuple[bytes, ...] = (
    *(f" {word}".encode() for word in _WORDS),
    b".",
    *(half for symbol in _SYMBOLS for half in ((" " + symbol).encode()[:3], (" " + symbol).encode()[3:])),
)
_FIRST_HALF = len(_WORDS) + 1
_WHOLE = tuple((a, b) for a in range(len(_WORDS)) for b in (*range(len(_WORDS)), len(_WORDS)))
_SPLIT = tuple((_FIRST_HALF + 2 * n, _FIRST_HALF + 2 * n + 1) for n in range(len(_SYMBOLS)))
_PAIRS = _WHOLE + _SPLIT * (len(_WHOLE) // len(_SPLIT) // 8)

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def tokens(key: int, start: int, count: int) -> list[int]:
    """Give `count` tokens of the text that belongs to a key, from position `start`."""
    first = start // 2
    found: list[int] = []
    for n in range(first, (start + count + 1) // 2):
        x = (key + (n + 1) * _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        found += _PAIRS[(x ^ (x >> 31)) % len(_PAIRS)]
    skip = start - 2 * first
    return found[skip : skip + count]


def spell(token_ids: Sequence[int]) -> bytes:
    """Give the bytes that tokens stand for."""
    return b"".join([VOCABULARY[token] for token in token_ids])
