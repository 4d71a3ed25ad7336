"""Where a request may go, in which order, and who of those takes it: filter -> score -> pick.

A demand is answered by tiers of pools: first those that serve the model and are of the kind hinted at, then others
that serve the model, then, where `fallback` allows, stand-ins in the order MoE -> Transformer -> SSM. A later tier is
looked at only when nobody in an earlier one has room.
"""

from collections.abc import Mapping
from typing import Protocol

from dispatcher.core.admission import OF_THE_POOL
from dispatcher.core.fleet import Fleet, Worker
from dispatcher.core.item import Demand, Excluded, Item
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import AUTO, ErrorInfo

STAND_IN_ORDER = ("moe", "transformer", "ssm")
SIMULATED = "sim"


class Policy(Protocol):
    """What the machine asks of a routing policy."""

    def refusal(self, demand: Demand) -> ErrorInfo | None:
        """Say why no engine will ever serve the demand, or None."""

    def pick(self, item: Item, fleet: Fleet, now_ms: int) -> tuple[str, Worker] | None:
        """Choose pool and worker, or None while nobody has room."""

    def final_error(self, item: Item, fleet: Fleet) -> ErrorInfo | None:
        """Say why nobody is left to try the request, or None."""

    def standing(self, item: Item, fleet: Fleet, now_ms: int) -> dict[str, str]:
        """Say what keeps the request from each pool that may serve it: `full`, or `no_worker`."""


class _Pool:
    """What the configuration says of a pool."""

    def __init__(self, name: str, kind: str, models: set[str]) -> None:
        self.name, self.kind, self.models = name, kind, models


class LeastLoaded:
    """The first tier with room; in it, the worker with the least share of its limit in use."""

    def __init__(self, config: Config) -> None:
        self._pools: dict[str, _Pool] = {}
        for name in sorted(config.engines):
            engine = config.engines[name]
            pool = self._pools.setdefault(config.pool(name), _Pool(config.pool(name), engine.kind, set()))
            pool.models |= {engine.model, *engine.aliases}
        self._kinds = {pool.kind for pool in self._pools.values()}
        self._models = {model for pool in self._pools.values() for model in pool.models}
        self._tiers: dict[tuple[str, str, str], tuple[tuple[str, ...], ...]] = {}

    def tiers(self, demand: Demand) -> tuple[tuple[str, ...], ...]:
        """The pools that may serve a demand, best tier first; each pool once."""
        key = demand[:3]
        found = self._tiers.get(key)
        if found is None:
            found = self._make_tiers(demand)
            if found:  # what nobody serves is refused, and not remembered: clients may make up any number of names
                self._tiers[key] = found
        return found

    def refusal(self, demand: Demand) -> ErrorInfo | None:
        """Say why no engine will ever serve the demand, or None."""
        if demand[:3] in self._tiers:
            return None
        if demand.model != AUTO and demand.model not in self._models:
            models = sorted(self._models)
            message = f"no engine serves model {demand.model!r}: known are {', '.join(models)}"
            return ErrorInfo(ErrorCode.MODEL_NOT_FOUND, message, "model")
        if demand.hint not in {AUTO, *self._kinds}:
            message = f"no engine of kind {demand.hint!r}: known are {', '.join(sorted(self._kinds))}"
            return ErrorInfo(ErrorCode.INVALID_REQUEST, message, "routing_hint")
        if not any(self.tiers(demand)):
            message = f"no engine of kind {demand.hint!r} serves model {demand.model!r}, and `fallback` is `none`"
            return ErrorInfo(ErrorCode.MODEL_NOT_FOUND, message, "routing_hint")
        return None

    def pick(self, item: Item, fleet: Fleet, now_ms: int) -> tuple[str, Worker] | None:
        """Choose pool and worker, or None while nobody has room."""
        demand = item.demand
        tiers = self.tiers(demand)
        excluded = _passed_over(demand, tiers, fleet, now_ms) if demand.excluded else {}
        for tier in tiers:
            if len(tier) == 1:
                only = fleet.least_loaded(tier[0], now_ms, excluded.get(tier[0]))
                if only is not None:
                    return tier[0], only
                continue
            found = [(w.share, pool, w) for pool in tier if (w := fleet.least_loaded(pool, now_ms, excluded.get(pool)))]
            if found:
                _, pool, worker = min(found, key=lambda f: f[:2])
                return pool, worker
        return None

    def standing(self, item: Item, fleet: Fleet, now_ms: int) -> dict[str, str]:
        """Say what keeps the request from each pool that may serve it: `full`, or `no_worker`."""
        pools = [pool for tier in self.tiers(item.demand) for pool in tier]
        return {pool: "full" if fleet.is_served(pool, now_ms) else "no_worker" for pool in pools}

    def final_error(self, item: Item, fleet: Fleet) -> ErrorInfo | None:
        """After an engine refused it by its nature: that refusal, unless another may serve, with more context if need be."""
        if not item.envelope.route:
            return None
        refusals = {a.engine: a.error for a in item.envelope.route if a.error is not None and a.error.code in OF_THE_POOL}
        if not refusals:
            return None
        overflowed = [pool for pool, error in refusals.items() if error.code is ErrorCode.CONTEXT_OVERFLOW]
        most = max((_context(fleet, pool) for pool in overflowed), default=-1)
        for tier in self.tiers(item.demand):
            if any(pool not in refusals and _context(fleet, pool) > most for pool in tier):
                return None
        return list(refusals.values())[-1]

    def _make_tiers(self, demand: Demand) -> tuple[tuple[str, ...], ...]:
        pools: Mapping[str, _Pool] = self._pools
        serving = [p for p in pools.values() if demand.model in p.models or (demand.model == AUTO and p.kind != SIMULATED)]
        if demand.model == AUTO and (not serving or demand.hint == SIMULATED):  # simulated answers never pass for real ones
            serving = [p for p in pools.values() if p.kind == SIMULATED]
        hinted = [p.name for p in serving if demand.hint in {AUTO, p.kind}]
        tiers = [hinted]
        if demand.fallback != "none":
            tiers.append([p.name for p in serving if p.name not in hinted])
        if demand.fallback == "any" and any(p.kind != SIMULATED for p in serving):
            others = [p for p in pools.values() if p not in serving and p.kind != SIMULATED]
            for kind in (*STAND_IN_ORDER, *sorted({p.kind for p in others} - set(STAND_IN_ORDER))):
                tiers += [[p.name for p in others if p.kind == kind]]
        return tuple(tuple(tier) for tier in tiers if tier)


def _passed_over(demand: Demand, tiers: tuple[tuple[str, ...], ...], fleet: Fleet, now_ms: int) -> dict[str, Excluded]:
    """Who is not asked: all who handed it back. Where nobody else is there, who did so longest ago is asked again.

    A worker that lives may be over what it handed requests back for; what holds for a whole pool holds for good.
    """
    excluded = {one.pool: one for one in demand.excluded}
    for one in demand.excluded:
        if any(fleet.is_served(pool, now_ms, excluded.get(pool)) for tier in tiers for pool in tier):
            break
        if one.worker is not None:
            del excluded[one.pool]
    return excluded


def _context(fleet: Fleet, pool: str) -> int:
    return max((w.status.max_context or 0 for w in fleet.workers(pool)), default=0)
