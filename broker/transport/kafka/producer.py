"""Writing outside of transactions: one shared producer of the library, and the `Producer` on top of it."""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition as KafkaPartition

from broker.transport.errors import TransportError
from broker.transport.kafka.batches import BATCH_BYTES, BatchWriter, Place, base_offset
from broker.transport.kafka.control import Control
from broker.transport.kafka.link import bootstrap, client_settings, deadline, let_go_of_producer, look_at, translate
from broker.transport.protocol import Outgoing
from broker.transport.refusals import refuse_too_large
from schemas.config import KafkaConfig

log = logging.getLogger("forebay.kafka")

QUEUED_BYTES_MAX = 64 * 2**20
FLUSH_S = 5.0
STOP_S = 1.0
_RETRY_BACKOFF_MS = 20


class SharedProducer:
    """The transport's one producer without transactions: idempotent where the broker can, made anew when it fails."""

    def __init__(self, config: KafkaConfig, control: Control) -> None:
        self._config, self._control = config, control
        self._producer: AIOKafkaProducer | None = None
        self._writer: BatchWriter | None = None
        self._starting = asyncio.Lock()
        self._idempotent = True

    async def writer(self) -> BatchWriter:
        """Give what writes batches.

        Raises:
            Unreachable: No broker answers.
        """
        async with self._starting:
            if self._writer is None or self._is_wedged():
                await self.close()
                self._producer = await self._start()
                self._writer = BatchWriter(self._producer, self._control, self._config.record_bytes_max)
            return self._writer

    def ready(self) -> BatchWriter | None:
        """Give what writes batches, where it is well: the way of all records but the first, without a wait."""
        return None if self._writer is None or self._is_wedged() else self._writer

    async def close(self) -> None:
        """Let go, with whatever is still queued."""
        producer, self._producer, self._writer = self._producer, None, None
        if producer is not None:
            await let_go_of_producer("producer", producer, STOP_S)

    def _is_wedged(self) -> bool:
        """After some errors (a sequence out of order) the library's producer fails for good."""
        task = self._producer._sender.sender_task if self._producer is not None else None
        return task is None or task.done()

    async def _start(self) -> AIOKafkaProducer:
        if self._idempotent:
            try:
                return await self._started(idempotent=True)
            except TransportError as error:
                if not isinstance(error.__cause__, KafkaError) or error.__cause__.retriable:
                    raise
                self._idempotent = False
                log.warning("producer_not_idempotent bootstrap=%s error=%s", self._config.bootstrap, error)
        return await self._started(idempotent=False)

    async def _started(self, *, idempotent: bool) -> AIOKafkaProducer:
        config = self._config
        producer = AIOKafkaProducer(
            **client_settings(config),
            client_id="forebay-producer",
            enable_idempotence=idempotent,
            acks="all",
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
            max_request_size=config.record_bytes_max,
            retry_backoff_ms=_RETRY_BACKOFF_MS,
        )
        try:
            await bootstrap(producer.client, config)
            async with deadline(config.request_timeout_ms, "starting a producer"):
                await producer._sender.start()  # `producer.start` would only connect again first
        except BaseException:
            await let_go_of_producer("producer", producer, STOP_S)
            raise
        return producer


class _Waiting:
    """A record that is queued or on its way."""

    __slots__ = ("acknowledged", "due", "record", "size")

    def __init__(self, record: Outgoing, size: int, due: float, acknowledged: "asyncio.Future[Place]") -> None:
        self.record, self.size, self.due, self.acknowledged = record, size, due, acknowledged


class _Lane:
    """One partition's queue: one batch on its way, the rest waits and makes the next."""

    def __init__(self) -> None:
        self.queued: deque[_Waiting] = deque()
        self.sent: list[_Waiting] = []
        self.timer: asyncio.TimerHandle | None = None
        self.is_scheduled = False


class KafkaProducer:
    """Sends records by the batch, as many as gather while the last batch is on its way."""

    def __init__(self, config: KafkaConfig, shared: SharedProducer) -> None:
        self._config, self._shared = config, shared
        self._lanes: dict[KafkaPartition, _Lane] = {}
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def send(self, record: Outgoing) -> Awaitable[Place]:
        """See the protocol."""
        if self._closed:
            message = "the producer is closed"
            raise TransportError(message)
        config, loop = self._config, asyncio.get_running_loop()
        size = refuse_too_large(record, 0, config.record_bytes_max)
        writer = self._shared.ready()
        tp = writer.route_known(record) if writer is not None else None
        if writer is None or tp is None or self._queued_bytes + size > QUEUED_BYTES_MAX:
            async with deadline(config.request_timeout_ms, f"queueing a record for {record.topic}"):
                writer = await self._shared.writer()
                tp = await writer.route(record)
                while self._queued_bytes and self._queued_bytes + size > QUEUED_BYTES_MAX:
                    self._room.clear()
                    await self._room.wait()
        lane = self._lanes.setdefault(tp, _Lane())
        waiting = _Waiting(record, size, loop.time() + config.request_timeout_ms / 1000, loop.create_future())
        waiting.acknowledged.add_done_callback(look_at)
        lane.queued.append(waiting)
        self._queued_bytes += size
        if lane.timer is None:
            lane.timer = loop.call_at(waiting.due, self._time_out, tp, lane)
        if not lane.is_scheduled and not lane.sent:
            lane.is_scheduled = True
            loop.call_soon(self._send_next, tp, lane, writer)
        return waiting.acknowledged

    async def close(self) -> None:
        """See the protocol."""
        self._closed = True
        waiting = [w.acknowledged for lane in self._lanes.values() for w in (*lane.sent, *lane.queued)]
        if waiting:
            await asyncio.wait(waiting, timeout=FLUSH_S)
        for lane in self._lanes.values():
            self._fail(lane, TransportError("the producer was closed before the record was acknowledged"))

    def _send_next(self, tp: KafkaPartition, lane: _Lane, writer: BatchWriter) -> None:
        lane.is_scheduled = False
        if not lane.queued or lane.sent:
            return
        batch = writer.batch(tp)
        while lane.queued and batch.add(lane.queued[0].record):
            batch.indexes.append(len(lane.sent))
            lane.sent.append(lane.queued.popleft())
        try:
            handed = writer.hand_over(batch)
        except KafkaError as error:
            self._fail(lane, translate(error, f"writing to {tp.topic}/{tp.partition}"))
            return
        handed.add_done_callback(lambda _: self._settle(tp, lane, writer, batch))

    def _settle(self, tp: KafkaPartition, lane: _Lane, writer: BatchWriter, batch: Any) -> None:  # noqa: ANN401
        sent, lane.sent = lane.sent, []
        try:
            base = base_offset(batch)
        except TransportError as error:
            self._end(sent, error)
        else:
            for relative, waiting in enumerate(sent):
                if not waiting.acknowledged.done():
                    waiting.acknowledged.set_result((tp.partition, base + relative))
            self._forget(sent)
        self._send_next(tp, lane, writer)

    def _time_out(self, tp: KafkaPartition, lane: _Lane) -> None:
        """Tell whoever has waited too long; what was sent may still arrive."""
        lane.timer = None
        now = asyncio.get_running_loop().time()
        late: list[_Waiting] = []
        while lane.queued and lane.queued[0].due <= now:
            late.append(lane.queued.popleft())
        error = TransportError(f"writing to {tp.topic}/{tp.partition}: not acknowledged in time")
        for waiting in lane.sent:
            if waiting.due <= now and not waiting.acknowledged.done():
                waiting.acknowledged.set_exception(error)
        self._end(late, error)
        rest = [w.due for w in (*lane.sent, *lane.queued) if not w.acknowledged.done()]
        if rest:
            lane.timer = asyncio.get_running_loop().call_at(min(rest), self._time_out, tp, lane)

    def _fail(self, lane: _Lane, error: TransportError) -> None:
        waiting = [*lane.sent, *lane.queued]
        lane.sent = []
        lane.queued.clear()
        self._end(waiting, error)
        if lane.timer is not None:
            lane.timer.cancel()
            lane.timer = None

    def _end(self, over: list[_Waiting], error: TransportError) -> None:
        for waiting in over:
            if not waiting.acknowledged.done():
                waiting.acknowledged.set_exception(error)
        self._forget(over)

    def _forget(self, over: list[_Waiting]) -> None:
        self._queued_bytes -= sum(waiting.size for waiting in over)
        self._room.set()
