"""What is worked out once for all requests of a demand, until something other than load changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct

from dispatcher.core.fleet import FULL, Fleet, Pool, Worker
from dispatcher.core.item import Demand, Excluded
from dispatcher.core.prediction import Prediction
from dispatcher.core.routing.catalog import SERVES, Catalog, PoolFacts
from dispatcher.core.routing.plugins import Context, Plugin, Question
from schemas.messages import EngineKind, Placement

KEYS: tuple[Callable[[Worker], float], ...] = attrgetter("interactive_key"), attrgetter("batch_key")
WAITS: tuple[Callable[[Worker], float], ...] = attrgetter("interactive_wait_ms"), attrgetter("batch_wait_ms")
WHY_FULL = "full"
WHY_MODEL = "model"
WHY_NOBODY = "fresh"  # no worker was ever heard of
ANY_PROMPT = float("inf")


class Row:
    """Workers of one pool that some demands may go to, and which of them is the best for each class.

    Attributes:
        keys: Of the best worker, for interactive and batch; `FULL` where there is no room.
        stamps: Of the pool, when it was found out.
    """

    __slots__ = ("best", "keys", "pool", "stamps", "workers")

    def __init__(self, pool: Pool, workers: tuple[Worker, ...]) -> None:
        self.pool, self.workers = pool, workers
        self.best: list[Worker] = [workers[0], workers[0]]
        self.keys = [FULL, FULL]
        self.stamps = [-1, -1]

    def refresh(self, of_class: int) -> None:
        """Find the best worker anew; the first by name of those that are alike."""
        key = KEYS[of_class]
        best = min(self.workers, key=key)
        self.best[of_class], self.keys[of_class], self.stamps[of_class] = best, key(best), self.pool.stamp


class Stand:
    """A pool as it stands to a demand.

    Attributes:
        rank: Its tier.
        has_rate: Whether it may be sent only so much.
    """

    __slots__ = ("facts", "has_rate", "kind", "name", "rank", "row")

    def __init__(self, facts: PoolFacts, rank: int, row: Row, *, has_rate: bool) -> None:
        self.facts, self.rank, self.row, self.has_rate = facts, rank, row, has_rate
        self.name, self.kind = facts.name, facts.kind


class Plan:
    """Where the requests of a demand may go.

    Attributes:
        version: What it was made of.
        stands: The best tier first; in it by name.
        why: Pools that may answer and take nobody, or are full -> why; and so for the kinds of those that serve it.
    """

    __slots__ = ("question", "serving", "stands", "version", "why")

    def __init__(self, version: int, question: Question, stands: Sequence[Stand], why: Mapping[str, str]) -> None:
        self.version, self.question, self.stands, self.why = version, question, tuple(stands), why
        self.serving = next((name for name, rank in question.ranks.items() if rank == SERVES), None)


class Choice(Struct, frozen=True, gc=False):
    """Where a request goes.

    Attributes:
        pool: The pool.
        worker: Its worker.
        placement: Why.
        prediction: Of its run, from its start.
        cost_ms: Engine time: the run's, divided by the worker's slots.
    """

    pool: str
    worker: Worker
    placement: Placement
    prediction: Prediction
    cost_ms: float


Open = tuple[Stand, Worker]  # a pool, and the best of its workers with room; a plain tuple, for speed


class Planner:
    """Makes plans.

    Args:
        catalog: The pools.
        fleet: Their workers.
        filters: Those that look at the demand only.
        context: What they look at.
        has_rate: Whether a pool may be sent only so much.
    """

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        filters: Sequence[Plugin],
        context: Context,
        has_rate: Callable[[str], bool],
    ) -> None:
        self._catalog, self._fleet, self._filters, self._context = catalog, fleet, filters, context
        self._has_rate = has_rate
        self._rows: dict[tuple[str, tuple[Worker, ...]], Row] = {}
        self._rows_version = -1

    def make(self, demand: Demand, version: int) -> Plan:
        """Make the plan of a demand as things stand."""
        if version != self._rows_version:
            self._rows.clear()
            self._rows_version = version
        question = self.question(demand)
        self._context.question = question
        stands, why = [], {}
        for name, facts in self._catalog.pools.items():
            workers, reason = self._passing(demand, facts)
            rank = question.ranks.get(name, SERVES if workers else None)
            if rank is None:
                continue
            why[name] = reason
            if rank == SERVES and why.get(facts.kind) != WHY_FULL:
                why[facts.kind] = reason
            if workers:
                stands.append(Stand(facts, rank, self._row(name, workers), has_rate=self._has_rate(name)))
        stands.sort(key=lambda stand: (stand.rank, stand.name))
        return Plan(version, question, stands, why)

    def question(self, demand: Demand) -> Question:
        """Say what is asked with a demand."""
        ranks = self._catalog.ranks(demand)
        contexts = [limit for name in ranks if (limit := self._fleet.pool(name).max_context) is not None]
        needed = set(demand.features)
        has_features = not needed or any(
            not worker.status.features or needed <= set(worker.status.features)
            for name in ranks
            for worker in self._fleet.workers(name)
        )
        reach: dict[EngineKind, float] = {}
        for name, rank in ranks.items():
            if rank == SERVES:
                kind = self._catalog.pools[name].kind
                reach[kind] = max(reach.get(kind, 0), _reach(self._fleet.pool(name)))
        passed_over = self._passed_over(demand, ranks) if demand.excluded else {}
        return Question(demand, ranks, max(contexts, default=0), has_features, passed_over, reach)

    def _passing(self, demand: Demand, facts: PoolFacts) -> tuple[tuple[Worker, ...], str]:
        """The workers of a pool that all filters let pass, with why there is none, or that they are full."""
        passing, furthest, why = [], -1, WHY_NOBODY
        for worker in self._fleet.workers(facts.name):
            for place, plugin in enumerate(self._filters):
                if plugin.ask(demand, facts, worker, self._context) is not None:
                    if place > furthest:
                        furthest, why = place, plugin.name
                    break
            else:
                passing.append(worker)
        return tuple(passing), WHY_FULL if passing else why

    def _row(self, name: str, workers: tuple[Worker, ...]) -> Row:
        row = self._rows.get((name, workers))
        if row is None:
            row = self._rows[name, workers] = Row(workers[0].pool, workers)
        return row

    def _passed_over(self, demand: Demand, pools: Iterable[str]) -> dict[str, Excluded]:
        """Who is not asked: all who handed it back. Where nobody else is there, who did so longest ago is asked again.

        A worker that lives may be over what it handed requests back for; what holds for a whole pool holds for good.
        """
        excluded = {one.pool: one for one in demand.excluded}
        for one in demand.excluded:
            if any(self._fleet.is_served(pool, excluded.get(pool)) for pool in pools):
                break
            if one.worker is not None:
                del excluded[one.pool]
        return excluded


def _reach(pool: Pool) -> float:
    """The longest prompt that a pool was trained for and takes."""
    limits = [limit for limit in (pool.max_context, pool.trained_context) if limit is not None]
    return min(limits, default=ANY_PROMPT)
