"""Runs a plan on a cluster: one task sends what remains, another reads the answers, until every line has ended.

The answers come to one partition of the results topic, whose end is kept on disk before the first request is sent: a
run that starts again reads from there, so it needs nothing of the process that was killed. Requests whose
acknowledgement a kill swallowed are sent a second time under the same id, and the second answer is dropped. Each start
asks under a name of its own, so that the dispatcher takes no line of it for one that it answered before.
"""

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import structs

from broker.batch import lines
from broker.batch.errors import Stalled
from broker.batch.journal import Tally
from broker.batch.patience import RETRY_S, Patience
from broker.batch.plan import Plan
from broker.transport.blobs import BlobError, Blobs
from broker.transport.errors import NoSuchTopic, OffsetGone, TooLarge, TransportError
from broker.transport.protocol import Consumer, Outgoing, Producer, Record, TopicPartition, Transport
from broker.transport.tasks import end
from schemas import codecs, headers
from schemas.clock import now_ms
from schemas.config import BlobsConfig
from schemas.errors import ErrorCode, InvalidMessage
from schemas.ids import new_id
from schemas.messages import InferenceResult
from schemas.topics import Topics

log = logging.getLogger("forebay.batch")

POLL_MS = 200
RECORDS_MAX = 500
SETTLE_S = 5.0
PROBE_S = 5.0  # so long without a record: is the cluster still there? A poll does not tell
ASK_S = 5.0  # for it to say that it is
AWAY_S = 10.0  # errors for so long are an outage, of which whoever looks on is told
QUIET_POLLS = 5  # so many polls without a record: what lay there at the start has been read
TURN_LINES = 32  # lines after which the other tasks get their turn


class Limits(msgspec.Struct, frozen=True):
    """Bounds of a run.

    Attributes:
        in_flight_max: Requests sent and not yet answered.
        window_ms: Time from the run's beginning until the cluster answers `expired` instead.
        stall_ms: The run stops when no answer comes for so long.
        absence_ms: The run stops when the cluster gives nothing but errors for so long; no answer is missed meanwhile.
    """

    in_flight_max: int = 2_000
    window_ms: int = 86_400_000
    stall_ms: int = 600_000
    absence_ms: int = 600_000  # a broker with many topics takes minutes to come back


class Progress(msgspec.Struct, frozen=True):
    """Where a run stands.

    Attributes:
        total: Lines of the input.
        answered: Lines that were answered.
        errors: Lines that ended as errors.
        in_flight: Lines in the cluster.
        away_s: For how many seconds the cluster has given nothing but errors; 0 where it is well.
    """

    total: int
    answered: int
    errors: int
    in_flight: int
    away_s: float = 0.0


async def run_batch(
    plan: Plan,
    transport: Transport,
    topics: Topics,
    limits: Limits | None = None,
    *,
    report: Callable[[Progress], None] = lambda _: None,
    clock_ms: Callable[[], int] = now_ms,
    blobs: Blobs | None = None,
) -> Tally:
    """Bring a plan to its end and write its outputs.

    Args:
        plan: What is to be done; the caller closes it.
        transport: The way to the cluster; the caller closes it.
        topics: The cell's names.
        limits: Bounds of the run.
        report: Told several times a second where the run stands.
        clock_ms: Gives Unix time.
        blobs: Where answers lie that are too large for a record.

    Returns:
        How many lines were answered, and how many ended as errors.

    Raises:
        CannotStart: The input was changed meanwhile.
        Stalled: No answer came for too long, or the cluster stayed away.
        TransportError: The cluster could not be reached, or lacks the topics.
    """
    if not plan.is_finished:
        runner = _Runner(plan, transport, topics, limits or Limits(), report, clock_ms, blobs or Blobs(BlobsConfig()))
        await runner.run()
        plan.write_outputs()
        runner.tell()
    return plan.tally


class _Runner:
    """One run. The journal has one writer: this object, on one loop; a line ends where `add` is called, once.

    The sender works through the plan and then waits for what must be sent again; the reader ends the run.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        topics: Topics,
        limits: Limits,
        report: Callable[[Progress], None],
        clock_ms: Callable[[], int],
        blobs: Blobs,
    ) -> None:
        self._plan, self._journal, self._source = plan, plan.journal, plan.source
        self._transport, self._topics, self._limits = transport, topics, limits
        self._report, self._clock_ms, self._blobs = report, clock_ms, blobs
        self._asker = new_id().encode()  # within a start, a line that was sent again after a lost acknowledgement runs once
        self._awaited: set[int] = set()  # lines sent that have not ended
        self._unacknowledged: set[int] = set()
        self._acks: set[asyncio.Future[Any]] = set()
        self._again: deque[int] = deque()
        self._sent_to = 0  # line number up to which all was sent or has ended, acknowledged or not
        self._changed = asyncio.Event()
        self._reading, self._patience_send = (Patience(limits.absence_ms / 1000) for _ in range(2))
        self._caught_up = asyncio.Event()  # what was answered before this start is known: nothing of it is sent again

    async def run(self) -> None:
        """Send and read until every line has ended, or until that is impossible."""
        if self._plan.header is not None and self._plan.is_complete:
            return
        consumer = await self._prepare()
        producer = await self._transport.producer()
        try:
            await _first_of(self._read(consumer), self._send_all(producer))
        finally:
            if self._acks:  # a cancelled send still arrives: what does is better known than sent twice
                await asyncio.wait(self._acks, timeout=SETTLE_S)
            self._journal.mark(self._acknowledged_to(), self._offset)
            for each in (producer, consumer):
                with contextlib.suppress(TransportError):
                    await each.close()

    def tell(self) -> None:
        """Report where the run stands."""
        tally = self._plan.tally
        self._report(Progress(len(self._source), tally.answered, tally.errors, len(self._awaited), self._away_s()))

    def _away_s(self) -> float:
        failing_s = max(self._reading.failing_s, self._patience_send.failing_s)
        return failing_s if failing_s >= AWAY_S else 0.0

    async def _prepare(self) -> Consumer:
        """Find the partition and the offset where answers come, and fix them before anything is sent."""
        plan, results = self._plan, self._topics.results
        await self._transport.check()
        admin = await self._transport.admin()
        try:
            count = await self._count(admin.partitions, results)
            await self._count(admin.partitions, self._topics.requests("batch"))
        finally:
            await admin.close()
        header = plan.header
        partition = header.partition if header else plan.partition(count)
        self._place = TopicPartition(results, partition)
        consumer = await self._transport.assign([self._place])
        first, end = (await consumer.bounds([self._place]))[self._place]
        self._end_at_start = end
        if header is None:
            plan.begin(self._topics.prefix, partition, end, self._clock_ms() + self._limits.window_ms)
        elif not first <= self._journal.offset <= end:
            log.warning("batch_results_gone offset=%d first=%d end=%d action=send_again", self._journal.offset, first, end)
            self._journal.mark(0, first)
        self._offset, self._sent_to = self._journal.offset, self._journal.sent
        self._awaited.update(plan.awaited())
        self._heard_at = asyncio.get_running_loop().time()
        consumer.seek(self._place, self._offset)
        return consumer

    @staticmethod
    async def _count(partitions: Callable[[str], Awaitable[int | None]], topic: str) -> int:
        count = await partitions(topic)
        if count is None:
            message = f"the topic {topic} does not exist: make it with `forebay topics ensure`"
            raise NoSuchTopic(message)
        return count

    # -- sending ------------------------------------------------------------------------------------------------

    async def _send_all(self, producer: Producer) -> None:
        await self._caught_up.wait()
        rest, turn = self._plan.unsent(), 0
        while True:
            turn += 1
            if turn % TURN_LINES == 0:
                await asyncio.sleep(0)
            if self._again:
                await self._send(producer, self._again.popleft())
            elif len(self._awaited) < self._limits.in_flight_max and (index := next(rest, None)) is not None:
                await self._send(producer, index)
                self._sent_to = self._source.numbers[index]
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _send(self, producer: Producer, index: int) -> None:
        if self._journal.has(index):
            self._unacknowledged.discard(index)
            return
        request_id = self._plan.request_id(index)
        try:
            record = self._record(lines.parse(self._source, index, request_id, self._plan.settings))
            self._awaited.add(index)
            self._unacknowledged.add(index)
            sending = asyncio.ensure_future(await producer.send(record))
        except lines.BadLine as bad:
            self._refuse(index, bad, bad.custom_id)
        except TooLarge as error:
            self._refuse(index, InvalidMessage(str(error), "body"), None)
        except NoSuchTopic:
            raise
        except TransportError as error:
            self._again.append(index)
            await self._patience_send.bear(error)
        else:
            self._acks.add(sending)
            sending.add_done_callback(functools.partial(self._on_ack, index))

    def _record(self, call: lines.Call) -> Outgoing:
        header = self._plan.header
        if header is None:
            message = "the plan was not begun"
            raise RuntimeError(message)
        deadline = datetime.fromtimestamp(header.deadline_ms / 1000, UTC)
        request = structs.replace(call.request, deadline=deadline)
        named = (
            (headers.CONTENT_TYPE, headers.JSON.encode()),
            (headers.RESULT_PARTITION, headers.pack_number(header.partition)),
            (headers.CLIENT, self._asker),
            (headers.BATCH, self._plan.name.encode()),
        )
        return Outgoing(self._topics.requests("batch"), codecs.encode(request), str(request.id).encode(), named)

    def _refuse(self, index: int, error: InvalidMessage, custom_id: str | None) -> None:
        self._unacknowledged.discard(index)
        self._end(index, "E", lines.refusal(error, custom_id, self._plan.request_id(index), self._source.numbers[index]))

    def _on_ack(self, index: int, sending: "asyncio.Future[Any]") -> None:
        self._acks.discard(sending)
        if sending.cancelled():
            return
        error = sending.exception()
        if error is None:
            self._unacknowledged.discard(index)
            self._patience_send.well()
        else:
            log.warning("batch_send_failed line=%d error=%s action=send_again", self._source.numbers[index], error)
            self._patience_send.failed(error if isinstance(error, TransportError) else TransportError(str(error)))
            asyncio.get_running_loop().call_later(RETRY_S, self._send_again, index)
        self._changed.set()

    def _send_again(self, index: int) -> None:
        self._again.append(index)
        self._changed.set()

    def _acknowledged_to(self) -> int:
        """The line number up to which everything is in the cluster or has ended."""
        first = min(self._unacknowledged, default=None)
        if first is None:
            return self._sent_to
        return min(self._sent_to, self._source.numbers[first] - 1)

    # -- reading ------------------------------------------------------------------------------------------------

    async def _read(self, consumer: Consumer) -> None:
        loop = asyncio.get_running_loop()
        answered_at, quiet = loop.time(), 0
        while True:
            if self._offset >= self._end_at_start or quiet >= QUIET_POLLS:  # transaction markers may lie at the end
                self._caught_up.set()
            records = await self._poll(consumer)
            quiet = 0 if records else quiet + 1
            ended = 0
            for record in records:
                ended += await self._take(record)
                self._offset = record.offset + 1  # not before: a stop in the midst of it reads the record again
            if ended or not self._awaited or self._away_s():
                answered_at = loop.time()
            self._journal.mark(self._acknowledged_to(), self._offset)
            self.tell()
            if self._plan.is_complete:
                return
            self._patience_send.check()
            if loop.time() - answered_at > self._limits.stall_ms / 1000:
                message = (
                    f"no answer came for {self._limits.stall_ms / 1000:g} s while {len(self._awaited)} lines wait; "
                    "see `forebay check`; --resend sends them again"
                )
                raise Stalled(message)

    async def _poll(self, consumer: Consumer) -> list[Record]:
        try:
            try:
                records = await consumer.poll([self._place], RECORDS_MAX, POLL_MS)
            except OffsetGone as gone:
                await self._begin_again(consumer, gone)
                records = []
            else:
                if not records and asyncio.get_running_loop().time() - self._heard_at < PROBE_S:
                    return []
                if not records:
                    await self._ask(consumer)
        except TransportError as error:
            await self._reading.bear(error, self._heard_at)
            return []
        self._heard_at = asyncio.get_running_loop().time()
        self._reading.well()
        return records

    async def _ask(self, consumer: Consumer) -> None:
        """Find out whether a silent cluster is there, by a request on the wire: a transport knows that it once was."""
        try:
            async with asyncio.timeout(ASK_S):
                await consumer.bounds([self._place])
        except TimeoutError:
            message = f"no answer within {ASK_S:g} s"
            raise TransportError(message) from None

    async def _begin_again(self, consumer: Consumer, gone: OffsetGone) -> None:
        first, end = (await consumer.bounds([self._place]))[self._place]
        log.warning("batch_results_gone first=%d end=%d action=send_again error=%s", first, end, gone)
        self._offset = first
        self._asker = new_id().encode()  # the answers that are gone are wanted again
        consumer.seek(self._place, first)
        self._again.extend(sorted(self._awaited - self._unacknowledged))
        self._changed.set()

    async def _take(self, record: Record) -> bool:
        """Take a result in; False where it is not ours, or is a repeat."""
        index = self._plan.index_of(record.key)
        if index is None or self._journal.has(index):
            return False
        try:
            result = codecs.decode_result(record.value, headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON)
            call = lines.parse(self._source, index, result.request_id, self._plan.settings)
        except InvalidMessage as error:
            message = f"the result at {record.topic}/{record.partition}, offset {record.offset}, cannot be read: {error}"
            self._refuse(index, InvalidMessage(message, None, ErrorCode.INTERNAL), None)
            return True
        if result.status == "completed":
            try:
                result = await self._whole(result)
            except BlobError as error:
                message = f"it was answered, but the answer cannot be read: {error.message}"
                self._refuse(index, InvalidMessage(message, None, ErrorCode.INTERNAL), call.custom_id)
                return True
            self._end(index, "O", lines.answer(call, result, record.timestamp_ms // 1000))
        else:
            self._end(index, "E", lines.failure(call, result, self._source.numbers[index]))
        return True

    async def _whole(self, result: InferenceResult) -> InferenceResult:
        """Fetch an answer that lies in the store, waiting for that as for the cluster.

        Raises:
            BlobError: It will never be there.
            Stalled: The store stayed away.
        """
        while True:
            try:
                found = await self._blobs.output_of(result)
            except BlobError as error:
                if not error.code.retryable:
                    raise
                await self._reading.bear(TransportError(error.message))
            else:
                if result.output_ref is not None:
                    self._reading.well()
                return found

    def _end(self, index: int, kind: Any, line: bytes) -> None:  # noqa: ANN401 - the journal's own literal
        self._journal.add(index, kind, line)
        self._awaited.discard(index)
        self._changed.set()


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Run until one ends or fails, then end the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    for task in done:
        task.result()
