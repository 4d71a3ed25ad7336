"""Reading results: past ones and those that come, each request's first one only.

Nothing but read_committed records is given, from all partitions or from some; results of one partition come in the
order in which they were written. Repeats are dropped by (tenant, request id), of which the last `SEEN_MAX` are kept; the
result of a dead letter that was put back is no repeat of the one that came before.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from types import TracebackType
from typing import Literal, NamedTuple, Self

from broker.dead_letters import parse_place
from broker.reading import PATIENCE_S, BoundedReader, PartitionReader, partitions_of
from broker.transport.blobs import Blobs
from broker.transport.protocol import Record, Transport
from schemas import codecs, headers
from schemas.errors import InvalidMessage
from schemas.messages import InferenceResult

log = logging.getLogger("forebay.client")

Start = Literal["beginning", "latest"] | int | Mapping[int, int]

SEEN_MAX = 200_000
POLL_MS = 500


class Found(NamedTuple):
    """A result and where it lies."""

    result: InferenceResult
    partition: int
    offset: int


class Subscription:
    """Results as an async iterator; made by `Client.results`.

    Args:
        transport: Connects, and gives where they are.
        topic: The results topic.
        start: `beginning`, `latest`, one offset for all partitions, or partition -> offset.
        follow: Whether to wait for results to come; else it ends at what is there when it begins.
        ids: Only these requests' results; it ends once all were given.
        replays: Only the results of what was put back from these dead letters (`partition/offset`), likewise.
        partitions: Only these partitions; all by default.
        timeout_s: Raise `TimeoutError` where no result comes for so long; None to wait for ever.

    Attributes:
        positions: Partition -> next offset to read, of what was given so far: a `start` to go on from.
    """

    def __init__(
        self,
        transport: Callable[[], Awaitable[Transport]],
        topic: str,
        *,
        blobs: Blobs,
        start: Start = "latest",
        follow: bool = True,
        ids: Collection[str] | None = None,
        replays: Collection[str] | None = None,
        partitions: Collection[int] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._blobs = blobs
        self._transport, self._topic, self._start, self._follow = transport, topic, start, follow
        self._asked_ids = None if ids is None else frozenset(ids)
        self._asked_replays = None if replays is None else frozenset(replays)
        self._ids, self._replays = set(ids or ()), set(replays or ())  # not given yet
        self._only, self._timeout_s = partitions, timeout_s
        self.positions: dict[int, int] = {}
        self._seen: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._ready: deque[Found] = deque()
        self._reader: PartitionReader | None = None
        self._bounded: BoundedReader | None = None  # where it ends at what is there
        self._closed = False

    def __aiter__(self) -> AsyncIterator[InferenceResult]:
        """Iterate over the results."""
        return self

    async def __anext__(self) -> InferenceResult:
        """Give the next result."""
        return (await self.next_found()).result

    async def open(self) -> Self:
        """Fix where reading begins; else the first call for a result does.

        Raises:
            NoSuchTopic, TransportError: The topic is missing, or the cluster did not answer.
        """
        if self._reader is None and not self._closed:
            transport = await self._transport()
            known = await partitions_of(transport, self._topic)
            wanted = [tp for tp in known if self._only is None or tp.partition in self._only]
            reader = PartitionReader(transport, dict.fromkeys(wanted, 0), None if self._follow else PATIENCE_S)
            try:
                bounds = await reader.bounds(wanted)
            except BaseException:
                await reader.close()
                raise
            for tp, (first, end) in bounds.items():
                reader.move(tp, self._first_offset(tp.partition, first, end))
            if not self._follow:
                self._bounded = BoundedReader(reader, {tp: end for tp, (_, end) in bounds.items()})
            self.positions = {tp.partition: offset for tp, offset in reader.positions.items()}
            self._reader = reader
        return self

    async def next_found(self) -> Found:
        """Give the next result with where it lies.

        Raises:
            StopAsyncIteration: There is no more.
            TimeoutError: None came in time.
            TransportError: The cluster is away for too long, or a topic is missing.
        """
        await self.open()
        if not self._ready:
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    await self._fill()
            except TimeoutError:
                message = f"no result came on {self._topic} within {self._timeout_s:g} s"
                raise TimeoutError(message) from None
        if not self._ready:
            await self.aclose()
            raise StopAsyncIteration
        result = await self._blobs.whole(self._ready[0].result)
        found = self._ready.popleft()._replace(result=result)
        self.positions[found.partition] = found.offset + 1
        return found

    async def aclose(self) -> None:
        """Let go."""
        self._closed = True
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def __aenter__(self) -> Self:
        """Fix where reading begins."""
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go."""
        await self.aclose()

    @property
    def missing(self) -> set[str]:
        """Of the requests or replays that were asked for, those whose result was not given yet."""
        return self._ids | self._replays

    # -- inside ---------------------------------------------------------------------------------------------------

    def _first_offset(self, partition: int, first: int, end: int) -> int:
        if self._start == "latest":
            return end
        if self._start == "beginning":
            return first
        offset = self._start.get(partition, end) if isinstance(self._start, Mapping) else int(self._start)
        return min(max(offset, first), end)

    async def _fill(self) -> None:
        """Read until there is something to give, or nothing more."""
        reader, bounded = self._reader, self._bounded
        while reader is not None and not self._ready and self._wants_more():
            if bounded is None:
                records = await reader.poll(list(reader.positions), POLL_MS)
            elif behind := bounded.behind:
                records = await bounded.poll(behind)
            else:
                return
            for record in records:
                self._take(record)

    def _wants_more(self) -> bool:
        """Whoever follows is content with one result for each; else all that are there are given: tenants may share an id."""
        if not self._follow:
            return True
        return (self._asked_ids is None or bool(self._ids)) and (self._asked_replays is None or bool(self._replays))

    def _take(self, record: Record) -> None:
        replay = str(parse_place(headers.text(record.headers, headers.REPLAY) or "") or "")
        if self._asked_replays is not None and replay not in self._asked_replays:
            return
        if self._asked_ids is not None and (record.key or b"").decode("utf-8", "replace") not in self._asked_ids:
            return
        content_type = headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON
        try:
            result = codecs.decode_result(record.value, content_type)
        except InvalidMessage as error:
            log.warning("record_unreadable topic=%s offset=%d error=%s", record.topic, record.offset, error)
            return
        key = (result.tenant, result.request_id, replay)
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        self._ids.discard(result.request_id)
        self._replays.discard(replay)
        self._ready.append(Found(result, record.partition, record.offset))
