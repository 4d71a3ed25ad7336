"""The active dispatcher: the hop from the request topics to the engine topics, with the core deciding in between."""

import asyncio
import fnmatch
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from broker.transport.control_log import ControlLog
from broker.transport.errors import TransportError
from broker.transport.handler import Place, Work
from broker.transport.hop import Hop
from broker.transport.ledger import Inherited
from broker.transport.outputs import Outputs
from broker.transport.protocol import Admin, Outgoing, Record, TopicPartition, Transport
from broker.transport.settings import Settings
from broker.transport.tasks import CLEAN_UP_S, end
from dispatcher.core import (
    Arrived,
    Cancelled,
    Dispatcher,
    Dropped,
    Effect,
    Finish,
    Forward,
    Item,
    LaneRead,
    LaneSeen,
    Sent,
    StatusSeen,
    Steered,
    Tick,
)
from dispatcher.core.admission import Refused, admit, readmit
from dispatcher.lane_watch import LaneWatch
from dispatcher.repeats import Repeats
from dispatcher.rescue import Rescue
from dispatcher.trim import Trim
from memory_coordinator.seen import SeenLog
from schemas import codecs, headers
from schemas.clock import now_ms
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.headers import Headers
from schemas.messages import EngineStatus, ErrorInfo, InferenceResult, Placement, ServiceClass
from schemas.questions import Answer, Question, WhereIs
from schemas.topics import Topics

log = logging.getLogger("forebay.dispatcher")

TICK_S = 0.05
REFRESH_S = 30.0
LOOKUP_S = 5.0
REPLY_TOPICS_MAX = 10_000


class Active:
    """One term of office: from election until the partition of the control topic is lost.

    It is the handler of its hop; `machine` alone holds what waits, and every record ends by exactly one `finish`.

    Args:
        config: The configuration.
        transport: The cluster.
        still_leader: Asked before anybody is fenced.
        clock: Unix time in milliseconds.
        seen_log: Where the requests seen lately are handed from term to term; None: nowhere.
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        still_leader: Callable[[], Awaitable[bool]],
        clock: Callable[[], int] = now_ms,
        seen_log: SeenLog | None = None,
    ) -> None:
        self._config, self._transport, self._clock = config, transport, clock
        self._still_leader = still_leader
        self._topics = Topics(config.kafka.topic_prefix)
        self._machine = Dispatcher(config)
        self._settings = Settings(config)
        self._steered = self._settings.version
        self._control = ControlLog(transport, self._topics, settings=self._settings)
        self._repeats = Repeats(config.dispatcher, seen_log, clock, self._control.cancels)
        self._hop = Hop(transport, self._topics.dispatcher_group, self, config.dispatcher.hop, still_owner=still_leader)
        self._lanes_topic = self._topics.lanes
        self._lanes = LaneWatch(transport, self._hop, self._lanes_topic, self._lane_told)
        self._classes: dict[str, ServiceClass] = {
            self._topics.requests("interactive"): "interactive",
            self._topics.requests("batch"): "batch",
        }
        self._outputs = Outputs(self._topics, config.topics.result_partitions, config.kafka.record_bytes_max)
        self._admin: Admin | None = None
        self._lookups: dict[Work, asyncio.Task[None]] = {}
        self._reply_partitions: dict[str, int | None] = {}
        self._partitions: list[TopicPartition] = []

    async def run(self) -> None:
        """Dispatch until `stop`.

        Raises:
            OffsetGone: Where accepted records are not there any more.
            TransportError: A topic is missing, or the control topic could not be read to its end.
        """
        self._admin = await self._transport.admin()
        background: list[asyncio.Task[None]] = []
        try:
            await self._control.replay()
            self._steer()
            await self._repeats.recall(self._transport, self._admin, self._topics.dispatcher_group, self._classes)
            await self._take_partitions()
            rescue = Rescue(self._config, self._transport, self._admin, self._still_leader)
            trim = Trim(self._config, self._transport, self._admin, self._clock, self._control)
            kept = self._control.run(self._controlled), self._repeats.write_behind()
            works = self._tick(), self._refresh(), *kept, rescue.run(), trim.run(), self._lanes.run()
            background = [asyncio.ensure_future(work) for work in works]
            await self._hop.run()
        finally:
            await end(*background, *self._lookups.values(), again_s=CLEAN_UP_S)
            await self._repeats.close()
            await self._control.close()
            await self._admin.close()

    def stop(self) -> None:
        """End the term: commit what is decided, forget what waits (it waits in Kafka)."""
        self._hop.stop()

    def seen(self, status: EngineStatus) -> None:
        """A worker's snapshot came in."""
        self._machine.handle(StatusSeen(status), self._clock())
        if self._machine.queued:
            self._hop.pump()

    def answer(self, question: Question, name: str) -> Answer:
        """Answer a question that was asked of this process.

        Args:
            question: What is asked.
            name: The process's.
        """
        now_ms = self._clock()
        if isinstance(question, WhereIs):
            return Answer(name, "dispatcher", self._machine.where(question.id, question.tenant, now_ms))
        return Answer(name, "dispatcher", state=self._machine.state(question.tenant, now_ms))

    @property
    def queued(self) -> int:
        """Requests in hand that wait for an engine."""
        return self._machine.queued

    # -- the hop's handler ----------------------------------------------------------------------------------------

    def room(self) -> int:
        """Everything the hop's own bounds allow."""
        return self._config.dispatcher.hop.in_flight_max

    def takes(self, partition: TopicPartition) -> bool:
        """Whatever comes, once it is known what lies in the lanes; of a lane as much as its owner may hold."""
        if partition.topic == self._lanes_topic:
            return self._machine.takes(partition.partition)
        return self._lanes.is_open

    def claim(self, record: Record, inherited: Inherited) -> None:
        """Begin at once: what a dispatcher has in hand leaves no trace."""

    def noted(self, work: Work) -> None:
        """No notes are written here."""

    def moved(self) -> None:
        """A partition was taken over."""
        self._lanes.moved()

    def start(self, record: Record, inherited: Inherited) -> None:  # noqa: ARG002 - a dispatcher's runs leave no trace
        """Admit a record, or refuse it at once."""
        service_class = self._classes.get(record.topic)
        admitted = admit(record, service_class, self._config.value_bytes_max) if service_class else readmit(record)
        if isinstance(admitted, Refused):
            self._refuse(record, admitted)
        elif service_class and headers.get(record.headers, headers.REPLY_TOPIC) is not None:
            self._check_reply(admitted)
        else:
            self._admit(admitted)

    def flush(self) -> None:
        """A batch is in hand: decide."""
        self._do(self._machine.handle(Tick(), self._clock()))

    def drop(self, work: Work) -> None:
        """Its partition went to somebody else."""
        lookup = self._lookups.pop(work, None)
        if lookup is not None:
            lookup.cancel()
        self._repeats.dropped(work)
        self._machine.handle(Dropped(work), self._clock())

    def committed(self, work: Work, places: Sequence[Place]) -> None:
        """A forward or a result is durable."""
        self._repeats.finished(work)
        self._machine.handle(Sent(work, places[0][1] if places else None), self._clock())

    def _admit(self, item: Item) -> None:
        """Take a request in, unless it was cancelled or another record's result answers it."""
        now_ms, is_cancelled = self._clock(), self._is_cancelled(item)
        if not is_cancelled and self._repeats.is_repeat(item, now_ms):
            self._hop.finish(item.work, [])
            return
        effects = self._machine.handle(Arrived(item, is_cancelled), now_ms)
        if not any(effect.item is item and isinstance(effect, Finish) for effect in effects):
            self._repeats.remember(item, now_ms)  # what was refused may come again
        self._do(effects)

    def _is_cancelled(self, item: Item) -> bool:
        return self._control.cancels.covers(item.envelope, item.headers)

    def _controlled(self) -> None:
        """Something was cancelled or set; a request whose reply topic is looked up is asked about right after that."""
        self._do(self._machine.handle(Cancelled(self._is_cancelled), self._clock()))
        self._steer()

    def _steer(self) -> None:
        """Go by what was set, where that has changed."""
        settings = self._settings
        if settings.version == self._steered:
            return
        self._steered = settings.version
        tenants, pools = settings.tenants(), settings.pools()
        log.info("steered tenants=%s engines=%s", ",".join(tenants) or "none", ",".join(pools) or "none")
        self._do(self._machine.handle(Steered(tenants, pools), self._clock()))

    def _lane_told(self, event: LaneSeen | LaneRead) -> None:
        self._machine.handle(event, self._clock())

    # -- effects ---------------------------------------------------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> None:
        is_told = log.isEnabledFor(logging.DEBUG)
        for effect in effects:
            if isinstance(effect, Finish):
                self._finish(effect)
                continue
            item = effect.item
            envelope, topic = item.envelope, self._lanes_topic
            if isinstance(effect, Forward):
                envelope, topic = structs.replace(envelope, placement=effect.placement), self._topics.engine(effect.pool)
                if is_told:
                    _tell(effect)
            output = self._outputs.forward(topic, effect.partition, envelope, item.value, item.headers)
            self._hop.finish(item.work, [output])

    def _finish(self, effect: Finish) -> None:
        item, envelope = effect.item, effect.item.envelope
        result = InferenceResult(
            request_id=envelope.id, status=effect.status, tenant=envelope.tenant, route=envelope.route, error=effect.error
        )
        log.info("request_%s id=%s code=%s reason=%s", effect.status, envelope.id, effect.error.code.value, effect.error.message)
        outputs = self._outputs.result(result, item.headers)
        if effect.status == "failed":
            outputs.append(self._outputs.dead_letter(_original(item), effect.error))
        self._hop.finish(item.work, outputs)

    def _refuse(self, record: Record, refused: Refused) -> None:
        log.warning("record_refused topic=%s partition=%d offset=%d reason=%s", *record[:3], refused.error.message)
        outputs: list[Outgoing] = [self._outputs.dead_letter(record, refused.error)]
        if refused.id is not None:
            result = InferenceResult(request_id=refused.id, status="rejected", tenant=refused.tenant, error=refused.error)
            outputs += self._outputs.result(result, self._safe_reply(record.headers))
        self._hop.finish((TopicPartition(record.topic, record.partition), record.offset), outputs)

    # -- reply topics -----------------------------------------------------------------------------------------------------

    def _safe_reply(self, request_headers: Headers) -> Headers:
        """The headers, without a reply address that was not checked."""
        topic = headers.text(request_headers, headers.REPLY_TOPIC)
        known = self._reply_partitions.get(topic) if topic and self._reply_allowed(topic) else None
        return request_headers if known else headers.without(request_headers, headers.REPLY_TOPIC)

    def _reply_allowed(self, topic: str) -> bool:
        patterns = self._config.dispatcher.reply_topics
        return not self._topics.is_internal(topic) and any(fnmatch.fnmatchcase(topic, p) for p in patterns)

    def _check_reply(self, item: Item) -> None:
        """Make sure that the reply address exists and is allowed; only this request waits for the answer."""
        topic = headers.text(item.headers, headers.REPLY_TOPIC) or ""
        if not self._reply_allowed(topic):
            self._refuse_reply(item, f"reply topic {topic!r} is not allowed: see `dispatcher.reply_topics`")
        elif topic in self._reply_partitions:
            self._reply_known(item, topic)
        else:
            self._lookups[item.work] = asyncio.ensure_future(self._look_up(item, topic))

    async def _look_up(self, item: Item, topic: str) -> None:
        try:
            if self._admin is None or len(self._reply_partitions) >= REPLY_TOPICS_MAX:
                self._reply_partitions.clear()
            admin = self._admin
            async with asyncio.timeout(LOOKUP_S):
                self._reply_partitions[topic] = None if admin is None else await admin.partitions(topic)
        except (TransportError, TimeoutError, OSError) as error:
            log.warning("reply_topic_unknown topic=%s error=%r", topic, error)
        self._lookups.pop(item.work, None)
        self._reply_known(item, topic)
        self._hop.pump()

    def _reply_known(self, item: Item, topic: str) -> None:
        count = self._reply_partitions.get(topic)
        wished = headers.get(item.headers, headers.REPLY_PARTITION)
        partition = None if wished is None else headers.number(wished)
        if not count:
            self._reply_partitions.pop(topic, None)  # it may be made later
            self._refuse_reply(item, f"reply topic {topic!r} does not exist")
        elif wished is not None and (partition is None or not 0 <= partition < count):
            self._refuse_reply(item, f"reply topic {topic!r} has no such partition: it has {count}", headers.REPLY_PARTITION)
        else:
            self._admit(item)

    def _refuse_reply(self, item: Item, message: str, param: str = headers.REPLY_TOPIC) -> None:
        item.headers = headers.without(item.headers, headers.REPLY_TOPIC)
        self._finish(Finish(item, "rejected", ErrorInfo(ErrorCode.INVALID_REQUEST, message, param)))

    # -- background --------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._lanes.tell_read()
            self._hop.pump()

    async def _refresh(self) -> None:
        """Take in partitions that were added since."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._take_partitions()
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("partitions_unknown error=%r", error)

    async def _take_partitions(self) -> None:
        found: list[TopicPartition] = []
        if self._admin is None:
            return
        for topic in [*self._classes, self._topics.retries, self._topics.lanes]:
            count = await self._admin.partitions(topic)
            if not count:
                message = f"topic {topic} does not exist: make it with `forebay topics ensure`"
                raise TransportError(message)
            found += [TopicPartition(topic, number) for number in range(count)]
        count = await self._admin.partitions(self._topics.results)
        partitions, record_bytes_max = count or self._config.topics.result_partitions, self._config.kafka.record_bytes_max
        self._outputs = Outputs(self._topics, partitions, record_bytes_max)
        if found != self._partitions:
            self._partitions = found
            await self._hop.assign(found)


def _tell(forward: Forward) -> None:
    """Log where a request goes, with the fields that `forebay explain` shows."""
    item, placement = forward.item, forward.placement or Placement()
    log.debug(
        "routed id=%s tenant=%s class=%s pool=%s worker=%s reason=%s wanted=%s why_not=%s stands_in=%s predicted_ms=%s",
        item.envelope.id,
        item.tenant,
        item.service_class,
        forward.pool,
        forward.worker,
        placement.reason,
        placement.wanted,
        placement.why_not,
        placement.stands_in,
        placement.predicted_ms,
    )


def _original(item: Item) -> Record:
    """The record in hand with its envelope, for its dead letter."""
    (topic, partition), offset = item.work
    envelope = item.envelope
    known = (*item.headers, (headers.ENVELOPE, codecs.encode_envelope(envelope)))
    return Record(topic, partition, offset, envelope.id.encode(), item.value, known, envelope.received_at_ms)
