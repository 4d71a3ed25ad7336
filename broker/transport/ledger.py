"""The offset ledger: which records of one partition are finished, when they finish out of order.

A commit carries the low watermark as its offset and, in its metadata, the offsets above it that are *not* finished,
with how often each was taken over and a note of its handler. Everything else below the horizon is finished, whatever
it is: records done, and the offsets that transaction markers and aborted records take. So the size grows only with
unfinished records, whose number the hop bounds. The idea of an offset map in the commit's metadata is that of
Confluent's parallel consumer.

Metadata: `f2.` then base64 of crc32 (4 bytes), the owner's tag (4 bytes, 0 where it let go in good order) and varints:
horizon - low, then for each unfinished offset `(delta << 1) | told` and, where told, its state. What does not check is
foreign and read as empty.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from broker.transport.protocol import Committed

METADATA_BYTES_MAX = 4_096
NOTE_MAX = 15
TAKEOVERS_MAX = 65_535  # more are not told apart; with it 400 records spread over 400 million offsets always fit
NOBODY = 0
_MAGIC = "f2."
_NOTE_BITS = 4
_IN_HAND = 1  # the state of a record that its first owner has in hand: told by leaving it out


class Inherited(NamedTuple):
    """What is known of a record from before.

    Attributes:
        takeovers: How often it was taken over unfinished.
        note: What its last owner's handler wrote beside it.
        crashed: That owner had it in hand and is gone without having let go of it.
    """

    takeovers: int = 0
    note: int = 0
    crashed: bool = False


FRESH = Inherited()


def tag(owner: str) -> int:
    """Name an owner in four bytes; never NOBODY."""
    return zlib.crc32(owner.encode()) or 1


class Ledger:
    """Finished and unfinished offsets of one partition, from one takeover to the next.

    Args:
        committed: What the group holds for the partition; None where nothing was ever committed.
        first: The first offset that exists, where reading starts without a commit.
        owner: Tag of who keeps the ledger from now on.

    Attributes:
        claimer: Tag of who had records in hand when the ledger was written, NOBODY where none were.
        crashed: Whether the claimer is gone for good; to be set before records are admitted.
    """

    def __init__(self, committed: Committed | None, first: int = 0, owner: int = NOBODY) -> None:
        low = committed.offset if committed else first
        self.position = low  # next offset to read: whatever lies below was delivered or is a gap
        self.crashed = False
        self._owner = owner
        self._open: dict[int, int] = {}  # admitted and unfinished -> takeovers and note; in order of offsets
        # below the horizon an earlier owner finished whatever it did not name
        self.horizon, written_by, self._inherited = _decode(low, committed.metadata if committed else "")
        self.claimer = written_by if any(state & _IN_HAND for state in self._inherited.values()) else NOBODY

    @property
    def unfinished(self) -> int:
        """Number of records that a commit's metadata has to name."""
        return len(self._open) + len(self._inherited)

    @property
    def holds(self) -> bool:
        """Whether any admitted record is unfinished."""
        return bool(self._open)

    def is_finished(self, offset: int) -> bool:
        """Whether the record at that offset was finished by an earlier owner or by us."""
        if offset < self.position:
            return offset not in self._open
        return offset < self.horizon and offset not in self._inherited

    def admit(self, offset: int) -> Inherited | None:
        """Take in the next record; gives what is known of it, or None when it is finished or was seen before."""
        if offset < self.position:
            return None
        self.position = offset + 1
        inherited = self._inherited
        if offset >= self.horizon:
            if inherited:
                inherited.clear()
            self._open[offset] = 0
            return FRESH
        for gone in [o for o in inherited if o < offset]:  # not delivered any more: trimmed
            del inherited[gone]
        if offset not in inherited:
            return None
        state = inherited.pop(offset)
        takeovers, note = state >> (1 + _NOTE_BITS), state >> 1 & NOTE_MAX
        takeovers = min(takeovers + 1, TAKEOVERS_MAX)
        self._open[offset] = takeovers << _NOTE_BITS | note
        return Inherited(takeovers, note, self.crashed and bool(state & _IN_HAND))

    def keep(self, offset: int, takeovers: int) -> None:
        """An admitted record goes on as it was: it was not taken over."""
        self._open[offset] = takeovers << _NOTE_BITS | self._open[offset] & NOTE_MAX

    def note(self, offset: int, note: int) -> None:
        """Write a note beside an admitted record; it is kept by the next commit."""
        if not 0 <= note <= NOTE_MAX:
            message = f"a note is 0 to {NOTE_MAX}, not {note}"
            raise ValueError(message)
        self._open[offset] = self._open[offset] & ~NOTE_MAX | note

    def is_open(self, offset: int) -> bool:
        """Whether the record was admitted and is not finished."""
        return offset in self._open

    def finish(self, offset: int) -> None:
        """Mark an admitted record finished; the caller commits its output with the next `snapshot`."""
        del self._open[offset]

    def snapshot(self, *, let_go: bool = False) -> Committed:
        """Give what a commit has to carry: low watermark and metadata.

        The watermark never lies above what was read, although an earlier owner may have finished more: records are
        deleted below it, and the reader must not find itself before the first that is left.

        Args:
            let_go: The owner has nothing in hand any more: whoever comes next need not think that it crashed.
        """
        unfinished = {offset: state << 1 | _IN_HAND for offset, state in self._open.items()}
        unfinished.update((offset, state & ~_IN_HAND) for offset, state in self._inherited.items())  # all lie above
        horizon = max(self.position, self.horizon)
        low = min(next(iter(unfinished), horizon), self.position)
        if low == horizon:
            return Committed(low, "")
        return Committed(low, _encode(low, horizon, NOBODY if let_go else self._owner, unfinished))


def _encode(low: int, horizon: int, owner: int, unfinished: dict[int, int]) -> str:
    body = bytearray(owner.to_bytes(4, "big") + _varint(horizon - low))
    previous = low
    for offset, state in unfinished.items():
        body += _varint(((offset - previous) << 1) | (state != _IN_HAND))
        if state != _IN_HAND:
            body += _varint(state)
        previous = offset
    return _MAGIC + base64.b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode()


def _decode(low: int, metadata: str) -> tuple[int, int, dict[int, int]]:
    """Give horizon, owner and unfinished offsets; nothing where the metadata is not ours or is damaged."""
    nothing: tuple[int, int, dict[int, int]] = (low, NOBODY, {})
    if not metadata.startswith(_MAGIC):
        return nothing
    try:
        raw = base64.b64decode(metadata[len(_MAGIC) :], validate=True)
        if zlib.crc32(raw[4:]) != int.from_bytes(raw[:4], "big"):
            return nothing
        owner, numbers = int.from_bytes(raw[4:8], "big"), _varints(raw[8:])
        horizon, unfinished, at = low + next(numbers), {}, low
        for number in numbers:
            at += number >> 1
            unfinished[at] = next(numbers) if number & 1 else _IN_HAND
    except (binascii.Error, ValueError, StopIteration, RuntimeError):
        return nothing
    return horizon, owner, unfinished


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(raw: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in raw:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte <= 0x7F:
            yield number
            number = shift = 0
    if shift:
        message = "truncated"
        raise ValueError(message)
