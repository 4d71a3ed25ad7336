"""What the configuration says of pools: their kinds and models, and who may serve what is asked for.

A name that a request asks for is a model, an engine's alias, a configured alias, or a class of equivalents. The pools that
may answer it stand in tiers:

    0   those that serve it; a class is served by each of its models
    1   those that serve an equivalent of it, unless `fallback` is `none`
    2.. those of other models where `fallback` is `any`, one tier for each kind in the order of `routing.degradation`

With `fallback` = `none` a hint binds. Simulated engines answer who asks for one, and `auto` where there are no others; they
never stand in for real ones, nor real ones for them.
"""

from collections.abc import Iterable
from typing import NamedTuple

from dispatcher.core.item import Demand
from schemas.config import SIMULATED, Config
from schemas.errors import ErrorCode
from schemas.messages import AUTO, EngineKind, ErrorInfo
from schemas.policy import PoolSettings

SERVES, EQUIVALENT, STANDS_IN = range(3)
NO_POOL = "no_pool"


class PoolFacts(NamedTuple):
    """What the configuration says of a pool.

    Attributes:
        model: What its engines run.
        names: The model and the engines' own aliases for it.
        loras: Adapters of the model, each asked for as a model.
        settings: Rates and whether it is paused, unless steered otherwise.
    """

    name: str
    kind: EngineKind
    model: str
    names: frozenset[str]
    is_simulated: bool
    settings: PoolSettings
    loras: frozenset[str] = frozenset()


class Catalog:
    """Knows the pools and who may serve whom.

    Args:
        config: Engines, aliases, equivalents, and the order of degradation.

    Attributes:
        pools: By name, sorted.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._classes = config, config.equivalents
        self._order = config.routing.degradation
        found: dict[str, PoolFacts] = {}
        for name in sorted(config.engines):
            engine, pool = config.engines[name], config.pool(name)
            facts = found.get(pool)
            if facts is None:
                known = engine.kind, engine.model, engine.names, engine.is_simulated, engine.settings, engine.loras
                found[pool] = PoolFacts(pool, *known)
            else:
                found[pool] = facts._replace(names=facts.names | engine.names)
        self.pools = dict(sorted(found.items()))
        self.kinds = {facts.kind for facts in self.pools.values()}
        if any(facts.is_simulated for facts in self.pools.values()):
            self.kinds.add(SIMULATED)
        models = {name for facts in self.pools.values() for name in facts.names | facts.loras}
        self._names = models | config.aliases.keys() | self._classes.keys()

    def resolve(self, model: str) -> str:
        """Follow the configured aliases of a name to a model, an engine's alias or a class."""
        return self._config.resolve(model)

    def ranks(self, demand: Demand) -> dict[str, int]:
        """Say which pools may answer a demand, and in which tier each stands, by name; the context is not looked at."""
        asked = self._config.meant(demand.model)
        serving = self._serving(demand, asked)
        hinted = [facts for facts in serving if _is_hinted(facts, demand.hint)]
        if demand.fallback == "none":
            return {facts.name: SERVES for facts in hinted}
        ranks = {facts.name: SERVES for facts in serving}
        # What is real is stood in for by what is real.
        simulated = bool(serving) and all(facts.is_simulated for facts in serving)
        others = [facts for facts in self.pools.values() if facts.name not in ranks and facts.is_simulated is simulated]
        equal = self._equivalents(asked | {facts.model for facts in serving if asked & facts.names})
        ranks |= {facts.name: EQUIVALENT for facts in others if facts.names & equal}
        if demand.fallback == "any" and serving:
            left = [facts for facts in others if facts.name not in ranks]
            order = [*self._order, *sorted({facts.kind for facts in left} - set(self._order))]
            ranks |= {facts.name: STANDS_IN + order.index(facts.kind) for facts in left}
        return {name: ranks[name] for name in self.pools if name in ranks}

    def refusal(self, demand: Demand) -> ErrorInfo | None:
        """Say why no engine will ever serve a demand, or None."""
        model = self.resolve(demand.model)
        if model != AUTO and model not in self._names:
            message = f"no engine serves model {demand.model!r}: known are {', '.join(sorted(self._names))}"
            return ErrorInfo(ErrorCode.MODEL_NOT_FOUND, message, "model")
        if demand.hint not in {AUTO, *self.kinds}:
            message = f"no engine of kind {demand.hint!r}: known are {', '.join(sorted(self.kinds))}"
            return ErrorInfo(ErrorCode.INVALID_REQUEST, message, "routing_hint")
        if not self.ranks(demand):
            message = f"no engine of kind {demand.hint!r} serves model {demand.model!r}, and `fallback` is `none`"
            return ErrorInfo(ErrorCode.MODEL_NOT_FOUND, message, "routing_hint")
        return None

    def _serving(self, demand: Demand, asked: frozenset[str]) -> list[PoolFacts]:
        pools = self.pools.values()
        if demand.model != AUTO:
            return [facts for facts in pools if (facts.names | facts.loras) & asked]
        serving = [facts for facts in pools if not facts.is_simulated]
        if not serving or demand.hint == SIMULATED:  # simulated answers never pass for real ones
            serving = [facts for facts in pools if facts.is_simulated]
        return serving

    def _equivalents(self, models: Iterable[str]) -> frozenset[str]:
        models = set(models)
        return frozenset(model for names in self._classes.values() if models & set(names) for model in names)


def _is_hinted(facts: PoolFacts, hint: str) -> bool:
    return hint in {AUTO, facts.kind} or (hint == SIMULATED and facts.is_simulated)
