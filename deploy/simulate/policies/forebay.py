"""Forebay's own core, driven as the active dispatcher drives it: the same events in, its effects done.

Requests wait in the partitions of their topic, of each of which no more is in hand than the hop allows; a record leaves
the hand when its forward is durable, one hop later. What the core diverts to a lane is read from there as the core takes
it. Where a pool has no worker left, its records go back by way of the retries once the group has been empty for
`failover_timeout_ms`.
"""

from collections import deque
from functools import partial

from broker.transport.protocol import TopicPartition
from deploy.simulate.job import Job
from deploy.simulate.worker import EPOCH_MS, Worker
from deploy.simulate.world import World
from dispatcher.core import Arrived, Dispatcher, Divert, Effect, Finish, Forward, Item, LaneRead, LaneSeen, Sent, StatusSeen, Tick
from dispatcher.core.item import NEVER_MS, Demand, Work
from schemas.messages import EngineStatus, Envelope, ServiceClass
from schemas.topics import Topics

TICK_MS = 50.0  # as the active dispatcher's


class _Source:
    """One partition that the dispatcher reads."""

    def __init__(self, topic: str, number: int) -> None:
        self.name = TopicPartition(topic, number)
        self.waiting: deque[Job] = deque()
        self.offset = 0  # the next to be read
        self.end = 0  # behind the last that was written, of a lane
        self.unfinished = 0


class Forebay:
    """The dispatcher.

    Args:
        world: What it works on.
    """

    wants_status = True

    def __init__(self, world: World) -> None:
        self._world, self._config = world, world.config
        self._core = Dispatcher(self._config)
        topics, counts = Topics(self._config.kafka.topic_prefix), self._config.topics
        self._lanes_topic = topics.lanes
        classes: tuple[ServiceClass, ...] = "interactive", "batch"
        self._requests = {c: [_Source(topics.requests(c), n) for n in range(counts.request_partitions)] for c in classes}
        self._retries = [_Source(topics.retries, n) for n in range(counts.retry_partitions)]
        self._lanes = [_Source(topics.lanes, n) for n in range(counts.lane_partitions)]
        self._sources = {s.name: s for found in (*self._requests.values(), self._retries, self._lanes) for s in found}
        self._laned: set[int] = set()  # lanes in which something waits
        self._jobs: dict[Work, Job] = {}  # in hand
        self._retried = 0
        self._is_reading = False
        for lane in range(len(self._lanes)):
            self._core.handle(LaneSeen(lane, None, 0), EPOCH_MS)
        world.at(TICK_MS, self._tick)

    @property
    def queued(self) -> int:
        """Requests that no worker has: those in hand, and those that are not read yet."""
        return self._core.queued + sum(len(source.waiting) for source in self._sources.values())

    def arrived(self, job: Job) -> None:
        """It was produced to a partition of its class's topic."""
        sources = self._requests[job.ask.service_class]
        self._produced(job, sources[job.number % len(sources)])

    def ended(self, job: Job, worker: Worker) -> None:
        """Its worker's next snapshot will tell."""

    def seen(self, status: EngineStatus) -> None:
        """A snapshot came in."""
        self._core.handle(StatusSeen(status), self._now_ms)
        if self._core.queued:
            self._decide()

    def died(self, worker: Worker) -> None:
        """Its snapshots stay away: the core sees that itself."""

    def restarted(self, worker: Worker) -> None:
        """It joins its group."""
        self._world.join(worker)

    def lost(self, worker: Worker) -> None:
        """Another of its pool reads its partitions, or, where none is left, they are rescued later."""
        if not self._world.hand_over(worker):
            patience_ms = self._config.dispatcher.failover_timeout_ms
            self._world.at(self._world.now_ms + patience_ms, self._rescue, worker)

    # -- records in ----------------------------------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        return EPOCH_MS + int(self._world.now_ms)

    def _produced(self, job: Job, source: _Source) -> None:
        source.waiting.append(job)
        if self._read(source):
            self._decide()

    def _read(self, source: _Source) -> bool:
        """Take records in while the hop allows; whether there were any."""
        if self._is_reading:
            return False  # what is refused on arrival leaves room for the loop below
        self._is_reading, before = True, source.offset
        while source.waiting and self._takes(source):
            job = source.waiting.popleft()
            work = source.name, source.offset
            source.offset += 1
            source.unfinished += 1
            self._jobs[work] = job
            self._do(self._core.handle(Arrived(_item(job, work)), self._now_ms))
        self._is_reading = False
        return source.offset > before

    def _takes(self, source: _Source) -> bool:
        hop = self._config.dispatcher.hop
        if source.unfinished >= hop.unfinished_max or len(self._jobs) >= hop.in_flight_max:
            return False
        return source.name.topic != self._lanes_topic or self._core.takes(source.name.partition)

    def _read_lanes(self) -> bool:
        took = False
        for number in sorted(self._laned):
            lane = self._lanes[number]
            took |= self._read(lane)
            if not lane.waiting:
                self._laned.discard(number)
        return took

    def _diverted(self, work: Work, job: Job, lane: _Source) -> None:
        """It is durable in a lane."""
        lane.waiting.append(job)
        self._laned.add(lane.name.partition)
        self._core.handle(Sent(work, lane.end), self._now_ms)
        lane.end += 1
        self._left(work)

    # -- decisions -------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        for lane in self._lanes:
            if lane.end and not lane.unfinished:  # of one that was never used nothing needs to be told
                self._core.handle(LaneRead(lane.name.partition, lane.offset), self._now_ms)
        if self._core.queued or self._read_lanes():
            self._decide()
        self._world.at(self._world.now_ms + TICK_MS, self._tick)

    def _decide(self) -> None:
        self._do(self._core.handle(Tick(), self._now_ms))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            work = effect.item.work
            if isinstance(effect, Forward):
                partition = self._world.partitions[effect.pool][effect.partition]
                self._world.send(self._jobs[work], partition, partial(self._durable, work))
            elif isinstance(effect, Finish):
                self._world.finish(self._jobs[work], effect.status)
                self._left(work)
            elif isinstance(effect, Divert):
                durable_ms = self._world.now_ms + self._world.scenario.hop_ms
                self._world.at(durable_ms, self._diverted, work, self._jobs[work], self._lanes[effect.partition])

    def _durable(self, work: Work, _job: Job, offset: int) -> None:
        self._core.handle(Sent(work, offset), self._now_ms)
        self._left(work)

    def _left(self, work: Work) -> None:
        """A record is finished here: there is room for another of its partition."""
        del self._jobs[work]
        source = self._sources[work[0]]
        source.unfinished -= 1
        took = bool(source.waiting) and self._read(source)
        if (self._laned and self._read_lanes()) or took:
            self._decide()

    def _rescue(self, worker: Worker) -> None:
        if worker.is_alive or any(one.is_alive for one in self._world.pools[worker.pool]):
            return
        for job in self._world.take_back(worker):
            self._retried += 1
            job.hops += 1
            source = self._retries[self._retried % len(self._retries)]
            self._world.at(self._world.now_ms + self._world.scenario.hop_ms, self._produced, job, source)


def _item(job: Job, work: Work) -> Item:
    ask, (source, offset) = job.ask, work
    if job.origin is None:
        job.origin = source.topic, source.partition, offset
    received_ms = EPOCH_MS + int(job.at_ms)
    return Item(
        work=work,
        envelope=Envelope(str(job.number), ask.tenant, ask.service_class, job.origin, received_ms, job.hops),
        demand=Demand(ask.model, ask.hint, ask.fallback),
        input_tokens=job.input_tokens,
        max_output_tokens=job.max_output_tokens,
        deadline_ms=NEVER_MS if ask.deadline_ms is None else EPOCH_MS + int(job.deadline_ms),
        value=b"",
        headers=(),
        slo_ms=ask.slo_ms,
    )
