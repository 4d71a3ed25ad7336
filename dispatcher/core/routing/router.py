"""Who takes a request: filter -> prefer -> score -> pick.

Filters say which workers may take it, and `catalog.py` in which tiers their pools stand. Then

    1. only workers with a free slot are looked at, or, where there is none, those with room on their runway:
       no request waits on a busy engine while another that may serve it stands idle;
    2. of these, an engine of the kind that a preference names is taken, if it serves the model and its load is below
       `preferred_load_max` of its limit;
    3. otherwise the first tier that has any, and in it the least cost. An engine that stands in for another model is
       passed over where it is predicted to miss the request's deadline.

Workers of one pool are alike, so in a pool the one with the least wait and penalties goes first, the least loaded of those
that are alike; pools are compared by the whole cost of that one: wait + run + penalties, in milliseconds, each weighted by
`routing.scorers`. Ties go by name. `explain` asks every plugin about every worker and must come to the same choice; here
all that does not depend on load is kept until it changes.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import structs

from dispatcher.core.admission import OF_THE_POOL
from dispatcher.core.breaker import Breakers
from dispatcher.core.fleet import BUSY_MS, FULL, Fleet, Worker
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.prediction import Prediction
from dispatcher.core.routing import builtin, plugins
from dispatcher.core.routing.catalog import SERVES, Catalog
from dispatcher.core.routing.explain import Explanation, explain
from dispatcher.core.routing.plans import KEYS, WAITS, WHY_FULL, WHY_MODEL, Choice, Open, Plan, Planner, Stand
from dispatcher.core.routing.plugins import Candidate, Context, Rates
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo, Placement
from schemas.policy import PoolSettings

PLANS_MAX = 4_096  # demands that are remembered; retries make many, and each is of use for a while only
ANSWER_TOKENS_MIN = 1  # must fit beside the prompt
CONTEXT_MIN = 1_024  # where no engine has told its limit yet, longer prompts are told apart by powers of two
COST_MS_MAX = 86_400_000.0  # so that no penalty makes a worker with a free slot look like a busy one

RECKONED = ("wait", "run", "slo", "untrained_context")  # in one go, for speed
_PLAIN = PoolSettings()


class Predictor(Protocol):
    """What routing asks of the predictor."""

    def predict(
        self, pool: str, input_tokens: float, output_tokens: float, beside: float = 0, kv_usage: float | None = None
    ) -> Prediction:
        """Tell what a run would take."""


class Router:
    """Chooses.

    Args:
        config: Engines and policy.
        fleet: The workers; it is told what their snapshots cost.
        predictor: What runs take.
        rates: What pools may be sent.

    Raises:
        ConfigError: A plugin that is configured is not registered.
    """

    def __init__(self, config: Config, fleet: Fleet, predictor: Predictor, rates: Rates) -> None:
        routing = config.routing
        self.catalog = Catalog(config)
        self.breakers = Breakers(config.dispatcher.breaker)
        self.context = Context(routing, self.breakers, rates, self.settings_of)
        self.filters = plugins.find("filter", routing.filters, "routing.filters")
        self.preferences = plugins.find("preference", routing.preferences, "routing.preferences")
        self.scorers = [
            (one, routing.scorers[one.name]) for one in plugins.find("scorer", list(routing.scorers), "routing.scorers")
        ]
        self._config, self.fleet, self._predictor, self._rates = config, fleet, predictor, rates
        self._probes = config.dispatcher.breaker.probes
        self._load_max = routing.preferred_load_max
        self._untrained_ms = routing.untrained_context_ms
        self._prefer = [(one.name, one.ask) for one in self.preferences]
        weights = dict.fromkeys(RECKONED, 0.0) | {one.name: weight for one, weight in self.scorers}
        self._wait_weight, self._run_weight, self._slo_weight, self._untrained_weight = (weights[n] for n in RECKONED)
        self._snapshot_scorers = [(one.ask, weight) for one, weight in self.scorers if one.per == "snapshot"]
        others = [(one, weight) for one, weight in self.scorers if one.per != "snapshot" and one.name not in RECKONED]
        self._pool_scorers = [(one.ask, weight) for one, weight in others if one.per == "pool"]
        self._request_scorers = [(one.ask, weight) for one, weight in others if one.per == "request"]
        asked = [one for one in self.filters if one.per == "request"]
        self._request_filters = [one for one in asked if one.ask is not builtin.is_within_rate]
        self._heeds_rates = len(asked) > len(self._request_filters)
        self._is_plain = not self._request_filters and not self._request_scorers
        self._settings: Mapping[str, PoolSettings] = {}
        self._steered = 0
        self._fleet_version = -1
        static = [one for one in self.filters if one.per == "demand"]
        self._planner = Planner(self.catalog, fleet, static, self.context, self._has_rate)
        self._plans: dict[Demand, Plan] = {}
        self._demands: dict[Demand, Demand] = {}
        self._contexts: list[int] = []
        fleet.judge(self._penalty, self._wait_weight)

    # -- before it waits -------------------------------------------------------------------------------------------------

    def demand(self, item: Item) -> Demand:
        """Say what a request asks of an engine, with its context told apart only as far as engines tell it apart.

        The context is one more than the next lower limit that an engine has: an engine whose limit lies between is not
        ruled out when it comes.
        """
        asked = item.demand
        context = self._context_of(item.input_tokens)
        model = self.catalog.resolve(asked.model)
        is_timed = item.deadline_ms < NEVER_MS
        if context != asked.context or model != asked.model or is_timed is not asked.is_timed:
            asked = Demand(model, asked.hint, asked.fallback, asked.excluded, asked.features, context, is_timed)
        known = self._demands.get(asked)
        if known is None:
            if len(self._demands) >= PLANS_MAX:
                self._demands.clear()
            known = self._demands[asked] = asked
        return known

    def refusal(self, demand: Demand) -> ErrorInfo | None:
        """Say why no engine will ever serve a demand, or None."""
        return None if demand in self._plans else self.catalog.refusal(demand)

    def final_error(self, item: Item) -> ErrorInfo | None:
        """After an engine refused it by its nature: that refusal, unless another may serve, with more context if need be."""
        route = item.envelope.route
        if not route:
            return None
        refusals = {a.engine: a.error for a in route if a.error is not None and a.error.code in OF_THE_POOL}
        if not refusals:
            return None
        overflowed = [pool for pool, error in refusals.items() if error.code is ErrorCode.CONTEXT_OVERFLOW]
        most = max((self.fleet.pool(pool).max_context or 0 for pool in overflowed), default=-1)
        for pool in self.catalog.ranks(item.demand):
            if pool not in refusals and (self.fleet.pool(pool).max_context or 0) > most:
                return None
        return list(refusals.values())[-1]

    def soonest(self, item: Item, now_ms: int) -> Prediction | None:
        """Predict the earliest end that any worker which may take the request offers, waits there included.

        Returns:
            The times from now, or None where no such worker is there, so that nobody can tell.
        """
        plan = self._plan(item.demand, now_ms)
        best: Prediction | None = None
        for stand in plan.stands:
            worker = min(stand.row.workers, key=WAITS[item.service_class == "batch"])
            prediction = self.predict(item, worker)
            if not worker.pool.mean_run_ms:
                self.fleet.believe(worker.pool, prediction.run_ms)
            wait_ms = worker.wait_ms(item.service_class)
            if stand.has_rate:
                wait_ms = max(wait_ms, self._rates.ready_ms(stand.name, now_ms) - now_ms)
            if best is None or wait_ms + prediction.run_ms < best.run_ms:
                best = structs.replace(
                    prediction,
                    ttft_ms=wait_ms + prediction.ttft_ms,
                    run_ms=wait_ms + prediction.run_ms,
                    run_p90_ms=wait_ms + prediction.run_p90_ms,
                )
        return best

    # -- its turn --------------------------------------------------------------------------------------------------------

    def pick(self, item: Item, now_ms: int) -> Choice | None:
        """Choose a worker, or None while nobody has room. What is chosen is meant to be sent: a breaker counts its probes."""
        fleet, breakers = self.fleet, self.breakers
        if not fleet.fresh_from_ms <= now_ms < fleet.fresh_until_ms or now_ms >= breakers.turn_ms:
            self._settle(now_ms)
        plan = self._plans.get(item.demand)
        if plan is None or plan.version != fleet.version + breakers.version + self._steered:
            plan = self._plan(item.demand, now_ms)
        context = self.context
        context.now_ms, context.question = now_ms, plan.question
        if self._is_plain:
            free, busy = self._open(plan, item.envelope.service_class == "batch", now_ms)
        else:
            free, busy = self._asked_one_by_one(item, plan, now_ms)
        if not free and not busy:
            return None
        choice = self.choose(item, plan, free, busy, now_ms)
        if choice is not None:
            if breakers.are_probing:
                breakers.sent(choice.pool, choice.worker.status.worker, now_ms)
            if not choice.worker.pool.mean_run_ms:
                fleet.believe(choice.worker.pool, choice.prediction.run_ms)
        return choice

    def choose(self, item: Item, plan: Plan, free: Sequence[Open], busy: Sequence[Open], now_ms: int) -> Choice | None:
        """Choose among the workers with room, at most one of each pool, the best tier first.

        Args:
            item: The request.
            plan: Its demand's.
            free: Those with a free slot.
            busy: Those with room on their runway only.
            now_ms: Unix time.
        """
        wanted, reason, context = None, "", self.context
        for name, ask in self._prefer:
            wanted = ask(item, context)
            if wanted is not None:
                reason = name
                break
        choice = self._among(item, plan, free, wanted, reason, now_ms) if free else None
        return self._among(item, plan, busy, wanted, reason, now_ms) if choice is None and busy else choice

    def _among(
        self, item: Item, plan: Plan, found: Sequence[Open], wanted: str | None, reason: str, now_ms: int
    ) -> Choice | None:
        """Choose the preferred, or else the cheapest of the first tier that can take it."""
        if wanted is not None:
            preferred = [
                one
                for one in found
                if one[0].kind == wanted and one[0].rank == SERVES and one[1].load < self._load_max * one[1].limit
            ]
            if preferred:
                return self._cheapest(item, plan, preferred, None, reason, now_ms)
        if found[-1][0].rank == SERVES:
            return self._cheapest(item, plan, found, wanted, "", now_ms)
        for rank in sorted({one[0].rank for one in found}):
            tier = [one for one in found if one[0].rank == rank]
            if rank != SERVES and item.deadline_ms < NEVER_MS:
                tier = [one for one in tier if self._is_in_time(item, one[1], now_ms)]
            if tier:
                return self._cheapest(item, plan, tier, wanted, "", now_ms)
        return None

    def predict(self, item: Item, worker: Worker) -> Prediction:
        """Predict a request's run on a worker as it is loaded."""
        load, slots = worker.load, worker.slots
        return self._predictor.predict(
            worker.pool.name,
            item.input_tokens,
            item.output_tokens or item.max_output_tokens,
            load if load < slots else slots - 1,
            worker.status.kv_cache_usage,
        )

    def cost_ms(self, item: Item, stand: Stand, worker: Worker, prediction: Prediction, now_ms: float) -> float:
        """Add up what it costs to send a request to a worker, all scorers weighted."""
        batch = item.envelope.service_class == "batch"
        wait_ms = worker.batch_wait_ms if batch else worker.interactive_wait_ms
        run_ms = prediction.run_ms
        total = worker.penalty_ms + self._wait_weight * wait_ms + self._run_weight * run_ms
        if item.slo_ms is not None:
            late_ms = now_ms - item.envelope.received_at_ms + wait_ms + run_ms - item.slo_ms
            if late_ms > 0:
                total += self._slo_weight * late_ms
        trained = worker.status.trained_context
        if trained is not None and item.input_tokens > trained:
            total += self._untrained_weight * self._untrained_ms
        if self._pool_scorers or self._request_scorers:
            candidate = Candidate(stand.facts, worker, wait_ms, prediction)
            for ask, weight in (*self._pool_scorers, *self._request_scorers):
                total += weight * counted(ask(item, candidate, self.context))
        return total

    def standing_ms(self, item: Item, stand: Stand, worker: Worker) -> float:
        """What orders the workers of a pool for a request; beside its key, what plugins say of this request and worker."""
        key = KEYS[item.service_class == "batch"](worker)
        if self._request_scorers and key < FULL:
            candidate = Candidate(stand.facts, worker, worker.wait_ms(item.service_class), self.predict(item, worker))
            said_ms = sum(weight * counted(ask(item, candidate, self.context)) for ask, weight in self._request_scorers)
            key += min(said_ms, COST_MS_MAX)
        return key

    # -- what happens to pools -------------------------------------------------------------------------------------------

    def completed(self, pool: str, worker: str, epoch: int, code: ErrorCode | None, now_ms: int) -> None:
        """Take in how a run ended: the breakers live on that."""
        self.breakers.settle(now_ms)
        if self.breakers.completed(pool, worker, epoch, code, now_ms):
            known = self.fleet.pool(pool).workers.get(worker)
            if known is not None:
                self.fleet.start_slowly(known, 2 * self._probes)

    def steer(self, pools: Mapping[str, PoolSettings]) -> None:
        """Let these settings stand instead of the configuration's; all that differ are given."""
        self._settings = dict(pools)
        self._steered += 1

    def settings_of(self, pool: str) -> PoolSettings:
        """The settings of a pool as they stand."""
        found = self._settings.get(pool)
        if found is None:
            facts = self.catalog.pools.get(pool)
            found = _PLAIN if facts is None else facts.settings
        return found

    def plan_of(self, demand: Demand, now_ms: int) -> Plan:
        """Where requests of a demand may go, for whoever wants to look."""
        return self._plan(demand, now_ms)

    def explain(self, item: Item, now_ms: int) -> Explanation:
        """Say of every worker why it could take a request or not, what it would cost, and who is chosen; changes nothing."""
        return explain(self, item, now_ms)

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _settle(self, now_ms: int) -> None:
        self.fleet.settle(now_ms)
        self.breakers.settle(now_ms)

    def _plan(self, demand: Demand, now_ms: int) -> Plan:
        fleet = self.fleet
        if not fleet.fresh_from_ms <= now_ms < fleet.fresh_until_ms or now_ms >= self.breakers.turn_ms:
            self._settle(now_ms)
        self._heed_fleet()
        version = fleet.version + self.breakers.version + self._steered
        plan = self._plans.get(demand)
        if plan is None or plan.version != version:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._planner.make(demand, version)
            if plan.question.ranks:  # what nobody serves is refused, and not remembered: clients may make up any names
                self._plans[demand] = plan
        return plan

    def _heed_fleet(self) -> None:
        fleet = self.fleet
        if fleet.version == self._fleet_version:
            return
        self._fleet_version = fleet.version
        for name in self.catalog.pools:
            self.breakers.know(name, {w.status.worker: w.status.epoch for w in fleet.workers(name)})
        limits = {fleet.pool(name).max_context for name in self.catalog.pools}
        self._contexts = sorted(limit for limit in limits if limit is not None)

    def _context_of(self, input_tokens: float) -> int:
        self._heed_fleet()
        needed = int(input_tokens) + ANSWER_TOKENS_MIN
        if not self._contexts:
            return 0 if needed < CONTEXT_MIN else 1 << (needed.bit_length() - 1)
        place = bisect_left(self._contexts, needed)
        return self._contexts[place - 1] + 1 if place else 0

    def _has_rate(self, pool: str) -> bool:
        settings = self.settings_of(pool)
        return self._heeds_rates and (settings.requests_per_s_max is not None or settings.tokens_per_s_max is not None)

    def _penalty(self, worker: Worker) -> float:
        total = 0.0
        for ask, weight in self._snapshot_scorers:
            total += weight * counted(ask(worker, self.context))
        return min(total, COST_MS_MAX)

    def _open(self, plan: Plan, of_class: int, now_ms: int) -> tuple[list[Open], list[Open]]:
        """The best worker of each pool that has room: those with a free slot, and those with a runway only."""
        free: list[Open] = []
        busy: list[Open] = []
        for stand in plan.stands:
            row = stand.row
            if row.stamps[of_class] != row.pool.stamp:
                row.refresh(of_class)
            key = row.keys[of_class]
            if key < FULL and not (stand.has_rate and not self._rates.allows(stand.name, now_ms)):
                (free if key < BUSY_MS else busy).append((stand, row.best[of_class]))
        return free, busy

    def _asked_one_by_one(self, item: Item, plan: Plan, now_ms: int) -> tuple[list[Open], list[Open]]:
        """The same, where plugins want to be asked about each worker."""
        free: list[Open] = []
        busy: list[Open] = []
        for stand in plan.stands:
            if stand.has_rate and not self._rates.allows(stand.name, now_ms):
                continue
            best: Worker | None = None
            least = FULL
            for worker in stand.row.workers:
                if any(one.ask(item, stand.facts, worker, self.context) is not None for one in self._request_filters):
                    continue
                key = self.standing_ms(item, stand, worker)
                if key < least:
                    best, least = worker, key
            if best is not None:
                (free if least < BUSY_MS else busy).append((stand, best))
        return free, busy

    def _is_in_time(self, item: Item, worker: Worker, now_ms: int) -> bool:
        return now_ms + worker.wait_ms(item.service_class) + self.predict(item, worker).run_ms <= item.deadline_ms

    def _cheapest(self, item: Item, plan: Plan, among: Sequence[Open], wanted: str | None, reason: str, now_ms: int) -> Choice:
        stand, worker = among[0]
        prediction = self.predict(item, worker)
        if len(among) == 1:
            reason = reason or "only"
        else:
            reason = reason or "least_cost"
            least = self.cost_ms(item, stand, worker, prediction, now_ms)
            for other, its_worker in among[1:]:
                its = self.predict(item, its_worker)
                cost = self.cost_ms(item, other, its_worker, its, now_ms)
                if cost < least:
                    stand, worker, prediction, least = other, its_worker, its, cost
        wait_ms = worker.batch_wait_ms if item.envelope.service_class == "batch" else worker.interactive_wait_ms
        run_ms, why_not, stands_in = prediction.run_ms, None, stand.rank != SERVES
        if wanted is None:
            if stands_in:
                wanted = plan.serving
        elif stand.kind == wanted:  # it was too full to be preferred, and is the cheapest all the same
            wanted = None
        if wanted is not None:
            why_not = self._why_not(plan, wanted, now_ms)
        placement = Placement(reason, wanted, why_not, stands_in, int(wait_ms + prediction.ttft_ms), int(wait_ms + run_ms))
        cost_ms = run_ms / worker.slots
        return Choice(stand.name, worker, placement, prediction, min(COST_MS_MAX, cost_ms))

    def _why_not(self, plan: Plan, wanted: str, now_ms: int) -> str:
        why = plan.why.get(wanted, WHY_MODEL)
        if why == WHY_FULL:
            stands = [s for s in plan.stands if s.rank == SERVES and wanted in {s.kind, s.name}]
            if stands and all(s.has_rate and not self._rates.allows(s.name, now_ms) for s in stands):
                return "rate"
        return why


def counted(cost_ms: float) -> float:
    """What a plugin's cost counts as: less than nothing, and no number, are nothing; a day is as good as for ever."""
    return min(cost_ms, COST_MS_MAX) if cost_ms > 0 else 0.0
