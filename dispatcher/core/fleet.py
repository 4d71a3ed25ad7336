"""The workers as last heard of, and what was sent to them since.

Load = last snapshot + own dispatches since that snapshot. A snapshot tells the next offset a worker will take in on
each partition it owns; what was sent below that offset is in the snapshot's figures, what lies above is added here.
"""

from collections import deque
from collections.abc import Iterable

from dispatcher.core.item import Excluded
from schemas.messages import EngineStatus

UNFINISHED_MAX = 400  # the worker's ledger holds no more of one partition


class _Runway:
    """What was sent to one partition and not seen in a snapshot yet."""

    def __init__(self) -> None:
        self.unacknowledged = 0
        self.offsets: deque[int] = deque()

    def __len__(self) -> int:
        return self.unacknowledged + len(self.offsets)


class Worker:
    """One worker: its snapshot, when we heard it, and how much of its limit is taken."""

    def __init__(self, status: EngineStatus, heard_ms: int, limit: int, load: int) -> None:
        self.status, self.heard_ms, self.limit, self.load = status, heard_ms, limit, load
        self.partition = min(status.partitions, default=None)  # its lowest, so that others stay empty and may move

    @property
    def share(self) -> float:
        """How much of what it may be given it has or will read; 1 and above is full."""
        return self.load / self.limit


class Fleet:
    """All workers of all pools.

    Args:
        runway_factor: A worker may be sent this many times its slots.
        stale_ms: A snapshot older than this is not acted upon.
    """

    def __init__(self, runway_factor: float, stale_ms: int) -> None:
        self._runway_factor, self._stale_ms = runway_factor, stale_ms
        self._pools: dict[str, dict[str, Worker]] = {}  # pool -> name -> worker, names sorted
        self._runways: dict[tuple[str, int], _Runway] = {}
        self._owners: dict[tuple[str, int], Worker] = {}

    def seen(self, status: EngineStatus, now_ms: int) -> None:
        """Take in a snapshot; an older one, or one heard already, changes nothing.

        One that is older by far is news: the clock of its host was set back.
        """
        pool = self._pools.setdefault(status.pool, {})
        known = pool.get(status.worker)
        if known is not None and 0 <= known.status.updated_at_ms - status.updated_at_ms <= self._stale_ms:
            return
        for partition, position in status.positions.items():
            runway = self._runways.get((status.pool, partition))
            while runway and runway.offsets and runway.offsets[0] < position:
                runway.offsets.popleft()
        on_the_way = sum(len(self._runways.get((status.pool, p), ())) for p in status.partitions)
        limit = min(max(int(status.slots * self._runway_factor), 1), UNFINISHED_MAX)
        worker = Worker(status, now_ms, limit, status.running + status.queue_depth + on_the_way)
        pool[status.worker] = worker
        if known is None:
            self._pools[status.pool] = dict(sorted(pool.items()))
        for partition in status.partitions:
            self._owners[status.pool, partition] = worker

    def sending(self, pool: str, partition: int) -> None:
        """A record is on its way to a partition."""
        self._runways.setdefault((pool, partition), _Runway()).unacknowledged += 1
        self._count(pool, partition, 1)

    def sent(self, pool: str, partition: int, offset: int | None) -> None:
        """It is there, at that offset; or it never came, or nobody knows (None)."""
        runway = self._runways[pool, partition]
        runway.unacknowledged -= 1
        owner = self._owners.get((pool, partition))
        if offset is None or (owner is not None and offset < owner.status.positions.get(partition, 0)):
            self._count(pool, partition, -1)
        else:
            runway.offsets.append(offset)

    def least_loaded(self, pool: str, now_ms: int, excluded: Excluded | None = None) -> Worker | None:
        """Pick the live worker with room whose share is least; ties go by name.

        Args:
            pool: Where to look.
            now_ms: Unix time.
            excluded: Who has handed the request back.
        """
        best, least, since = None, 1.0, now_ms - self._stale_ms
        for worker in self._pools.get(pool, {}).values():
            share = worker.load / worker.limit
            if share < least and since <= worker.heard_ms <= now_ms and worker.partition is not None:
                status = worker.status
                if status.is_healthy and (excluded is None or not _concerns(excluded, status)):
                    best, least = worker, share
        return best

    def is_served(self, pool: str, now_ms: int, excluded: Excluded | None = None) -> bool:
        """Whether a pool has a live worker beside the excluded one, with room or without."""
        since = now_ms - self._stale_ms
        for worker in self._pools.get(pool, {}).values():
            status, is_live = worker.status, since <= worker.heard_ms <= now_ms and worker.partition is not None
            if is_live and status.is_healthy and (excluded is None or not _concerns(excluded, status)):
                return True
        return False

    def workers(self, pool: str) -> Iterable[Worker]:
        """The workers of a pool, live or not, by name."""
        return self._pools.get(pool, {}).values()

    def _count(self, pool: str, partition: int, change: int) -> None:
        owner = self._owners.get((pool, partition))
        if owner is not None:
            owner.load += change


def _concerns(excluded: Excluded, status: EngineStatus) -> bool:
    if excluded.worker is None:
        return status.epoch <= excluded.epoch
    return (status.worker, status.epoch) == (excluded.worker, excluded.epoch)
