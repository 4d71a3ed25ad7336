"""The worker: the hop from a pool's topic to the results, with one engine in between.

It is the handler of its hop. Each request runs in a task of its own; `Lifecycle` decides which run, `after_failure`
what becomes of a failed one, and each ends by exactly one `finish`, unless its partition goes to somebody else.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence

from msgspec import structs
from redis.exceptions import RedisError

from broker.transport.blobs import BlobError, Blobs
from broker.transport.control_log import ControlLog
from broker.transport.errors import TransportError
from broker.transport.handler import Place, Work
from broker.transport.hop import Hop
from broker.transport.ledger import Inherited
from broker.transport.outputs import REASON_CHARS_MAX, Outputs
from broker.transport.protocol import Outgoing, Producer, Record, TopicPartition, Transport
from broker.transport.suspicion import ALONE_FROM, crashes_of, note_of
from broker.transport.tasks import end
from engine_consumers.answers import answer
from engine_consumers.chunks import ChunkPublisher
from engine_consumers.core.completions import Completions
from engine_consumers.core.lifecycle import Abort, Dropped, Ended, Lifecycle, Run, Taken, order
from engine_consumers.core.outcome import Runner
from engine_consumers.core.pace import Pace
from engine_consumers.endings import CANCELLED, EXPIRED, Endings, poison
from engine_consumers.engine import Engine
from engine_consumers.errors import EngineError
from engine_consumers.generation import Generation
from engine_consumers.job import NEVER_MS, Job
from memory_coordinator.asking import Asking
from memory_coordinator.board import Board
from schemas import codecs, headers, ids
from schemas.clock import now_ms
from schemas.config import Config
from schemas.errors import ErrorCode, InvalidMessage
from schemas.messages import Completion, EngineStatus, ErrorInfo, run_id
from schemas.questions import Answer, Question
from schemas.topics import Topics

log = logging.getLogger("forebay.worker")

STATUS_GAP_S = 0.02  # between two snapshots, however much happens
READ_AHEAD = 4 / 3  # times what a dispatcher has on its way here: what is read and may be reordered
DEAD_DRAIN_MS = 5_000
CLOSE_S = 10.0
WATCH_S = 0.25
LATE_S = 4 * WATCH_S  # after which it was this process that stood still, not its runs


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
        asking: Over which it is asked what it has in hand; None: nobody asks.
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
        asking: Asking | None = None,
    ) -> None:
        self._config, self._name, self._engine, self._transport, self._board = config, name, engine, transport, board
        self._spec, self._clock, self._asking = config.engines[name], clock, asking
        self._topics = Topics(config.kafka.topic_prefix)
        self._runner = Runner(name, config.pool(name), worker, clock())
        self._use(config.topics.result_partitions)
        self._control = ControlLog(transport, self._topics)
        self._blobs = Blobs(config.blobs)
        self._hop = Hop(transport, self._topics.engine_group(self._runner.pool), self, config.worker.hop)
        self._lifecycle = Lifecycle(self._spec.slots, self._spec.reserved_slots)
        self._read_ahead = math.ceil(READ_AHEAD * config.dispatcher.runway_factor * self._spec.slots)
        self._completions, self._pace = Completions(), Pace()
        self._kv_cache_usage: float | None = None  # as last told
        self._jobs: dict[Work, Job] = {}  # in hand
        self._tickets: dict[int, Job] = {}  # in hand, or aborting
        self._settling: dict[Work, int] = {}  # ran alone, its end not durable yet -> ticket
        self._taken = 0
        self._chunks: ChunkPublisher | None = None
        self._changed = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._draining = False
        self.engine_died = False

    async def run(self) -> None:
        """Start the engine and serve until `stop`, or until the engine dies (see `engine_died`).

        Raises:
            OffsetGone: Where accepted requests are not there any more.
        """
        try:
            if await self._start_engine():
                await self._run(await self._transport.producer())
        finally:
            await self._engine.close()

    async def _start_engine(self) -> bool:
        """Load the model; False where the worker was to stop meanwhile."""
        self._starting = asyncio.ensure_future(self._engine.start())
        try:
            await self._starting
        except asyncio.CancelledError:
            if not self._draining:
                raise
        return not self._draining

    async def _run(self, producer: Producer) -> None:
        background: list[asyncio.Task[None]] = []
        try:
            await self._control.replay()
            await self._learn_partitions()
            self._chunks = ChunkPublisher(producer, self._topics.streams, self._config.worker)
            client_id = f"{self._runner.worker}@{self._runner.epoch}"  # a worker that comes back is another one
            await self._hop.subscribe(self._topics.engine(self._runner.pool), client_id)
            watches = self._watch_engine(), self._watch_runs(), self._control.run(self._cancelled)
            asked = () if self._asking is None else (self._asking.answer(self._answer),)
            background = [asyncio.ensure_future(each) for each in (self._chunks.run(), self._publish_status(), *watches, *asked)]
            log.info("worker_up engine=%s worker=%s", self._name, self._runner.worker)
            await self._hop.run()
        finally:
            await self._let_go(background, producer)

    def stop(self) -> None:
        """Take in nothing any more, finish what runs within the drain time, and leave."""
        self._draining = True
        self._changed.set()
        self._hop.stop(self._config.worker.drain_ms)
        if self._starting is not None:
            self._starting.cancel()

    # -- the hop's handler ----------------------------------------------------------------------------------------

    def room(self) -> int:
        """More than a dispatcher sends, so that nothing interactive stays unread behind batch, which it sends less of."""
        return self._read_ahead - len(self._jobs)

    def takes(self, partition: TopicPartition) -> bool:  # noqa: ARG002 - no partition is unlike another
        """Whatever is sent here is to be served."""
        return True

    def claim(self, record: Record, inherited: Inherited) -> int | None:
        """Keep the count of its crashes in the ledger, so that one more is told from a first one."""
        try:
            carried = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE)).crashes
        except InvalidMessage:
            return None
        return note_of(crashes_of(carried, inherited), alone=False)

    def start(self, record: Record, inherited: Inherited) -> None:
        """Put a record in line for a slot, or end it at once where it cannot be read or must not run again."""
        work = (TopicPartition(record.topic, record.partition), record.offset)
        try:
            envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
            request = codecs.decode_request(record.value, headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON)
        except InvalidMessage as error:
            log.warning("record_unreadable topic=%s partition=%d offset=%d reason=%s", *record[:3], error.message)
            self._completions.add(Completion(record.partition, record.offset, 0, 0, 0.0, None, 0.0, code=error.code))
            self._hop.finish(work, [self._outputs.dead_letter(record, ErrorInfo(error.code, error.message, error.param))])
            return
        deadline_ms = int(request.deadline.timestamp() * 1000) if request.deadline else NEVER_MS
        rank = order(envelope.service_class, deadline_ms)
        self._taken += 1
        crashes = crashes_of(envelope.crashes, inherited)
        envelope = structs.replace(envelope, crashes=crashes)
        now_s = asyncio.get_running_loop().time()
        job = Job(self._taken, work, record, envelope, request, run_id(envelope.hop, inherited.takeovers), rank, now_s)
        if self._control.cancels.covers(envelope, record.headers):
            self._conclude(job, self._failed(job, CANCELLED))
            return
        if crashes >= self._config.worker.poison_crashes:
            log.error("request_poison id=%s crashes=%d", envelope.id, crashes)
            self._conclude(job, self._failed(job, poison(crashes)))
            return
        self._jobs[work] = self._tickets[job.ticket] = job
        self._do(self._lifecycle.handle(Taken(job.ticket, rank, alone=crashes >= ALONE_FROM)))

    def flush(self) -> None:
        """Nothing waits for the end of a batch here."""

    def drop(self, work: Work) -> None:
        """Its partition went to somebody else: stop its run."""
        self._settle(work)
        job = self._jobs.pop(work, None)
        if job is not None:
            self._withdraw(job)

    def moved(self) -> None:
        """Tell at once where requests are to be sent."""
        self._changed.set()

    def noted(self, work: Work) -> None:
        """It is on record that a suspect runs alone: it may begin."""
        job = self._jobs.get(work)
        if job is not None and job.task is None:
            self._launch(job)

    def committed(self, work: Work, places: Sequence[Place]) -> None:  # noqa: ARG002 - all that counts is that it is over
        """A result is durable."""
        self._settle(work)
        self._changed.set()

    # -- runs --------------------------------------------------------------------------------------------------------------

    def _do(self, effects: Sequence[Run | Abort]) -> None:
        for effect in effects:
            job = self._tickets[effect.ticket]
            if isinstance(effect, Abort):
                if job.task is None:
                    self._ended(effect.ticket)
                else:
                    self._stop(job)
            elif effect.alone:
                log.warning("suspect_alone id=%s crashes=%d", job.envelope.id, job.envelope.crashes)
                job.alone = True
                self._hop.note(job.work, note_of(job.envelope.crashes, alone=True))
            else:
                self._launch(job)
        self._changed.set()

    def _launch(self, job: Job) -> None:
        job.moved_s = asyncio.get_running_loop().time()
        job.task = asyncio.ensure_future(self._serve(job))
        job.task.add_done_callback(lambda _: self._ended(job.ticket))

    def _withdraw(self, job: Job) -> None:
        """Take a request that is not in hand any more out of its slot or its line."""
        effects = self._lifecycle.handle(Dropped(job.ticket))
        if Abort(job.ticket) not in effects:
            del self._tickets[job.ticket]
        self._do(effects)

    def _end(self, job: Job, error: ErrorInfo) -> None:
        """End a request from outside, whether it waits or runs."""
        if job.task is None:
            del self._jobs[job.work]
            self._withdraw(job)
            self._conclude(job, self._failed(job, error))
        elif job.verdict is None:
            job.verdict = error
            self._stop(job)

    def _stop(self, job: Job) -> None:
        """Stop a run, and see to it that the engine lets go of it."""
        if job.task is not None:
            job.task.cancel()
            limit_s = self._config.worker.abort_timeout_ms / 1000
            asyncio.get_running_loop().call_later(limit_s, self._check_ended, job.ticket)

    def _ended(self, ticket: int) -> None:
        job = self._tickets.pop(ticket)
        if job.verdict is not None and self._jobs.get(job.work) is job:  # ended before it had made its first step
            self._finish(job, self._failed(job, job.verdict))
        if self._settling.get(job.work) != ticket:
            self._do(self._lifecycle.handle(Ended(ticket)))

    def _settle(self, work: Work) -> None:
        """The end of a suspect that ran alone is on record: others may run again."""
        ticket = self._settling.pop(work, None)
        if ticket is not None:
            self._do(self._lifecycle.handle(Ended(ticket)))

    async def _serve(self, job: Job) -> None:
        """Run one request to its end."""
        job.generation = generation = Generation(job.envelope.received_at_ms, self._clock)
        job.began_s = asyncio.get_running_loop().time()
        job.beside, job.kv_cache_usage = self._lifecycle.running - 1, self._kv_cache_usage
        try:
            if job.order.deadline_ms <= self._clock():
                outputs = self._failed(job, EXPIRED)
            else:
                await self._generate(job, generation)
                outputs = await self._completed(job, generation)
        except asyncio.CancelledError:
            if job.verdict is None:
                raise
            outputs = self._failed(job, job.verdict)
        except EngineError as error:
            outputs = self._failed(job, ErrorInfo(error.code, error.message, error.param))
        except Exception as error:  # the engine's fault, whatever it is, must not end the worker
            log.exception("run_failed id=%s run=%s", job.envelope.id, job.run)
            outputs = self._failed(job, ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
        self._finish(job, outputs)

    async def _completed(self, job: Job, generation: Generation) -> list[Outgoing]:
        """The run came to its end; what is too large for a record goes to the store, where there is one."""
        result = self._endings.completion(job, generation)
        outputs = self._outputs.result(result, job.record.headers)
        if self._endings.fit(outputs):
            return outputs
        if not self._blobs.has_store:
            return self._failed(job, self._endings.oversized())
        job.moved_s = math.inf  # the store has a time limit of its own
        try:
            return self._outputs.result(await self._blobs.put_output(result), job.record.headers)
        except BlobError as error:
            return self._failed(job, ErrorInfo(error.code, error.message, "max_output_tokens"))

    def _finish(self, job: Job, outputs: list[Outgoing]) -> None:
        if self._jobs.get(job.work) is job:
            del self._jobs[job.work]
            if job.alone:  # were another to crash the worker before this is on record, this one would be blamed
                self._settling[job.work] = job.ticket
            self._conclude(job, outputs)

    def _conclude(self, job: Job, outputs: list[Outgoing]) -> None:
        """Write its end, and remember what it took for the next status."""
        now_s = asyncio.get_running_loop().time()
        completion = job.completion(now_s)
        self._completions.add(completion)
        if completion.code is None:
            self._pace.completed(completion.waited_ms + completion.run_ms, now_s)
        self._hop.finish(job.work, outputs)

    def _failed(self, job: Job, error: ErrorInfo) -> list[Outgoing]:
        job.code, error = error.code, structs.replace(error, message=error.message[:REASON_CHARS_MAX])
        log.info("run_failed id=%s run=%s code=%s reason=%s", job.envelope.id, job.run, error.code.value, error.message)
        crashed = error.code is ErrorCode.UNHEALTHY and job.entered
        return self._endings.failed(job, error, crashed=crashed)

    async def _generate(self, job: Job, generation: Generation) -> None:
        envelope = job.envelope
        try:
            request = await self._blobs.fill(job.request)
        except BlobError as error:
            raise EngineError(error.code, error.message, "input_ref") from None
        request = structs.replace(request, model=self._config.answering(self._name, request.model))
        seed = request.sampling.seed if request.sampling.seed is not None else ids.derived_seed(envelope.id)
        stream = None
        if request.stream and self._chunks is not None:
            content_type = headers.text(job.record.headers, headers.CONTENT_TYPE) or headers.JSON
            partition = self._outputs.result_partition(job.record.headers)
            stream = self._chunks.open(envelope.id, job.run, content_type, partition)
        name = f"{job.record.partition}.{job.record.offset}.{job.run}"  # two records may have one id
        pieces = self._engine.generate(request, name, seed, job.order.class_rank)
        loop = asyncio.get_running_loop()
        loop.call_soon(setattr, job, "entered", True)  # noqa: FBT003 - a refusal comes before that, the death of an engine after
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                generation.add(piece)
                now_s = loop.time()
                self._pace.produced(len(piece.token_ids), now_s)
                if job.first_s is None and piece.token_ids:
                    job.first_s = now_s
                if stream is not None:
                    job.moved_s = math.inf
                    await stream.add(piece)
                job.moved_s = loop.time()
        if generation.finish_reason == "abort" and job.verdict is None:  # its processes are being stopped by somebody else
            raise EngineError(ErrorCode.PREEMPTED, "the engine ended the run unasked")

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
        self._use(count)

    def _use(self, result_partitions: int) -> None:
        self._outputs = Outputs(self._topics, result_partitions, self._config.kafka.record_bytes_max)
        self._endings = Endings(self._config, self._name, self._runner, self._outputs, self._clock)

    async def _publish_status(self) -> None:
        """Write a snapshot when something changed, and with each heartbeat."""
        heartbeat_s = self._config.worker.heartbeat_ms / 1000
        while True:
            self._changed.clear()
            try:
                status = self.status()
                await self._board.write(status, self._config.worker.heartbeat_ms)
                self._completions.told(status.completed)
            except (RedisError, OSError) as error:
                log.warning("status_not_written error=%r", error)
                await asyncio.sleep(heartbeat_s)
            await asyncio.sleep(STATUS_GAP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await self._changed.wait()

    def status(self) -> EngineStatus:
        """What this worker says of itself now."""
        figures, positions = self._engine.status(), self._hop.positions()
        now_s = asyncio.get_running_loop().time()
        self._kv_cache_usage = figures.kv_cache_usage
        return EngineStatus(
            engine=self._name,
            kind=self._spec.kind,
            pool=self._runner.pool,
            worker=self._runner.worker,
            epoch=self._runner.epoch,
            updated_at_ms=self._clock(),
            is_healthy=figures.is_healthy and not (self._draining or self.engine_died),
            partitions=sorted(tp.partition for tp in positions),
            positions={tp.partition: position for tp, position in positions.items()},
            queue_depth=self._hop.used - self._lifecycle.running,
            running=self._lifecycle.running,
            slots=self._spec.slots,
            max_context=figures.max_context,
            trained_context=figures.trained_context,
            models=sorted(self._spec.names | self._spec.loras),
            features=list(figures.features),
            kv_cache_usage=figures.kv_cache_usage,
            gpu=figures.gpu,
            gpu_mem_used_bytes=figures.gpu_mem_used_bytes,
            gpu_mem_total_bytes=figures.gpu_mem_total_bytes,
            gpu_temperature_c=figures.gpu_temperature_c,
            gpu_utilization=figures.gpu_utilization,
            avg_latency_ms=self._pace.latency_ms(now_s),
            throughput_tps=self._pace.tokens_per_s(now_s),
            interactive_slots=self._lifecycle.reserved,
            batch_load=sum(job.order.is_batch for job in self._jobs.values()),
            completed=self._completions.count,
            completions=self._completions.to_tell(),
            experts=figures.experts,
        )

    def _answer(self, question: Question) -> Answer:
        return answer(question, self._runner, list(self._jobs.values()))

    async def _watch_engine(self) -> None:
        """When the engine dies, hand back what it ran and end the process: its supervisor starts a new one."""
        await self._engine.died()
        log.critical("engine_died engine=%s worker=%s", self._name, self._runner.worker)
        self.engine_died = True
        self._hop.stop(DEAD_DRAIN_MS)

    async def _watch_runs(self) -> None:
        """End what runs past its deadline, and what gives nothing any more."""
        loop, stall_s = asyncio.get_running_loop(), self._config.worker.stall_timeout_ms / 1000
        looked_s = loop.time()
        while True:
            await asyncio.sleep(WATCH_S)
            now_s, now = loop.time(), self._clock()
            if now_s - looked_s > LATE_S:
                for job in self._jobs.values():
                    job.moved_s = max(job.moved_s, now_s)
            looked_s = now_s
            for job in list(self._jobs.values()):
                if job.order.deadline_ms <= now:
                    self._end(job, EXPIRED)
                elif job.task is not None and now_s - job.moved_s > stall_s:
                    self._end(job, ErrorInfo(ErrorCode.TIMEOUT, f"no progress for {stall_s:g} s (worker.stall_timeout_ms)"))

    def _cancelled(self) -> None:
        """Something was cancelled: end what it covers, whether it waits or runs."""
        for job in list(self._jobs.values()):
            if self._control.cancels.covers(job.envelope, job.record.headers):
                self._end(job, CANCELLED)

    def _check_ended(self, ticket: int) -> None:
        """An engine that does not let go of a run hangs: hand back what it has, and end the process."""
        if ticket not in self._tickets or self.engine_died:
            return
        log.critical("engine_hangs engine=%s worker=%s", self._name, self._runner.worker)
        self.engine_died = True
        hangs = ErrorInfo(ErrorCode.UNHEALTHY, "the engine does not let go of a run it was told to end")
        for job in [job for job in self._jobs.values() if job.task is not None]:
            self._finish(job, self._failed(job, job.verdict or hangs))
        self._hop.stop(DEAD_DRAIN_MS)

    async def _let_go(self, background: Sequence[asyncio.Task[None]], producer: Producer) -> None:
        tasks = [*background, *(job.task for job in self._tickets.values() if job.task is not None)]
        with contextlib.suppress(TimeoutError):  # an engine that hangs
            async with asyncio.timeout(CLOSE_S):
                await end(*tasks)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                log.error("task_failed task=%s error=%r", task.get_name(), error)
        with contextlib.suppress(RedisError, OSError):
            await self._board.write(self.status(), self._config.worker.heartbeat_ms)  # how the last runs ended
            await self._board.remove(self._runner.pool, self._runner.worker)
        await self._control.close()
        await producer.close()
