"""Virtual time: requests arrive, a policy gives them to workers, engines answer, things break.

Whatever happens is an event in one heap; arrivals are drawn as time reaches them, so memory holds what is under way
and no more. A policy sees what the real one would: arrivals at once, the workers through their snapshots.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from deploy.simulate.arrivals import Arrivals
from deploy.simulate.errors import SimulationError
from deploy.simulate.job import NEVER_MS, Job
from deploy.simulate.measures import Measures
from deploy.simulate.scenario import Fault, Scenario, to_config
from deploy.simulate.worker import Partition, Worker
from schemas.messages import EngineStatus

SAMPLE_MS = 1_000.0
REPORT_EVERY = 2_000  # arrivals
STUCK_MS = 3_600_000.0  # without an end of any request, after the last arrival


class Policy(Protocol):
    """Who gives requests to workers. Every request given to `arrived` or `lost` ends by exactly one `finish` or `send`."""

    wants_status: bool

    @property
    def queued(self) -> int:
        """Requests that no worker has."""

    def arrived(self, job: Job) -> None:
        """A request came."""

    def ended(self, job: Job, worker: Worker) -> None:
        """A worker answered one."""

    def seen(self, status: EngineStatus) -> None:
        """A worker's snapshot came in, as late as snapshots do."""

    def died(self, worker: Worker) -> None:
        """A worker is known to be dead: its heartbeats stayed away."""

    def restarted(self, worker: Worker) -> None:
        """A worker serves again."""

    def lost(self, worker: Worker) -> None:
        """A dead worker's session ended: what lies in its partitions is to be run again."""


class Ran(Struct):
    """What a run gave.

    Attributes:
        is_whole: Every request was served to its end; else the run was stopped.
        seconds: Of simulated time.
    """

    policy: str
    measures: Measures
    workers: int
    gpu_ms: float
    busy_ms: float
    is_whole: bool
    seconds: float


class World:
    """One run of one policy.

    Args:
        scenario: What is simulated.
        arrivals: Its requests.
        name: The policy's.
        make: Makes the policy for this world.
        requests_max: The run takes so many requests at most.
        report: Told how many have arrived and when, now and then.
    """

    def __init__(
        self,
        scenario: Scenario,
        arrivals: Arrivals,
        name: str,
        make: "Callable[[World], Policy]",
        requests_max: int | None = None,
        report: Callable[[int, float], object] | None = None,
    ) -> None:
        self.scenario, self.name, self.seed = scenario, name, scenario.seed
        self.config = to_config(scenario)
        self.now_ms = 0.0
        self.pools: dict[str, list[Worker]] = {}
        for pool, spec in scenario.engines.items():
            if spec.workers:
                reserved = self.config.engines[pool].reserved_slots
                self.pools[pool] = [Worker(pool, n, spec, reserved) for n in range(spec.workers)]
        self.workers = {worker.name: worker for workers in self.pools.values() for worker in workers}
        self.partitions = {pool: _partitions(workers) for pool, workers in self.pools.items()}
        speeds = {pool: spec.speed() for pool, spec in scenario.engines.items()}
        warmup_ms = scenario.warmup_s * 1000
        self.measures = Measures(scenario.slo, arrivals.kinds, speeds, warmup_ms, arrivals.shifts_ms, SAMPLE_MS)
        self._arrivals: Iterator[Job] = iter(arrivals)
        self._requests_max, self._report = requests_max, report
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self._open = True
        self._told_ms: dict[str, float] = {}
        self._telling: set[str] = set()
        self.unfinished = self._ended = 0
        self._moved_ms = 0.0
        self.policy = make(self)

    def at(self, ms: float, call: Callable[..., object], *args: Any) -> None:  # noqa: ANN401 - whatever the call takes
        """Have something happen at a moment."""
        self._count += 1
        heapq.heappush(self._heap, (ms, self._count, call, args))

    def run(self) -> Ran:
        """Run until every request has ended, or somebody interrupts."""
        scenario, is_whole = self.scenario, False
        for fault in scenario.faults:
            self.at(fault.at_s * 1000, self._break, fault)
        if self.policy.wants_status:
            for n, worker in enumerate(self.workers.values()):
                phase_ms = scenario.status.heartbeat_ms * n / len(self.workers)  # they do not all beat at once
                self._tell(worker)
                self.at(phase_ms, self._beat, worker)
        self.at(SAMPLE_MS, self._sample)
        try:
            self._loop()
            is_whole = True
        except KeyboardInterrupt:
            pass
        workers = list(self.workers.values())
        gpu_ms = len(workers) * self.measures.window_ms
        busy_ms = sum(worker.engine.busy_ms for worker in workers)
        return Ran(self.name, self.measures, len(workers), gpu_ms, busy_ms, is_whole, self.now_ms / 1000)

    def _loop(self) -> None:
        heap, pop = self._heap, heapq.heappop
        following = self._next_arrival()
        while True:
            if following is not None and (not heap or following.at_ms <= heap[0][0]):
                self.now_ms = following.at_ms
                self.unfinished += 1
                self.measures.arrival(following)
                self.policy.arrived(following)
                following = self._next_arrival()
                self._open = following is not None
            elif self.unfinished or following is not None:
                self.now_ms, _, call, args = pop(heap)
                call(*args)
            else:
                return

    def _next_arrival(self) -> Job | None:
        arrived = self.measures.arrived
        if self._report is not None and not arrived % REPORT_EVERY:
            self._report(arrived, self.now_ms)
        if self._requests_max is not None and arrived >= self._requests_max:
            return None
        return next(self._arrivals, None)

    # -- what a policy may do ------------------------------------------------------------------------------------------

    def send(self, job: Job, partition: Partition, landed: Callable[[Job, int], object] | None = None) -> None:
        """Write a request to a worker's partition: it is there one hop later.

        Args:
            job: The request.
            partition: Where to.
            landed: Told then, with the offset.
        """
        job.sent_ms = self.now_ms
        self.at(self.now_ms + self.scenario.hop_ms, self._land, job, partition, landed)

    def finish(self, job: Job, status: str) -> None:
        """End a request that no worker answers."""
        job.end_ms = self.now_ms
        self.unfinished -= 1
        self.measures.ended(job, status, self.now_ms, is_open=self._open)

    def take(self, job: Job, partition: Partition) -> None:
        """Let the partition's owner read a record, where there is one."""
        owner = partition.owner
        if owner is not None and owner.is_alive:
            partition.position = max(partition.position, job.place[1] + 1)
            if self.now_ms > job.deadline_ms:
                del partition.unfinished[job.number]
                self.finish(job, "expired")
                return
            owner.take(job, self.now_ms)
            self._plan(owner)
            self._changed(owner)

    def _land(self, job: Job, partition: Partition, landed: Callable[[Job, int], object] | None) -> None:
        offset = partition.append(job)
        if landed is not None:
            landed(job, offset)
        self.take(job, partition)

    # -- engines --------------------------------------------------------------------------------------------------------

    def _plan(self, worker: Worker) -> None:
        due_ms = worker.engine.next_ms
        if due_ms != worker.planned_ms:
            worker.planned_ms = due_ms
            if due_ms < NEVER_MS:
                self.at(due_ms, self._due, worker, due_ms)

    def _due(self, worker: Worker, due_ms: float) -> None:
        if worker.planned_ms != due_ms:
            return  # it was planned anew
        ended = worker.advance(self.now_ms)
        self._plan(worker)
        for job in ended:
            del self.partitions[worker.pool][job.place[0]].unfinished[job.number]
            self.unfinished -= 1
            self.measures.ended(job, "completed", self.now_ms, is_open=self._open)
            self.policy.ended(job, worker)
        if ended:
            self._changed(worker)

    # -- status ---------------------------------------------------------------------------------------------------------

    def _beat(self, worker: Worker) -> None:
        if worker.is_alive:
            self._tell(worker)
        self.at(self.now_ms + self.scenario.status.heartbeat_ms, self._beat, worker)

    def _changed(self, worker: Worker) -> None:
        """Something changed: a snapshot is told now, or as soon as may be."""
        gap_ms = self.scenario.status.on_change_ms
        if gap_ms is None or not self.policy.wants_status or worker.name in self._telling:
            return
        self._telling.add(worker.name)
        self.at(max(self.now_ms, self._told_ms[worker.name] + gap_ms), self._tell_change, worker)

    def _tell_change(self, worker: Worker) -> None:
        self._telling.discard(worker.name)
        if worker.is_alive:
            self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        self._told_ms[worker.name] = self.now_ms
        self.at(self.now_ms + self.scenario.status.delay_ms, self.policy.seen, worker.status(self.now_ms))

    # -- faults ---------------------------------------------------------------------------------------------------------

    def _break(self, fault: Fault) -> None:
        worker = self.workers[fault.worker]
        if fault.does == "heat":
            worker.temperature_c = fault.temperature_c
            worker.engine.set_pace(fault.pace, self.now_ms)
            self._plan(worker)
        elif fault.does == "die" and worker.is_alive:
            worker.die(self.now_ms)
            self._plan(worker)
            self.at(self.now_ms + self.config.dispatcher.status_stale_ms, self._known_dead, worker, worker.epoch)
            self.at(self.now_ms + self.scenario.session_timeout_ms, self._session_over, worker)
        elif fault.does == "restart" and not worker.is_alive:
            self.at(self.now_ms + worker.spec.load_s * 1000, self._restart, worker)

    def _known_dead(self, worker: Worker, epoch: int) -> None:
        if not worker.is_alive and worker.epoch == epoch:
            self.policy.died(worker)

    def _session_over(self, worker: Worker) -> None:
        worker.is_gone = True
        self.policy.lost(worker)

    def _restart(self, worker: Worker) -> None:
        if not worker.is_gone:  # the group still waits for the dead one
            self.at(self.now_ms + SAMPLE_MS, self._restart, worker)
            return
        worker.restart()
        self.policy.restarted(worker)
        self._changed(worker)

    def take_back(self, worker: Worker) -> list[Job]:
        """Give what lies unfinished in a dead worker's partitions, and empty them."""
        jobs = [job for partition in worker.partitions for job in partition.unfinished.values()]
        for partition in worker.partitions:
            partition.unfinished.clear()
        return jobs

    def hand_over(self, worker: Worker) -> bool:
        """Give a dead worker's partitions to another of its pool, which runs again what lies there; False where none lives."""
        heirs = [one for one in self.pools[worker.pool] if one.is_alive]
        if not heirs:
            return False
        for partition in worker.partitions:
            heir = min(heirs, key=lambda one: (len(one.partitions), one.number))
            heir.partitions.append(partition)
            partition.owner = heir
            for job in list(partition.unfinished.values()):
                self.take(job, partition)
            self._changed(heir)
        worker.partitions = []
        return True

    def join(self, worker: Worker) -> None:
        """Give a worker that is back an empty partition of the pool, as a rebalance does: running work stays where it is."""
        for partition in worker.partitions:  # nobody took them
            for job in list(partition.unfinished.values()):
                self.take(job, partition)
        if worker.partitions:
            return
        others = [one for one in self.pools[worker.pool] if len(one.partitions) > 1]
        spare = [p for one in others for p in one.partitions if not p.unfinished and p is not one.lowest]
        partition = max(spare, key=lambda p: (len(p.owner.partitions) if p.owner else 0, p.number))
        if partition.owner is not None:
            partition.owner.partitions.remove(partition)
            self._changed(partition.owner)
        partition.owner, worker.partitions = worker, [partition]

    # -- looking ----------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        queued, ended = self.policy.queued, self.measures.statuses.total()
        self.measures.sample(self.now_ms, queued, self.unfinished - queued)
        if ended != self._ended or self._open:
            self._ended, self._moved_ms = ended, self.now_ms
        elif self.now_ms - self._moved_ms > STUCK_MS:
            message = f"{self.name}: {self.unfinished} requests never end: no engine takes them"
            raise SimulationError(message)
        self.at(self.now_ms + SAMPLE_MS, self._sample)


def _partitions(workers: list[Worker]) -> list[Partition]:
    """Twice as many as workers: each has one, and one to spare."""
    made = [Partition(n, workers[n % len(workers)]) for n in range(2 * len(workers))]
    for worker in workers:
        worker.partitions = made[worker.number :: len(workers)]
    return made
