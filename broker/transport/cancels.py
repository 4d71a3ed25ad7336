"""Which requests were cancelled: the control topic's cancels, ready to be asked about every record.

A cancel takes only records that are not newer than it (Unix time by the brokers' clocks, in milliseconds), so one for
a tenant leaves the tenant's later requests alone, and a request put back under the same id runs.
"""

from typing import NamedTuple

from schemas import headers
from schemas.control import Cancel
from schemas.headers import Headers
from schemas.messages import Envelope

_Filter = tuple[str | None, str | None, str | None]  # id, tenant, batch; None takes any
_Shape = tuple[bool, bool, bool]  # which of the three a filter names


class _Given(NamedTuple):
    offset: int
    timestamp_ms: int


class Cancels:
    """The cancels that hold. One of the same filter supersedes an earlier one; what was trimmed is forgotten."""

    def __init__(self) -> None:
        self._latest: dict[_Filter, _Given] = {}
        self._shapes: tuple[_Shape, ...] = ()  # those in use: one look-up each answers for all cancels

    def __len__(self) -> int:
        """How many filters hold."""
        return len(self._latest)

    def add(self, cancel: Cancel, offset: int, timestamp_ms: int) -> None:
        """Take in a control record, in any order, also again."""
        key = cancel.id, cancel.tenant, cancel.batch
        known = self._latest.get(key, _Given(offset, timestamp_ms))
        self._latest[key] = _Given(max(offset, known.offset), max(timestamp_ms, known.timestamp_ms))
        shape = _shape(key)
        if shape not in self._shapes:
            self._shapes = (*self._shapes, shape)

    def forget(self, before_offset: int) -> None:
        """The control topic begins at this offset now."""
        kept = {key: given for key, given in self._latest.items() if given.offset >= before_offset}
        if len(kept) != len(self._latest):
            self._latest, self._shapes = kept, tuple(dict.fromkeys(map(_shape, kept)))

    def matches(self, id: str, tenant: str, batch: str | None, received_at_ms: int) -> bool:  # noqa: A002 - its name
        """Whether a request was cancelled.

        Args:
            id: The request's id.
            tenant: Whose it is.
            batch: What its header `forebay-batch` says.
            received_at_ms: When the client's record was written.
        """
        for by_id, by_tenant, by_batch in self._shapes:
            if by_batch and batch is None:
                continue
            given = self._latest.get((id if by_id else None, tenant if by_tenant else None, batch if by_batch else None))
            if given is not None and received_at_ms <= given.timestamp_ms:
                return True
        return False

    def covers(self, envelope: Envelope, request_headers: Headers) -> bool:
        """Whether the request of an envelope, with the headers it came with, was cancelled; at once where nothing was."""
        if not self._shapes:
            return False
        batch = headers.text(request_headers, headers.BATCH) if request_headers else None
        return self.matches(envelope.id, envelope.tenant, batch, envelope.received_at_ms)


def _shape(key: _Filter) -> _Shape:
    return key[0] is not None, key[1] is not None, key[2] is not None
