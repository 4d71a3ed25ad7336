"""The offset ledger: which records of one partition are finished, when they finish out of order.

A commit carries the low watermark as its offset and, in its metadata, the offsets above it that are *not* finished,
with how often each was taken over. Everything else below the horizon is finished, whatever it is: records done, and
the offsets that transaction markers and aborted records take. So the size grows only with unfinished records, whose
number the hop bounds. The idea of an offset map in the commit's metadata is that of Confluent's parallel consumer.

Metadata: `f1.` then base64 of crc32 (4 bytes) and varints: horizon - low, then for each unfinished offset
`(delta << 1) | counted` and, where counted, its takeovers. What does not check is foreign and read as empty.
"""

import base64
import binascii
import zlib
from collections.abc import Iterator

from broker.transport.protocol import Committed

METADATA_BYTES_MAX = 4_096
_MAGIC = "f1."


class Ledger:
    """Finished and unfinished offsets of one partition, from one takeover to the next.

    Args:
        committed: What the group holds for the partition; None where nothing was ever committed.
        first: The first offset that exists, where reading starts without a commit.
    """

    def __init__(self, committed: Committed | None, first: int = 0) -> None:
        low = committed.offset if committed else first
        self.position = low  # next offset to read: whatever lies below was delivered or is a gap
        self._open: dict[int, int] = {}  # admitted and unfinished -> takeovers; in order of offsets
        # below the horizon an earlier owner finished whatever it did not name
        self.horizon, self._inherited = _decode(low, committed.metadata if committed else "")

    @property
    def unfinished(self) -> int:
        """Number of records that a commit's metadata has to name."""
        return len(self._open) + len(self._inherited)

    def is_finished(self, offset: int) -> bool:
        """Whether the record at that offset was finished by an earlier owner or by us."""
        if offset < self.position:
            return offset not in self._open
        return offset < self.horizon and offset not in self._inherited

    def admit(self, offset: int) -> int | None:
        """Take in the next record.

        Returns:
            How often it was taken over unfinished (0 for a new one), or None when it is finished or was seen before.
        """
        if offset < self.position:
            return None
        self.position = offset + 1
        inherited = self._inherited
        takeovers = 0
        if offset < self.horizon:
            for gone in [o for o in inherited if o < offset]:  # not delivered any more: trimmed
                del inherited[gone]
            if offset not in inherited:
                return None
            takeovers = inherited.pop(offset) + 1
        elif inherited:
            inherited.clear()
        self._open[offset] = takeovers
        return takeovers

    def finish(self, offset: int) -> None:
        """Mark an admitted record finished; the caller commits its output with the next `snapshot`."""
        del self._open[offset]

    def snapshot(self) -> Committed:
        """Give what a commit has to carry: low watermark and metadata.

        The watermark never lies above what was read, although an earlier owner may have finished more: records are
        deleted below it, and the reader must not find itself before the first that is left.
        """
        unfinished = {**self._open, **self._inherited}  # both in order, and all inherited lie above
        horizon = max(self.position, self.horizon)
        low = min(next(iter(unfinished), horizon), self.position)
        if low == horizon:
            return Committed(low, "")
        return Committed(low, _encode(low, horizon, unfinished))


def _encode(low: int, horizon: int, unfinished: dict[int, int]) -> str:
    body = bytearray(_varint(horizon - low))
    previous = low
    for offset, takeovers in unfinished.items():
        body += _varint(((offset - previous) << 1) | (takeovers > 0))
        if takeovers:
            body += _varint(takeovers)
        previous = offset
    return _MAGIC + base64.b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode()


def _decode(low: int, metadata: str) -> tuple[int, dict[int, int]]:
    """Give the horizon and the unfinished offsets; nothing where the metadata is not ours or is damaged."""
    nothing: tuple[int, dict[int, int]] = (low, {})
    if not metadata.startswith(_MAGIC):
        return nothing
    try:
        raw = base64.b64decode(metadata[len(_MAGIC) :], validate=True)
        if zlib.crc32(raw[4:]) != int.from_bytes(raw[:4], "big"):
            return nothing
        numbers = _varints(raw[4:])
        horizon, unfinished, at = low + next(numbers), {}, low
        for number in numbers:
            at += number >> 1
            unfinished[at] = next(numbers) if number & 1 else 0
    except (binascii.Error, ValueError, StopIteration, RuntimeError):
        return nothing
    return horizon, unfinished


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
