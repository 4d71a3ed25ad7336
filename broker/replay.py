"""Putting dead letters back: each becomes a request again, once, in the topic of its class.

The request and the marker that its dead letter was put back are written in one transaction, by an outbox of the letters'
own partition. Opening that fences whoever put back letters of the partition before; what they reached is read then, up
to a record that the outbox writes first: below it nothing is undecided. So two that put back at once repeat nothing: one
of them is told. Without transactions the requests are written before the markers, and two at once may repeat some.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from typing import NamedTuple

from broker.dead_letters import DeadLetter, Place, read_markers
from broker.errors import NotReplayable, ReplayOvertaken
from broker.reading import PATIENCE_S, BoundedReader, PartitionReader
from broker.transport.errors import Fenced, NoSuchTopic, TooLarge, TransportError
from broker.transport.protocol import Committed, Consumer, Outbox, Outgoing, TopicPartition, Transport
from schemas import codecs, headers
from schemas.errors import InvalidMessage
from schemas.messages import ServiceClass
from schemas.topics import Topics

log = logging.getLogger("forebay.client")

CHUNK_RECORDS_MAX = 500  # in one transaction
CHUNK_BYTES_MAX = 4 * 2**20
ATTEMPTS_MAX = 3
BACKOFF_S = 0.5
LOOK_S = 0.1
DECIDED_S = 30.0  # in which a broker ends a transaction that its producer left open
CLASS_UNKNOWN = "its class is not known: name it with --class interactive or --class batch"

_OURS = (headers.ENVELOPE, *headers.OF_DEAD, headers.REPLAY, headers.REPLAYED)


class PutBack(NamedTuple):
    """A dead letter that is a request again.

    Attributes:
        place: Where the dead letter lies.
        id: The request's id; None where it has none of its own, so that where it lies gives it a new one.
        topic: Where the request lies now.
        at: Partition and offset there; None where the broker's answer was lost.
    """

    place: Place
    id: str | None
    topic: str
    at: tuple[int, int] | None


def obstacle(letter: DeadLetter, service_class: ServiceClass | None = None) -> str | None:
    """Say why a dead letter can by no means be put back, or None.

    Args:
        letter: The dead letter.
        service_class: The class to put it into, where its own shall not count.
    """
    if letter.is_cut:
        kept = len(letter.value or b"")
        return f"only the first {kept} of its {letter.value_bytes} bytes were kept: produce it anew from where it came from"
    if (service_class or letter.service_class) is None:
        return CLASS_UNKNOWN
    return None


def flaw(letter: DeadLetter, value_bytes_max: int) -> str | None:
    """Say why the dispatcher would refuse a dead letter again, or None.

    Args:
        letter: The dead letter.
        value_bytes_max: `dispatcher.prompt_bytes_max`.
    """
    size = len(letter.value or b"")
    if size > value_bytes_max:
        return f"the record's value has {size} bytes: at most {value_bytes_max} are taken"
    try:
        codecs.decode_ingress(letter.value, letter.content_type)
    except InvalidMessage as error:
        return error.message
    return None


async def replay(
    transport: Transport,
    topics: Topics,
    letters: AsyncIterable[DeadLetter],
    report: Callable[[PutBack], None],
    service_class: ServiceClass | None = None,
) -> None:
    """Put dead letters back; those that were put back already are passed over.

    Args:
        transport: The cluster.
        topics: The cell's names.
        letters: As `DeadLetters.read` gives them; a few are held at a time.
        report: Told of each once that is durable.
        service_class: The class to put them into; each into its own by default.

    Raises:
        NotReplayable: A letter that has an `obstacle`; those before it may have been put back.
        ReplayOvertaken: Somebody else puts back letters of the same partition.
        TransportError: The cluster did not take them; what was not reported may have been put back all the same.
    """
    desks: dict[int, _Desk] = {}
    try:
        async for letter in letters:
            chosen, why = service_class or letter.service_class, obstacle(letter, service_class)
            if why is not None or chosen is None:
                message = f"dead letter {letter.place}: {why or CLASS_UNKNOWN}"
                raise NotReplayable(message)
            desk = desks.get(letter.place.partition)
            if desk is None:
                tp = TopicPartition(topics.dead_letters, letter.place.partition)
                desks[tp.partition] = desk = _Desk(transport, topics.dead_letter_group, tp, report)
            await desk.add(_Chosen(letter, topics.requests(chosen)))
        for desk in desks.values():
            await desk.flush()
    finally:
        for desk in desks.values():
            await desk.close()


class _Chosen(NamedTuple):
    """A letter, and the topic that it is for."""

    letter: DeadLetter
    topic: str

    @property
    def place(self) -> Place:
        return self.letter.place

    def request(self) -> Outgoing:
        letter = self.letter
        kept = headers.without(letter.headers, *_OURS)
        return Outgoing(self.topic, letter.value, letter.key, (*kept, (headers.REPLAY, str(letter.place).encode())))

    def put_back(self, at: tuple[int, int] | None) -> PutBack:
        own_id = codecs.salvage(self.letter.value, self.letter.content_type).get("id")
        return PutBack(self.place, own_id, self.topic, at)


class _Desk:
    """Puts back the letters of one partition."""

    def __init__(self, transport: Transport, group: str, tp: TopicPartition, report: Callable[[PutBack], None]) -> None:
        self._transport, self._group, self._tp, self._report = transport, group, tp, report
        self._chunk: list[_Chosen] = []
        self._chunk_bytes = 0
        self._consumer: Consumer | None = None
        self._outbox: Outbox | None = None
        self._marked: set[Place] = set()
        self._known_from = 0  # markers from here on are counted in

    async def add(self, chosen: _Chosen) -> None:
        """Take a letter in, and commit where enough are in hand."""
        if chosen.letter.put_back_at_ms is not None:
            return
        size = len(chosen.letter.value or b"")
        if self._chunk and (len(self._chunk) >= CHUNK_RECORDS_MAX or self._chunk_bytes + size > CHUNK_BYTES_MAX):
            await self.flush()
        self._chunk.append(chosen)
        self._chunk_bytes += size

    async def flush(self) -> None:
        """Commit what is in hand."""
        chunk, self._chunk, self._chunk_bytes = self._chunk, [], 0
        was_sent = False
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                left = await self._unmarked(chunk)
                if was_sent:
                    self._tell_found(chunk, left)
                if not left:
                    return
                chunk, was_sent = left, True
                await self._commit(chunk)
            except (NoSuchTopic, TooLarge):
                raise
            except Fenced as error:
                message = (
                    f"somebody else puts back dead letters of partition {self._tp.partition}, or the broker took too long: "
                    "look at what is left with `forebay dead-letters list`, and run it again"
                )
                raise ReplayOvertaken(message) from error
            except TransportError as error:
                if attempt == ATTEMPTS_MAX:
                    raise
                log.warning("replay_again partition=%d attempt=%d error=%s", self._tp.partition, attempt, error)
            else:
                return
            await self.close()
            await asyncio.sleep(BACKOFF_S * attempt)

    async def close(self) -> None:
        """Let go."""
        outbox, self._outbox = self._outbox, None
        consumer, self._consumer = self._consumer, None
        for opened in (outbox, consumer):
            if opened is not None:
                try:
                    await opened.close()
                except TransportError as error:
                    log.debug("close_failed error=%s", error)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _unmarked(self, chunk: Sequence[_Chosen]) -> list[_Chosen]:
        """Leave out what was put back since it was read."""
        if not chunk:
            return []
        since = min(chosen.letter.as_of for chosen in chunk)
        if self._outbox is None:
            await self._open(chunk[0].place)
        if since < self._known_from:
            self._marked |= await self._markers(since, self._known_from)
            self._known_from = since
        return [chosen for chosen in chunk if chosen.place not in self._marked]

    async def _open(self, place: Place) -> None:
        """Fence whoever was before, and wait until all that lies in the partition now is decided."""
        self._marked.clear()
        consumer = await self._transport.assign([self._tp], self._group)
        self._consumer = consumer
        self._outbox = self._transport.outbox(self._group, self._tp, consumer)
        await self._outbox.open()
        ((_, offset),) = await self._outbox.commit([_marker(self._tp, None)], Committed(place.offset))
        try:
            async with asyncio.timeout(DECIDED_S):
                while True:
                    end = (await consumer.bounds([self._tp]))[self._tp][1]
                    if end > offset:
                        break
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            message = f"{self._tp.topic}/{self._tp.partition}: a transaction has been open for {DECIDED_S:g} s: try again later"
            raise TransportError(message) from None
        self._known_from = offset

    async def _markers(self, since: int, end: int) -> set[Place]:
        reader = PartitionReader(self._transport, {self._tp: since}, PATIENCE_S)
        try:
            return set(await read_markers(BoundedReader(reader, {self._tp: end})))
        finally:
            await reader.close()

    async def _commit(self, chunk: Sequence[_Chosen]) -> None:
        outbox = self._outbox
        if outbox is None:
            message = f"the outbox of {self._tp.topic}/{self._tp.partition} is not open"
            raise RuntimeError(message)
        requests = [chosen.request() for chosen in chunk]
        markers = [_marker(self._tp, chosen.place) for chosen in chunk]
        position = Committed(max(chosen.place.offset for chosen in chunk) + 1)  # for people: the lag tells what is newer
        if self._transport.transactional:
            places = await outbox.commit([*requests, *markers], position)
        else:
            places = await outbox.commit(requests, position)
            await outbox.commit(markers, position)
        for chosen, at in zip(chunk, places[: len(chunk)], strict=True):
            self._marked.add(chosen.place)
            self._report(chosen.put_back(at))

    def _tell_found(self, sent: Sequence[_Chosen], left: Sequence[_Chosen]) -> None:
        """The answer to a commit was lost, not the commit: report what it put back."""
        missing = {chosen.place for chosen in left}
        for chosen in sent:
            if chosen.place not in missing:
                self._report(chosen.put_back(None))


def _marker(tp: TopicPartition, place: Place | None) -> Outgoing:
    """Tell that a letter was put back; of no place it only marks where an outbox began."""
    told = b"" if place is None else str(place).encode()
    return Outgoing(tp.topic, None, None, ((headers.REPLAYED, told),), tp.partition)
