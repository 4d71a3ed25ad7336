"""Which requests were seen a moment ago, so that a second record with the same id is not run again.

What names a request is its tenant, its id and where its answer goes: the same id asked for from elsewhere is another
question. A record that comes again itself (the same partition and offset, after a crash) is never a repeat. The table
holds a digest for each and forgets it after the window, or when there are too many, the oldest first.
"""

from collections import deque
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from schemas import headers
from schemas.headers import Headers

Origin = tuple[str, int, int]  # topic, partition, offset

_KEY_BYTES = 16  # so that nobody makes up an id that passes for another tenant's
_PACKED = Struct("<qqI")  # since when, offset, number of the partition; the name of the batch follows
_ANYHOW = b""  # no part of an address: it is run in any case
_ADDRESS = {
    headers.REPLY_TOPIC: b"\0\1",
    headers.REPLY_PARTITION: b"\0\2",
    headers.CORRELATION_ID: b"\0\3",
    headers.RESULT_PARTITION: b"\0\4",
    headers.CLIENT: b"\0\5",
    headers.REPLAY: _ANYHOW,
}


def key_of(tenant: str, request_id: str, request_headers: Headers) -> bytes | None:
    """Give the digest that names a request; None where its headers say that it is to be run in any case.

    Args:
        tenant: Its tenant.
        request_id: Its id, as the client gave it.
        request_headers: The headers of its record, which tell where the answer goes.
    """
    named = f"{tenant}\0{request_id}".encode()  # neither holds a control character
    part_of = _ADDRESS.get
    for name, value in request_headers:
        part = part_of(name)
        if part is not None:
            if not part:
                return None
            named += part + len(value).to_bytes(4, "big") + value
    return blake2b(named, digest_size=_KEY_BYTES).digest()


class First(NamedTuple):
    """What is known of the first request of a name: since when (Unix time), its record, and the batch it names."""

    at_ms: int
    origin: Origin
    batch: str | None


class Seen:
    """The requests of the last while, packed: about 200 bytes each.

    Args:
        window_ms: How long one is remembered; 0: not at all.
        entries_max: How many are remembered.
    """

    def __init__(self, window_ms: int, entries_max: int) -> None:
        self._window_ms, self._entries_max = window_ms, entries_max
        self._held: dict[bytes, bytes] = {}
        self._order: deque[bytes] = deque()  # the keys of `_held`, as they came
        self._partitions: list[tuple[str, int]] = []
        self._numbers: dict[tuple[str, int], int] = {}  # where a partition stands in `_partitions`

    def __len__(self) -> int:
        """Count what is held."""
        return len(self._held)

    def first(self, key: bytes, now_ms: int) -> First | None:
        """Give what is known of the request that a key was seen in inside the window, or None."""
        held = self._held.get(key)
        if held is None:
            return None
        at_ms, offset, number = _PACKED.unpack_from(held)
        if self._is_over(at_ms, now_ms):
            return None
        return First(at_ms, (*self._partitions[number], offset), held[_PACKED.size :].decode() or None)

    def is_repeat(self, key: bytes, origin: Origin, now_ms: int) -> bool:
        """Whether the key was seen inside the window in another record."""
        first = self.first(key, now_ms)
        return first is not None and first.origin != origin

    def remember(self, key: bytes, origin: Origin, at_ms: int, batch: str | None = None) -> None:
        """Keep a key with the record that it was seen in, and that one's batch, from that moment on."""
        if not self._window_ms:
            return
        held, order, (topic, partition, offset) = self._held, self._order, origin
        number = self._numbers.get((topic, partition))
        if number is None:
            number = self._numbers[topic, partition] = len(self._partitions)
            self._partitions.append((topic, partition))
        if key not in held:
            order.append(key)
        held[key] = _PACKED.pack(at_ms, offset, number) + (batch or "").encode()
        while len(held) > self._entries_max or self._is_over(_PACKED.unpack_from(held[order[0]])[0], at_ms):
            del held[order.popleft()]

    def _is_over(self, seen_ms: int, now_ms: int) -> bool:
        return abs(now_ms - seen_ms) >= self._window_ms  # the clock may have been put back
