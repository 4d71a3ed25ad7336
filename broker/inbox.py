"""The one partition of results and of streams that a client names for its requests, read by one task.

The task alone moves the reader and ends the waits; callers only add and take back waiters. It reads from the ends that
were taken before the first request was sent, so nothing that answers a request of ours can lie before them.
"""

import asyncio
import hashlib
import logging

from broker.errors import ClientClosed, TooManyWaiting
from broker.reading import PartitionReader, partitions_of
from broker.transport.blobs import Blobs
from broker.transport.protocol import Record, TopicPartition, Transport
from broker.transport.tasks import end
from broker.waiting import Questions, Waiter
from schemas import codecs, headers
from schemas.errors import InvalidMessage
from schemas.messages import InferenceResult
from schemas.topics import Topics

log = logging.getLogger("forebay.client")

POLL_MS = 1_000
RESULTS_POLL_MS = 50  # a stream that begins meanwhile waits that long to be read
WAITING_MAX = 100_000


class Inbox:
    """Results and chunks of this client's requests.

    Args:
        transport: Where they are.
        topics: The cell's names.
        client_id: By its hash the partition is chosen: the same client reads the same one again.
        blobs: Where outputs lie that are too large for a record.
    """

    def __init__(self, transport: Transport, topics: Topics, client_id: str, blobs: Blobs) -> None:
        self._blobs = blobs
        self._loading: set[asyncio.Task[None]] = set()
        self._transport, self._topics, self._client_id = transport, topics, client_id
        self._waiting: dict[bytes, list[Waiter]] = {}
        self._questions = Questions(WAITING_MAX)
        self._count = self._streams = 0
        self._opening = asyncio.Lock()
        self._reader: PartitionReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._partition = 0

    async def open(self) -> int:
        """Start reading, where that was not done yet; gives the partition to be named to the workers.

        Raises:
            NoSuchTopic, TransportError: A topic is missing, or the cluster did not answer.
        """
        async with self._opening:
            if self._reader is None:
                results = await partitions_of(self._transport, self._topics.results)
                streams = await partitions_of(self._transport, self._topics.streams)
                self._partition = pick_partition(self._client_id, min(len(results), len(streams)))
                both = [results[self._partition], streams[self._partition]]
                probe = PartitionReader(self._transport, dict.fromkeys(both, 0))
                try:
                    ends = {tp: end for tp, (_, end) in (await probe.bounds(both)).items()}
                    for tp, end in ends.items():
                        probe.move(tp, end)
                except BaseException:
                    await probe.close()
                    raise
                self._reader = probe
                self._task = asyncio.create_task(self._run(probe, both[0], both[1]), name="forebay-client-inbox")
        return self._partition

    async def expect(self, waiter: Waiter) -> None:
        """Wait for a request's result, and its chunks where it wants them; call before the request is sent.

        Raises:
            TooManyWaiting: The bound is reached.
            ClientClosed: Nobody reads any more.
            InvalidMessage: Another request of the same id is awaited.
        """
        if self._reader is None or self._failure is not None:
            message = f"the client does not read results any more: {self._failure or 'it is closed'}"
            raise ClientClosed(message)
        if self._count >= WAITING_MAX:
            message = f"{self._count} requests wait for their results: wait for some before sending more"
            raise TooManyWaiting(message)
        if waiter.streams and self._streams == 0:
            streams = TopicPartition(self._topics.streams, self._partition)
            end = (await self._reader.bounds([streams]))[streams][1]
            if self._streams == 0:  # nobody else was faster
                self._reader.move(streams, end)
        for other in self._waiting.get(waiter.request_id.encode(), []):
            if other.tenant == waiter.tenant and other.content != waiter.content and not other.outcome.done():
                message = f"`id`: {waiter.request_id!r} is awaited already, with other content: give another id, or none"
                raise InvalidMessage(message, "id")
        waiter.asker = self._questions.ask(waiter)
        self._waiting.setdefault(waiter.request_id.encode(), []).append(waiter)
        self._count += 1
        self._streams += waiter.streams

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        key = waiter.request_id.encode()
        waiting = self._waiting.get(key, [])
        if waiter in waiting:
            waiting.remove(waiter)
            self._count -= 1
            self._streams -= waiter.streams
            if not waiting:
                del self._waiting[key]

    async def close(self) -> None:
        """Stop reading; whoever still waits is told."""
        task, self._task = self._task, None
        if task is not None:
            await end(task, *self._loading)
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
        self._fail(ClientClosed("the client was closed"))

    # -- the task -------------------------------------------------------------------------------------------------

    async def _run(self, reader: PartitionReader, results: TopicPartition, streams: TopicPartition) -> None:
        try:
            while True:
                wanted = [results, streams] if self._streams else [results]
                records = await reader.poll(wanted, POLL_MS if self._streams else RESULTS_POLL_MS)
                for record in sorted(records, key=lambda r: r.topic == results.topic):  # chunks before what ends them
                    self._take(record, is_result=record.topic == results.topic)
        except Exception as error:
            log.exception("inbox_failed client=%s", self._client_id)
            self._failure = error
            self._fail(ClientClosed(f"the client stopped reading results: {error}"))

    def _take(self, record: Record, *, is_result: bool) -> None:
        key = record.key or b""
        waiting = self._waiting.get(key, [])
        if not waiting and not (is_result and key in self._questions):
            return
        content_type = headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON
        try:
            if not is_result:
                chunk = codecs.decode_chunk(record.value, content_type)
                for waiter in waiting:
                    if waiter.streams:
                        waiter.chunk(chunk)
                return
            result = codecs.decode_result(record.value, content_type)
        except InvalidMessage as error:
            log.warning("record_unreadable topic=%s offset=%d error=%s", record.topic, record.offset, error)
            return
        self._questions.answered(key, result.tenant)
        mine = [waiter for waiter in waiting if waiter.tenant == result.tenant]
        if result.output_ref is None:
            _answer(mine, result)
        elif mine:  # only these wait for the store
            loading = asyncio.create_task(self._load(mine, result))
            self._loading.add(loading)
            loading.add_done_callback(self._loading.discard)

    async def _load(self, waiters: list[Waiter], result: InferenceResult) -> None:
        _answer(waiters, await self._blobs.whole(result))

    def _fail(self, error: Exception) -> None:
        for waiting in self._waiting.values():
            for waiter in waiting:
                waiter.fail(error)


def _answer(waiters: list[Waiter], result: InferenceResult) -> None:
    for waiter in waiters:
        waiter.result(result)


def pick_partition(client_id: str, partitions: int) -> int:
    """Choose a client's partition by a hash that stays the same."""
    return int.from_bytes(hashlib.blake2b(client_id.encode(), digest_size=8).digest(), "big") % partitions
