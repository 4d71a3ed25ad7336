"""The workers as last heard of, and what was sent to them since.

Load = last snapshot + own dispatches since that snapshot. A snapshot tells the next offset a worker will take in on
each partition it owns; what was sent below that offset is in the snapshot's figures, what lies above is added here.

Some of a worker's slots are kept from batch, and a worker orders what it has read by class; so how long a request waits
there depends on its class. It is told in the completions that are ahead of it, one each (mean run / slots).

**A slow start.** Everybody's backlog falls upon a worker that comes back. So one that was started anew, or has become
healthy again, is sent one request at first, and twice as many with each that it finishes. One that is seen for the first
time is taken whole if it has finished something since its start, or if it is there when the first snapshots come in: then
it is the dispatcher that is new. Silence is no reason: it is Redis that was away, or the network.
"""

from collections import deque
from collections.abc import Callable, Iterable

from dispatcher.core.item import Excluded
from dispatcher.core.prediction import RUN_MS_MAX
from schemas.messages import Completion, EngineStatus, ServiceClass

UNFINISHED_MAX = 400  # the worker's ledger holds no more of one partition
FORGOTTEN_MS = 600_000  # a worker that is silent for so long is another one when it comes back
BUSY_MS = 1e9  # stands above every cost of a worker with a free slot
FULL = float("inf")
NEVER = float("inf")
RUNS_SHARE_MIN = 0.05  # of the newest run in the running mean

_BATCH: ServiceClass = "batch"


class _Runway:
    """What was sent to one partition and not seen in a snapshot yet, and who owns it as far as anybody said."""

    __slots__ = ("batch", "offsets", "owner", "unacknowledged")

    def __init__(self) -> None:
        self.owner: Worker | None = None
        self.unacknowledged = 0
        self.batch = 0  # of all
        self.offsets: deque[tuple[int, int]] = deque()  # with 1 for batch

    def __len__(self) -> int:
        return self.unacknowledged + len(self.offsets)

    def read_up_to(self, position: int) -> None:
        """Whatever lies below the position is in a snapshot's figures."""
        while self.offsets and self.offsets[0][0] < position:
            self.batch -= self.offsets.popleft()[1]


class Pool:
    """The workers of one pool.

    Attributes:
        workers: By name, the names sorted.
        stamp: Changes with everything that is known of its workers, load included.
        mean_run_ms: Of late; 0 until it is known or believed.
        max_context: What a worker said last, so that it is known while none is there; None where none said. So is
            `trained_context`.
    """

    __slots__ = ("max_context", "mean_run_ms", "name", "runs", "stamp", "trained_context", "workers")

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: dict[str, Worker] = {}
        self.stamp = self.runs = 0
        self.mean_run_ms = 0.0
        self.max_context: int | None = None
        self.trained_context: int | None = None

    def learn(self, status: EngineStatus, told: Iterable[Completion]) -> None:
        """Take in what a snapshot tells of the whole pool: how long runs take, and what its engines can hold.

        It comes from Redis and may be garbage: what cannot be true is not learned from.
        """
        for completion in told:
            if completion.code is None and 0 <= completion.run_ms <= RUN_MS_MAX:
                self.runs += 1
                self.mean_run_ms += (completion.run_ms - self.mean_run_ms) * max(1.0 / self.runs, RUNS_SHARE_MIN)
        latency_ms = status.avg_latency_ms
        if not self.runs and latency_ms is not None and 0 < latency_ms <= RUN_MS_MAX:
            self.mean_run_ms = latency_ms
        if status.max_context is not None:
            self.max_context = status.max_context
        if status.trained_context is not None:
            self.trained_context = status.trained_context


class Worker:
    """One worker: its snapshot, when we heard it, and how much of its limit is taken.

    Attributes:
        limit: Requests it may be given; less than its own while it starts slowly.
        load: Requests that it has or will read; `batch_load` of them are batch.
        partition: Its lowest, so that others stay empty and may move; None where it owns none.
        waits_ms: What an interactive and a batch request would wait before it runs.
        keys: For the same two, what orders the workers of a pool: penalties and weighted wait, `BUSY_MS` more where no
            slot is free, `FULL` where there is no room; of like workers the least loaded is first.
        penalty_ms: What the policy sees in its snapshot.
    """

    __slots__ = (
        "batch_key",
        "batch_limit",
        "batch_load",
        "batch_slots",
        "batch_wait_ms",
        "heard_ms",
        "interactive_key",
        "interactive_wait_ms",
        "is_fresh",
        "limit",
        "load",
        "open_slots",
        "partition",
        "penalty_ms",
        "pool",
        "slots",
        "start",
        "status",
    )

    def __init__(self, pool: Pool, status: EngineStatus) -> None:
        self.pool, self.status = pool, status
        self.partition: int | None = None
        self.heard_ms = self.load = self.batch_load = 0
        self.limit = self.batch_limit = self.slots = self.open_slots = self.batch_slots = 1
        self.start: int | None = None  # so many it may be given while it starts
        self.is_fresh = True
        self.penalty_ms = self.interactive_wait_ms = self.batch_wait_ms = 0.0
        self.interactive_key = self.batch_key = FULL

    @property
    def share(self) -> float:
        """How much of what it may be given it has or will read; 1 and above is full."""
        return self.load / self.limit

    def wait_ms(self, service_class: ServiceClass) -> float:
        """What a request of that class would wait before it runs."""
        return self.batch_wait_ms if service_class == _BATCH else self.interactive_wait_ms

    def key(self, service_class: ServiceClass) -> float:
        """What orders the workers of a pool for a request of that class."""
        return self.batch_key if service_class == _BATCH else self.interactive_key

    def bound(self, runway_factor: float) -> None:
        """Set how much it may be given, from its snapshot and where it stands in its start."""
        start = UNFINISHED_MAX if self.start is None else self.start
        self.slots = max(self.status.slots, 1)
        for_batch = max(self.slots - self.status.interactive_slots, 1)
        self.limit = min(max(int(self.slots * runway_factor), 1), start, UNFINISHED_MAX)
        self.batch_limit = min(max(int(for_batch * runway_factor), 1), max(self.limit - self.status.interactive_slots, 1))
        self.open_slots, self.batch_slots = min(self.slots, start), min(for_batch, start)

    def weigh(self, wait_weight: float) -> None:
        """Reckon waits and keys anew; everything that they depend on is followed by this."""
        load, batch, slots = self.load, self.batch_load, self.open_slots
        each_ms = self.pool.mean_run_ms / self.slots
        # Completions until a slot is free: batch that waits in the worker does not stand before interactive.
        ahead = load + 1 - slots
        before = batch + 1 - self.batch_slots
        interactive = ahead - before + 1 if before > 1 else ahead
        before = max(before, ahead)
        standing = self.penalty_ms + load / self.limit
        self.interactive_wait_ms = wait = interactive * each_ms if interactive > 0 else 0.0
        self.batch_wait_ms = batch_wait = before * each_ms if before > 0 else 0.0
        if load >= self.limit or self.partition is None:
            self.interactive_key = self.batch_key = FULL
            return
        self.interactive_key = standing if interactive <= 0 else standing + BUSY_MS + wait_weight * wait
        if batch >= self.batch_limit:
            self.batch_key = FULL
        else:
            self.batch_key = standing if before <= 0 else standing + BUSY_MS + wait_weight * batch_wait


class Fleet:
    """All workers of all pools.

    Args:
        runway_factor: A worker may be sent this many times its slots.
        stale_ms: A snapshot older than this is not acted upon.

    Attributes:
        version: Changes when anything but load and measured figures changes: who is there, fresh, healthy, and what they are.
        fresh_from_ms: With `fresh_until_ms`, the times between which nobody becomes stale; outside `settle` tells who is.
    """

    def __init__(self, runway_factor: float, stale_ms: int) -> None:
        self._runway_factor, self._stale_ms = runway_factor, stale_ms
        self._pools: dict[str, Pool] = {}
        self._runways: dict[tuple[str, int], _Runway] = {}
        self._first_ms: int | None = None
        self._penalty: Callable[[Worker], float] | None = None
        self._wait_weight = 1.0
        self.version = 0
        self.fresh_from_ms, self.fresh_until_ms = -NEVER, NEVER

    def judge(self, penalty: Callable[[Worker], float], wait_weight: float) -> None:
        """Say what a worker's snapshot costs in milliseconds, and how a wait weighs beside that."""
        self._penalty, self._wait_weight = penalty, wait_weight
        for pool in self._pools.values():
            for worker in pool.workers.values():
                worker.penalty_ms = penalty(worker)
            self._weigh(pool)

    def seen(self, status: EngineStatus, now_ms: int) -> list[Completion]:
        """Take in a snapshot; an older one, or one heard already, changes nothing.

        One that is older by far is news: the clock of its host was set back. Two of the same millisecond are told apart
        by what was read and completed.

        Returns:
            The completions that were not told before.
        """
        pool = self.pool(status.pool)
        worker = pool.workers.get(status.worker)
        if worker is not None and not self._is_news(worker.status, status):
            return []
        if self._first_ms is None:
            self._first_ms = now_ms
        for partition, position in status.positions.items():
            runway = self._runways.get((status.pool, partition))
            if runway is not None:
                runway.read_up_to(position)
        told = _untold(None if worker is None else worker.status, status)
        pool.learn(status, told)
        if worker is None:
            worker = Worker(pool, status)
            is_new_to_us = now_ms - self._first_ms <= self._stale_ms
            worker.start = None if is_new_to_us or status.completed else 1
            pool.workers[status.worker] = worker
            pool.workers = dict(sorted(pool.workers.items()))
            self.version += 1
        elif _nature(worker.status) != _nature(status):
            if worker.status.epoch != status.epoch or (status.is_healthy and not worker.status.is_healthy):
                worker.start = 1
            self.version += 1
        self._take_in(worker, status, now_ms, sum(completion.code is not None for completion in told))
        return told

    def _is_news(self, known: EngineStatus, status: EngineStatus) -> bool:
        age_ms = known.updated_at_ms - status.updated_at_ms
        if age_ms:
            return not 0 < age_ms <= self._stale_ms
        return _progress(status) > _progress(known)

    def _take_in(self, worker: Worker, status: EngineStatus, now_ms: int, failed: int) -> None:
        load = batch_load = 0
        for partition in status.partitions:
            runway = self._runway(status.pool, partition)
            load += len(runway)
            batch_load += runway.batch
            runway.owner = worker
        load += status.running + status.queue_depth
        if worker.start is not None and worker.status.epoch == status.epoch:
            self._grow(worker, worker.load - load - failed)
        if not worker.is_fresh:
            worker.is_fresh = True
            self.version += 1
        worker.status, worker.heard_ms, worker.load = status, now_ms, load
        worker.batch_load = status.batch_load + batch_load
        worker.partition = min(status.partitions, default=None)
        worker.bound(self._runway_factor)
        if self._penalty is not None:
            worker.penalty_ms = self._penalty(worker)
        self._weigh(worker.pool)
        self.fresh_from_ms = max(self.fresh_from_ms, now_ms)
        self.fresh_until_ms = min(self.fresh_until_ms, now_ms + self._stale_ms + 1)

    def _grow(self, worker: Worker, finished: int) -> None:
        if worker.start is None or finished <= 0:
            return
        worker.start <<= min(finished, 10)
        if worker.start >= min(worker.slots * self._runway_factor, UNFINISHED_MAX):
            worker.start = None

    def start_slowly(self, worker: Worker, start: int | None) -> None:
        """Give a worker so many at first, and twice as many with each that it finishes; None: all that it takes."""
        worker.start = start
        worker.bound(self._runway_factor)
        self._weigh(worker.pool)

    def believe(self, pool: Pool, run_ms: float) -> None:
        """Take a mean run for granted until a completion tells a true one."""
        pool.mean_run_ms = run_ms
        self._weigh(pool)

    def sending(self, pool: str, partition: int, service_class: ServiceClass) -> None:
        """A record is on its way to a partition."""
        runway = self._runway(pool, partition)
        runway.unacknowledged += 1
        batch = 1 if service_class == _BATCH else 0
        runway.batch += batch
        self._count(runway, 1, batch)

    def sent(self, pool: str, partition: int, service_class: ServiceClass, offset: int | None) -> None:
        """It is there, at that offset; or it never came, or nobody knows (None)."""
        runway = self._runways[pool, partition]
        runway.unacknowledged -= 1
        owner = runway.owner
        batch = 1 if service_class == _BATCH else 0
        if offset is None or (owner is not None and offset < owner.status.positions.get(partition, 0)):
            runway.batch -= batch
            self._count(runway, -1, -batch)
        else:
            runway.offsets.append((offset, batch))

    def settle(self, now_ms: int) -> None:
        """Tell who is fresh at this time, and forget who was silent for long."""
        since_ms, after_ms, before_ms = now_ms - self._stale_ms, -NEVER, NEVER
        for pool in self._pools.values():
            for worker in list(pool.workers.values()):
                heard_ms = worker.heard_ms
                is_fresh = since_ms <= heard_ms <= now_ms
                if is_fresh is not worker.is_fresh:
                    worker.is_fresh = is_fresh
                    self.version += 1
                if is_fresh:
                    after_ms, before_ms = max(after_ms, heard_ms), min(before_ms, heard_ms + self._stale_ms + 1)
                elif heard_ms > now_ms:
                    before_ms = min(before_ms, heard_ms)  # from another time
                elif heard_ms < now_ms - FORGOTTEN_MS:
                    self._forget(worker)
                else:
                    before_ms = min(before_ms, heard_ms + FORGOTTEN_MS + 1)
                    after_ms = max(after_ms, heard_ms + self._stale_ms + 1)
        self.fresh_from_ms, self.fresh_until_ms = after_ms, before_ms

    def is_served(self, pool: str, excluded: Excluded | None = None) -> bool:
        """Whether a pool has a live worker beside the excluded one, with room or without; `settle` comes before."""
        for worker in self.workers(pool):
            is_live = worker.is_fresh and worker.partition is not None and worker.status.is_healthy
            if is_live and (excluded is None or not concerns(excluded, worker.status)):
                return True
        return False

    def pool(self, name: str) -> Pool:
        """What is known of a pool, nothing included."""
        found = self._pools.get(name)
        if found is None:
            found = self._pools[name] = Pool(name)
        return found

    def workers(self, pool: str) -> Iterable[Worker]:
        """The workers of a pool, live or not, by name."""
        found = self._pools.get(pool)
        return () if found is None else found.workers.values()

    def _forget(self, worker: Worker) -> None:
        del worker.pool.workers[worker.status.worker]
        worker.pool.stamp += 1
        self.version += 1
        for runway in self._runways.values():
            if runway.owner is worker:
                runway.owner = None

    def _runway(self, pool: str, partition: int) -> _Runway:
        runway = self._runways.get((pool, partition))
        if runway is None:
            runway = self._runways[pool, partition] = _Runway()
        return runway

    def _count(self, runway: _Runway, change: int, batch: int) -> None:
        owner = runway.owner
        if owner is not None:
            owner.load += change
            owner.batch_load += batch
            owner.pool.stamp += 1
            owner.weigh(self._wait_weight)

    def _weigh(self, pool: Pool) -> None:
        pool.stamp += 1
        for worker in pool.workers.values():
            worker.weigh(self._wait_weight)


def concerns(excluded: Excluded, status: EngineStatus) -> bool:
    """Whether this worker is the one that handed a request back, or of the pool that did."""
    if excluded.worker is None:
        return status.epoch <= excluded.epoch
    return (status.worker, status.epoch) == (excluded.worker, excluded.epoch)


def _untold(known: EngineStatus | None, status: EngineStatus) -> list[Completion]:
    before = known.completed if known is not None and known.epoch == status.epoch else 0
    fresh = status.completed - before
    return status.completions[-fresh:] if fresh > 0 else []


def _progress(status: EngineStatus) -> tuple[int, int, int]:
    return status.epoch, status.completed, sum(status.positions.values())


def _nature(status: EngineStatus) -> tuple[object, ...]:
    """What changes only when a worker becomes another one."""
    return (
        status.epoch,
        status.is_healthy,
        status.partitions,
        status.slots,
        status.interactive_slots,
        status.max_context,
        status.trained_context,
        status.models,
        status.features,
    )
