"""Why a request goes where it goes: every plugin asked about every worker, and the choice that follows.

This asks afresh what `Router.pick` keeps; both then go through `Router.choose`, and must come to the same choice.
"""

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from dispatcher.core.fleet import BUSY_MS, FULL, Worker
from dispatcher.core.item import Item
from dispatcher.core.routing.catalog import EQUIVALENT, SERVES, PoolFacts
from dispatcher.core.routing.plans import Open, Plan, Row, Stand
from dispatcher.core.routing.plugins import Candidate, Plugin
from schemas.messages import Placement

if TYPE_CHECKING:
    from dispatcher.core.routing.router import Router

Tier = Literal["serves", "equivalent", "stands_in", "none"]
Room = Literal["free", "runway", "full"]


class Score(Struct, frozen=True):
    """What one scorer says; it counts as value x weight."""

    value_ms: float
    weight: float


class WorkerView(Struct, frozen=True):
    """One worker, seen by one request.

    Attributes:
        filters: Filter -> why not, or None where it lets the worker pass.
        room: Whether a slot is free for the request's class, or only its runway.
        load: Of its `limit`.
        wait_ms: What the request would wait there.
        scores: Scorer -> what it says.
        cost_ms: All of them, weighted.
    """

    worker: str
    filters: dict[str, str | None]
    room: Room
    load: int
    limit: int
    slots: int
    wait_ms: float
    ttft_ms: float
    run_ms: float
    run_p90_ms: float
    scores: dict[str, Score]
    cost_ms: float

    @property
    def passes(self) -> bool:
        """Whether all filters let it pass."""
        return all(why is None for why in self.filters.values())


class PoolView(Struct, frozen=True):
    """One pool, seen by one request."""

    pool: str
    kind: str
    tier: Tier
    workers: list[WorkerView]


class Explanation(Struct, frozen=True):
    """Why a request goes where it goes.

    Attributes:
        model: What is asked for, aliases followed.
        input_tokens: Estimated.
        preferences: Preference -> the kind that it names; the first that names one is followed.
        pools: All there are, by name.
        pool: Where it goes; None where nobody can take it now.
        placement: Why there.
        cost_ms: In engine time, as it is charged.
    """

    id: str
    tenant: str
    service_class: str
    model: str
    input_tokens: float
    output_tokens: float
    context: int
    preferences: dict[str, str | None]
    pools: list[PoolView]
    pool: str | None
    worker: str | None
    placement: Placement | None
    cost_ms: float | None


def explain(router: "Router", item: Item, now_ms: int) -> Explanation:
    """Explain what a router would do with a request; changes nothing.

    Args:
        router: Who would choose.
        item: The request, with the router's demand.
        now_ms: Unix time.
    """
    plan = router.plan_of(item.demand, now_ms)
    context = router.context
    context.now_ms, context.question = now_ms, plan.question
    preferences = {one.name: one.ask(item, context) for one in router.preferences}
    pools: list[PoolView] = []
    found: list[tuple[float, Open]] = []
    for facts in router.catalog.pools.values():
        rank = plan.question.ranks.get(facts.name, SERVES)
        workers: list[WorkerView] = []
        best: tuple[float, Open] | None = None
        for worker in router.fleet.workers(facts.name):
            stand = Stand(facts, rank, Row(worker.pool, (worker,)), has_rate=False)
            view = _view(router, item, stand, worker)
            workers.append(view)
            key = router.standing_ms(item, stand, worker)
            if view.passes and key < (FULL if best is None else best[0]):
                best = key, (stand, worker)
        pools.append(PoolView(facts.name, facts.kind, _tier(facts, plan), workers))
        if best is not None:
            found.append(best)
    found.sort(key=lambda one: (one[1][0].rank, one[1][0].name))
    free, busy = ([one for key, one in found if (key < BUSY_MS) is is_free] for is_free in (True, False))
    choice = router.choose(item, plan, free, busy, now_ms)
    return Explanation(
        item.envelope.id,
        item.tenant,
        item.service_class,
        item.demand.model,
        item.input_tokens,
        item.output_tokens or item.max_output_tokens,
        item.demand.context,
        preferences,
        pools,
        None if choice is None else choice.pool,
        None if choice is None else choice.worker.status.worker,
        None if choice is None else choice.placement,
        None if choice is None else choice.cost_ms,
    )


def _view(router: "Router", item: Item, stand: Stand, worker: Worker) -> WorkerView:
    facts, context = stand.facts, router.context
    filters = {one.name: _verdict(one, item, facts, worker, router) for one in router.filters}
    prediction, wait_ms = router.predict(item, worker), worker.wait_ms(item.service_class)
    candidate = Candidate(facts, worker, wait_ms, prediction)
    scores = {}
    for one, weight in router.scorers:
        value = one.ask(worker, context) if one.per == "snapshot" else one.ask(item, candidate, context)
        scores[one.name] = Score(value, weight)
    key = worker.key(item.service_class)
    return WorkerView(
        worker.status.worker,
        filters,
        "full" if key == FULL else "free" if key < BUSY_MS else "runway",
        worker.load,
        worker.limit,
        worker.slots,
        wait_ms,
        prediction.ttft_ms,
        prediction.run_ms,
        prediction.run_p90_ms,
        scores,
        router.cost_ms(item, stand, worker, prediction, context.now_ms),
    )


def _verdict(one: Plugin, item: Item, facts: PoolFacts, worker: Worker, router: "Router") -> str | None:
    asked = item.demand if one.per == "demand" else item
    verdict: str | None = one.ask(asked, facts, worker, router.context)
    return verdict


def _tier(facts: PoolFacts, plan: Plan) -> Tier:
    rank = plan.question.ranks.get(facts.name)
    if rank is None:
        return "none"
    return "serves" if rank == SERVES else "equivalent" if rank == EQUIVALENT else "stands_in"
