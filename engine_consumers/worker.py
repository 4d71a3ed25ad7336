"""The worker: the hop from a pool's topic to the results, with one engine in between.

It is the handler of its hop. Each request runs in a task of its own; `Lifecycle` decides which run, `after_failure`
what becomes of a failed one, and each ends by exactly one `finish`, unless its partition goes to somebody else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from redis.exceptions import RedisError

from broker.transport.errors import TransportError
from broker.transport.handler import Place, Work
from broker.transport.hop import Hop
from broker.transport.outputs import Outputs
from broker.transport.protocol import Outgoing, Producer, Record, TopicPartition, Transport
from engine_consumers.chunks import ChunkPublisher
from engine_consumers.core.lifecycle import Abort, Dropped, Ended, Lifecycle, Order, Run, Taken, order
from engine_consumers.core.outcome import Retry, Runner, after_failure
from engine_consumers.engine import Engine
from engine_consumers.errors import EngineError
from engine_consumers.generation import Generation
from memory_coordinator.board import Board
from schemas import codecs, headers, ids
from schemas.config import Config
from schemas.errors import ErrorCode, InvalidMessage
from schemas.messages import EngineStatus, Envelope, ErrorInfo, InferenceRequest, InferenceResult, RouteAttempt, run_id
from schemas.topics import Topics

log = logging.getLogger("forebay.worker")

NEVER_MS = 1 << 62
STATUS_GAP_S = 0.02  # between two snapshots, however much happens
READ_AHEAD = 2  # times the slots: what is read and may be reordered
DEAD_DRAIN_MS = 5_000


def now_ms() -> int:
    """Unix time."""
    return time.time_ns() // 1_000_000


class _Job(Struct):
    """A request in hand."""

    ticket: int
    work: Work
    record: Record
    envelope: Envelope
    request: InferenceRequest
    run: str
    order: Order
    task: asyncio.Task[None] | None = None


class Worker:
    """Serves one engine.

    Args:
        config: The configuration.
        name: The engine's name in it.
        engine: The engine, not yet started.
        transport: The cluster.
        board: Where the status is published.
        worker: This worker's name, unique in its pool.
        clock: Unix time in milliseconds.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        transport: Transport,
        board: Board,
        worker: str,
        *,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self._config, self._name, self._engine, self._transport, self._board = config, name, engine, transport, board
        self._spec, self._clock = config.engines[name], clock
        self._topics = Topics(config.kafka.topic_prefix)
        self._runner = Runner(name, config.pool(name), worker, clock())
        self._outputs = Outputs(self._topics, config.topics.result_partitions, config.kafka.record_bytes_max)
        self._hop = Hop(transport, self._topics.engine_group(self._runner.pool), self, config.worker.hop, claim=True)
        self._lifecycle = Lifecycle(self._spec.slots)
        self._jobs: dict[Work, _Job] = {}  # in hand
        self._tickets: dict[int, _Job] = {}  # in hand, or aborting
        self._taken = 0
        self._chunks: ChunkPublisher | None = None
        self._changed = asyncio.Event()
        self._draining = False
        self.engine_died = False

    async def run(self) -> None:
        """Start the engine and serve until `stop`, or until the engine dies (see `engine_died`).

        Raises:
            OffsetGone: Where accepted requests are not there any more.
        """
        await self._engine.start()
        producer = await self._transport.producer()
        background: list[asyncio.Task[None]] = []
        try:
            await self._learn_partitions()
            self._chunks = ChunkPublisher(producer, self._topics.streams, self._config.worker)
            await self._hop.subscribe(self._topics.engine(self._runner.pool), self._runner.worker)
            background = [asyncio.ensure_future(t) for t in (self._chunks.run(), self._publish_status(), self._watch_engine())]
            log.info("worker_up engine=%s worker=%s", self._name, self._runner.worker)
            await self._hop.run()
        finally:
            await self._let_go(background, producer)

    def stop(self) -> None:
        """Take in nothing any more, finish what runs within the drain time, and leave."""
        self._draining = True
        self._changed.set()
        self._hop.stop(self._config.worker.drain_ms)

    # -- the hop's handler ----------------------------------------------------------------------------------------

    def room(self) -> int:
        """A little more than the slots, so that what is read can be put in order."""
        return READ_AHEAD * self._spec.slots - len(self._jobs)

    def start(self, record: Record, takeovers: int) -> None:
        """Put a record in line for a slot, or end it at once where it cannot be read."""
        work = (TopicPartition(record.topic, record.partition), record.offset)
        try:
            envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
            request = codecs.decode_request(record.value, headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON)
        except InvalidMessage as error:
            log.warning("record_unreadable topic=%s partition=%d offset=%d reason=%s", *record[:3], error.message)
            self._hop.finish(work, [self._outputs.dead_letter(record, ErrorInfo(error.code, error.message, error.param))])
            return
        deadline_ms = int(request.deadline.timestamp() * 1000) if request.deadline else NEVER_MS
        rank = order(envelope.service_class, deadline_ms, envelope.received_at_ms)
        self._taken += 1
        job = _Job(self._taken, work, record, envelope, request, run_id(envelope.hop, takeovers), rank)
        self._jobs[work] = self._tickets[job.ticket] = job
        self._do(self._lifecycle.handle(Taken(job.ticket, rank)))

    def flush(self) -> None:
        """Nothing waits for the end of a batch here."""

    def drop(self, work: Work) -> None:
        """Its partition went to somebody else: stop its run."""
        job = self._jobs.pop(work, None)
        if job is not None:
            self._do(self._lifecycle.handle(Dropped(job.ticket)))
            if job.task is None:
                del self._tickets[job.ticket]

    def committed(self, work: Work, places: Sequence[Place]) -> None:  # noqa: ARG002 - all that counts is that it is over
        """A result is durable."""
        self._changed.set()

    # -- runs --------------------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Run | Abort]) -> None:
        for effect in effects:
            job = self._tickets[effect.ticket]
            if isinstance(effect, Run):
                job.task = asyncio.ensure_future(self._serve(job))
                job.task.add_done_callback(lambda _, ticket=job.ticket: self._ended(ticket))  # type: ignore[misc]
            elif job.task is not None:
                job.task.cancel()
        self._changed.set()

    def _ended(self, ticket: int) -> None:
        del self._tickets[ticket]
        self._do(self._lifecycle.handle(Ended(ticket)))

    async def _serve(self, job: _Job) -> None:
        """Run one request to its end."""
        generation = Generation(job.envelope.received_at_ms, self._clock)
        try:
            if job.order.deadline_ms <= self._clock():
                expired = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed while it waited for a slot", "deadline")
                outputs = self._failed(job, expired, generation)
            else:
                await self._generate(job, generation)
                outputs = self._completed(job, generation)
        except EngineError as error:
            outputs = self._failed(job, ErrorInfo(error.code, error.message, error.param), generation)
        except Exception as error:  # the engine's fault, whatever it is, must not end the worker
            log.exception("run_failed id=%s run=%s", job.envelope.id, job.run)
            outputs = self._failed(job, ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"), generation)
        if self._jobs.get(job.work) is job:
            del self._jobs[job.work]
            self._hop.finish(job.work, outputs)

    async def _generate(self, job: _Job, generation: Generation) -> None:
        request, envelope = job.request, job.envelope
        seed = request.sampling.seed if request.sampling.seed is not None else ids.derived_seed(envelope.id)
        stream = None
        if request.stream and self._chunks is not None:
            content_type = headers.text(job.record.headers, headers.CONTENT_TYPE) or headers.JSON
            partition = self._outputs.result_partition(job.record.headers)
            stream = self._chunks.open(envelope.id, job.run, content_type, partition)
        name = f"{job.record.partition}.{job.record.offset}.{job.run}"  # two records may have one id
        pieces = self._engine.generate(request, name, seed, job.order.class_rank)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                generation.add(piece)
                if stream is not None:
                    await stream.add(piece.token_ids, piece.text, piece.finish_reason)

    def _completed(self, job: _Job, generation: Generation) -> list[Outgoing]:
        attempt = RouteAttempt(self._runner.pool, self._runner.worker, "completed")
        result = self._result(job, generation, [*job.envelope.route, attempt])
        outputs = self._outputs.result(result, job.record.headers)
        if all(self._outputs.fits(output) for output in outputs):
            return outputs
        message = f"the result is larger than a record may be ({self._config.kafka.record_bytes_max} bytes)"
        return self._failed(job, ErrorInfo(ErrorCode.INVALID_REQUEST, message, "max_output_tokens"), generation)

    def _failed(self, job: _Job, error: ErrorInfo, generation: Generation) -> list[Outgoing]:
        verdict = after_failure(job.envelope, error, self._runner, self._config.dispatcher, self._clock())
        log.info("run_failed id=%s run=%s code=%s reason=%s", job.envelope.id, job.run, error.code.value, error.message)
        record = job.record
        if isinstance(verdict, Retry):
            return [self._outputs.retry(verdict.envelope, record.value or b"", record.headers)]
        result = InferenceResult(
            request_id=job.envelope.id,
            status=verdict.status,
            tenant=job.envelope.tenant,
            model=self._spec.model,
            engine=self._name,
            worker=self._runner.worker,
            run_id=job.run,
            timing=generation.timing(),
            route=verdict.route,
            error=verdict.error,
            metadata=job.request.metadata,
        )
        dead = [self._outputs.dead_letter(record, verdict.error)] if verdict.dead_letter else []
        return [*self._outputs.result(result, record.headers), *dead]

    def _result(self, job: _Job, generation: Generation, route: list[RouteAttempt]) -> InferenceResult:
        return InferenceResult(
            request_id=job.envelope.id,
            status="completed",
            tenant=job.envelope.tenant,
            model=self._spec.model,
            engine=self._name,
            worker=self._runner.worker,
            run_id=job.run,
            output_text=generation.text,
            output_tokens=generation.token_ids,
            finish_reason=generation.finish_reason,
            usage=generation.usage,
            timing=generation.timing(),
            route=route,
            metadata=job.request.metadata,
        )

    # -- background --------------------------------------------------------------------------------------------------------

    async def _learn_partitions(self) -> None:
        """Ask how many partitions results have; a configuration may be older than the topic."""
        admin = await self._transport.admin()
        try:
            count = await admin.partitions(self._topics.results)
        finally:
            await admin.close()
        if not count:
            message = f"topic {self._topics.results} does not exist: make it with `forebay topics ensure`"
            raise TransportError(message)
        self._outputs = Outputs(self._topics, count, self._config.kafka.record_bytes_max)

    async def _publish_status(self) -> None:
        """Write a snapshot when something changed, and with each heartbeat."""
        heartbeat_s = self._config.worker.heartbeat_ms / 1000
        while True:
            self._changed.clear()
            try:
                await self._board.write(self.status(), self._config.worker.heartbeat_ms)
            except (RedisError, OSError) as error:
                log.warning("status_not_written error=%r", error)
                await asyncio.sleep(heartbeat_s)
            await asyncio.sleep(STATUS_GAP_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), heartbeat_s)

    def status(self) -> EngineStatus:
        """What this worker says of itself now."""
        figures, positions = self._engine.status(), self._hop.positions()
        return EngineStatus(
            engine=self._name,
            kind=self._spec.kind,
            pool=self._runner.pool,
            worker=self._runner.worker,
            epoch=self._runner.epoch,
            updated_at_ms=self._clock(),
            is_healthy=not (self._draining or self.engine_died),
            partitions=sorted(tp.partition for tp in positions),
            positions={tp.partition: position for tp, position in positions.items()},
            queue_depth=self._hop.used - self._lifecycle.running,
            running=self._lifecycle.running,
            slots=self._spec.slots,
            max_context=figures.max_context,
            trained_context=figures.trained_context,
            models=sorted({self._spec.model, *self._spec.aliases}),
            features=list(figures.features),
            kv_cache_usage=figures.kv_cache_usage,
            gpu=figures.gpu,
            gpu_mem_used_bytes=figures.gpu_mem_used_bytes,
            gpu_mem_total_bytes=figures.gpu_mem_total_bytes,
            gpu_temperature_c=figures.gpu_temperature_c,
            gpu_utilization=figures.gpu_utilization,
        )

    async def _watch_engine(self) -> None:
        """When the engine dies, hand back what it ran and end the process: its supervisor starts a new one."""
        await self._engine.died()
        log.critical("engine_died engine=%s worker=%s", self._name, self._runner.worker)
        self.engine_died = True
        self._hop.stop(DEAD_DRAIN_MS)

    async def _let_go(self, background: Sequence[asyncio.Task[None]], producer: Producer) -> None:
        tasks = [*background, *(job.task for job in self._tickets.values() if job.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._board.remove(self._runner.pool, self._runner.worker)
        await producer.close()
        await self._engine.close()
