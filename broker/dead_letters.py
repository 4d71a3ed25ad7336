"""Dead letters: what could not be served, as it came, with the reason; and which of them were put back.

A dead letter stays where it lies for ever. One that was put back is told by a marker behind it in its partition: a
record without value whose header `forebay-replayed` names the letter's partition and offset. `broker.replay` writes it.
"""

import re
from collections import deque
from collections.abc import AsyncGenerator
from typing import NamedTuple, get_args

from msgspec import Struct

from broker.reading import PATIENCE_S, BoundedReader, PartitionReader, partitions_of
from broker.transport.protocol import Record, TopicPartition, Transport
from schemas import codecs, headers
from schemas.errors import InvalidMessage
from schemas.headers import Headers
from schemas.messages import Envelope, ServiceClass
from schemas.topics import Topics

_PLACE = re.compile(r"([0-9]{1,9})/([0-9]{1,18})")


class Place(NamedTuple):
    """Where a dead letter lies: written `partition/offset`, it is the letter's name."""

    partition: int
    offset: int

    def __str__(self) -> str:
        """Give its name."""
        return f"{self.partition}/{self.offset}"


def parse_place(text: str) -> Place | None:
    """Read a place, or None where the text is none."""
    found = _PLACE.fullmatch(text)
    return Place(int(found[1]), int(found[2])) if found else None


class DeadLetter(Struct, frozen=True):
    """One dead letter.

    Attributes:
        place: Where it lies in the topic of the dead letters.
        written_at_ms: Its timestamp: when it was given up.
        id: The request's id; None where it is not known.
        tenant: Whose it is; None where it is not known.
        service_class: Its class, from the topic it was produced to or from the envelope; None where neither tells.
        code: A word of the error taxonomy, or `unknown` where a stranger wrote the record.
        reason: One sentence.
        original: Topic, partition and offset of the record that was given up; None where a stranger wrote it.
        value_bytes: Size of the value as it was.
        is_cut: Whether only the beginning of the value was kept.
        put_back_at_ms: When it was put back; None where it was not.
        envelope: What the system knew of the request; None where it was refused before that.
        key: As it was.
        value: As it was, or its beginning.
        headers: All of the record's.
        as_of: Markers up to this offset of its partition are counted in.
    """

    place: Place
    written_at_ms: int
    id: str | None
    tenant: str | None
    service_class: ServiceClass | None
    code: str
    reason: str
    original: tuple[str, int, int] | None
    value_bytes: int
    is_cut: bool
    put_back_at_ms: int | None
    envelope: Envelope | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    as_of: int = 0

    @property
    def content_type(self) -> str:
        """How the value is written."""
        return headers.text(self.headers, headers.CONTENT_TYPE) or headers.JSON


class DeadLetters:
    """The dead letters of one cell.

    Args:
        transport: The cluster.
        topics: The cell's names.
    """

    def __init__(self, transport: Transport, topics: Topics) -> None:
        self._transport, self._topics = transport, topics
        self._settled: dict[TopicPartition, tuple[int, int]] = {}  # -> where reading ended, and the end it had then

    async def read(self, *, put_back: bool = False) -> AsyncGenerator[DeadLetter, None]:
        """Give the dead letters that are there now, the oldest first; memory holds a few fetches, and places.

        The topic is read twice, as what was put back is told by what lies behind it.

        Args:
            put_back: Whether to give those too that were put back.

        Raises:
            NoSuchTopic, TransportError: The topic is missing, or the cluster is away for too long.
        """
        partitions = await partitions_of(self._transport, self._topics.dead_letters)
        reader = PartitionReader(self._transport, dict.fromkeys(partitions, 0), PATIENCE_S)
        try:
            bounds = await reader.bounds(partitions)
            for tp, (first, _) in bounds.items():
                reader.move(tp, first)
            marking = BoundedReader(reader, {tp: self._end(tp, end) for tp, (_, end) in bounds.items()})
            marked = await read_markers(marking)
            for tp, (first, end) in bounds.items():
                self._settled[tp] = marking.ends[tp], end
                reader.move(tp, first)
            async for record in _by_time(BoundedReader(reader, marking.ends)):
                place = Place(record.partition, record.offset)
                if not _is_marker(record) and (put_back or place not in marked):
                    end = bounds[TopicPartition(record.topic, record.partition)][1]
                    yield _letter(record, self._topics, marked.get(place), end)
        finally:
            await reader.close()

    def _end(self, tp: TopicPartition, end: int) -> int:
        """Spare the wait for what is known to be markers of transactions only."""
        reached, then = self._settled.get(tp, (end, end))
        return reached if then == end else end


async def read_markers(reader: BoundedReader) -> dict[Place, int]:
    """Read to the ends; give the places of what was put back, each with the time of its marker in milliseconds."""
    marked: dict[Place, int] = {}
    while behind := reader.behind:
        for record in await reader.poll(behind):
            place = parse_place(headers.text(record.headers, headers.REPLAYED) or "") if _is_marker(record) else None
            if place is not None:
                marked[place] = record.timestamp_ms
    return marked


def _is_marker(record: Record) -> bool:
    """Whether it is no dead letter; one may have such a header too, of its client's making."""
    given = record.headers
    return headers.get(given, headers.REPLAYED) is not None and headers.get(given, headers.DEAD_TOPIC) is None


async def _by_time(reader: BoundedReader) -> AsyncGenerator[Record, None]:
    """Read to the ends; partitions are merged by the records' timestamps."""
    ahead: dict[TopicPartition, deque[Record]] = {tp: deque() for tp in reader.behind}
    while True:
        empty = [tp for tp in reader.behind if not ahead[tp]]
        if empty:
            for record in await reader.poll(empty):
                ahead[TopicPartition(record.topic, record.partition)].append(record)
            continue
        waiting = [records for records in ahead.values() if records]
        if not waiting:
            return
        yield min(waiting, key=lambda records: records[0].timestamp_ms).popleft()


def _letter(record: Record, topics: Topics, put_back_at_ms: int | None, as_of: int) -> DeadLetter:
    envelope = _envelope(record.headers)
    original = _original(record.headers)
    known = codecs.salvage(record.value, headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON)
    cut_from = _number(record.headers, headers.DEAD_BYTES)
    return DeadLetter(
        place=Place(record.partition, record.offset),
        written_at_ms=record.timestamp_ms,
        id=known.get("id") or (envelope.id if envelope else None),
        tenant=known.get("tenant") or (envelope.tenant if envelope else None),
        service_class=_service_class(topics, original, envelope),
        code=headers.text(record.headers, headers.DEAD_CODE) or "unknown",
        reason=headers.text(record.headers, headers.DEAD_REASON) or "it was not written by a part of Forebay",
        original=original,
        value_bytes=len(record.value or b"") if cut_from is None else cut_from,
        is_cut=cut_from is not None,
        put_back_at_ms=put_back_at_ms,
        envelope=envelope,
        key=record.key,
        value=record.value,
        headers=record.headers,
        as_of=as_of,
    )


def _service_class(topics: Topics, original: tuple[str, int, int] | None, envelope: Envelope | None) -> ServiceClass | None:
    """Trust the topic first: the envelope of a refused record may be a client's invention."""
    for service_class in get_args(ServiceClass):
        if original is not None and original[0] == topics.requests(service_class):
            found: ServiceClass = service_class
            return found
    return envelope.service_class if envelope else None


def _envelope(given: Headers) -> Envelope | None:
    raw = headers.get(given, headers.ENVELOPE)
    try:
        return None if raw is None else codecs.decode_envelope(raw)
    except InvalidMessage:
        return None


def _original(given: Headers) -> tuple[str, int, int] | None:
    topic = headers.text(given, headers.DEAD_TOPIC)
    partition, offset = _number(given, headers.DEAD_PARTITION), _number(given, headers.DEAD_OFFSET)
    return None if topic is None or partition is None or offset is None else (topic, partition, offset)


def _number(given: Headers, name: str) -> int | None:
    text = headers.text(given, name) or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
