"""The plugins of the default policy. Its numbers are those of `[routing]`."""

from dispatcher.core.fleet import Worker, concerns
from dispatcher.core.item import Demand, Item
from dispatcher.core.routing.catalog import PoolFacts
from dispatcher.core.routing.plugins import Candidate, Context, engine_filter, preference, scorer
from schemas.messages import AUTO, EngineKind

# -- filters: why not ---------------------------------------------------------------------------------------------


@engine_filter("model", per="demand")
def serves_model(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It serves the model, or may stand in as far as `fallback` allows."""
    return None if pool.name in context.question.ranks else f"serves {pool.model}, and may not stand in"


@engine_filter("context", per="demand")
def takes_context(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """The prompt fits, or no engine that may serve it takes more: then its tokenizer has the last word."""
    limit = worker.status.max_context
    if limit is None or limit >= demand.context or limit >= context.question.context_max:
        return None
    return f"takes {limit} tokens"


@engine_filter("features", per="demand")
def has_features(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It has what the request needs, or no engine that may serve it has: then it says so itself."""
    if not demand.features or not worker.status.features or not context.question.has_features:
        return None
    lacking = [name for name in demand.features if name not in worker.status.features]
    return f"has no {', '.join(lacking)}" if lacking else None


@engine_filter("healthy", per="demand")
def is_healthy(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It says that it is well."""
    return None if worker.status.is_healthy else "says that it is not well"


@engine_filter("fresh", per="demand")
def is_fresh(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It was heard of lately."""
    return None if worker.is_fresh else "was not heard of lately"


@engine_filter("untried", per="demand")
def is_untried(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It did not hand the request back."""
    excluded = context.question.passed_over.get(pool.name)
    return "handed it back" if excluded is not None and concerns(excluded, worker.status) else None


@engine_filter("unpaused", per="demand")
def is_unpaused(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """Its pool is not paused."""
    return "is paused" if context.settings_of(pool.name).paused else None


@engine_filter("breaker", per="demand")
def is_trusted(demand: Demand, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """It did not fail over and over."""
    epochs = {name: beside.status.epoch for name, beside in worker.pool.workers.items() if beside.is_fresh}
    if context.breakers.allows(pool.name, worker.status.worker, epochs):
        return None
    return "failed over and over, and is left alone for a while"


@engine_filter("rate", per="request")
def is_within_rate(request: Item, pool: PoolFacts, worker: Worker, context: Context) -> str | None:  # noqa: ARG001
    """Its pool's rate is not used up."""
    return None if context.rates.allows(pool.name, context.now_ms) else "its rate is used up"


# -- preferences: which kind ---------------------------------------------------------------------------------------


@preference("hint")
def hinted(request: Item, context: Context) -> EngineKind | None:  # noqa: ARG001
    """The kind that the request names."""
    hint = request.demand.hint
    return None if hint == AUTO else hint


@preference("long_context")
def for_long_context(request: Item, context: Context) -> EngineKind | None:
    """`long_context_kind` for a long prompt, unless that is beyond what it was trained for."""
    routing, tokens = context.routing, request.input_tokens
    if tokens <= routing.long_context_tokens:
        return None
    kind = routing.long_context_kind
    return kind if context.question.reach.get(kind, 0) > tokens else None


@preference("low_latency")
def for_low_latency(request: Item, context: Context) -> EngineKind | None:
    """`low_latency_kind` for a request that wishes for a short latency."""
    routing = context.routing
    if request.slo_ms is None or request.slo_ms >= routing.low_latency_ms:
        return None
    kind = routing.low_latency_kind
    return kind if kind in context.question.reach else None


# -- scorers: milliseconds; `router.py` reckons the four that are asked most in one go -----------------------------------


@scorer("wait", per="request")
def wait(request: Item, candidate: Candidate, context: Context) -> float:  # noqa: ARG001
    """Until it runs."""
    return candidate.wait_ms


@scorer("run", per="pool")
def run(request: Item, candidate: Candidate, context: Context) -> float:  # noqa: ARG001
    """From its start to its end."""
    return candidate.prediction.run_ms


@scorer("slo", per="pool")
def slo(request: Item, candidate: Candidate, context: Context) -> float:
    """By how much it is predicted to miss the latency that it wishes for, its age included."""
    if request.slo_ms is None:
        return 0.0
    age_ms = context.now_ms - request.envelope.received_at_ms
    return max(age_ms + candidate.wait_ms + candidate.prediction.run_ms - request.slo_ms, 0.0)


@scorer("untrained_context", per="pool")
def untrained_context(request: Item, candidate: Candidate, context: Context) -> float:
    """The prompt is longer than what the model was trained for."""
    trained = candidate.worker.status.trained_context
    return 0.0 if trained is None or request.input_tokens <= trained else context.routing.untrained_context_ms


@scorer("memory_pressure", per="snapshot")
def memory_pressure(worker: Worker, context: Context) -> float:
    """The GPU's memory or the cache is nearly full."""
    status, routing = worker.status, context.routing
    used, total = status.gpu_mem_used_bytes, status.gpu_mem_total_bytes
    share = used / total if used is not None and total else 0.0
    over = max(share, status.kv_cache_usage or 0.0) - routing.memory_pressure_from
    if over <= 0:
        return 0.0
    return routing.memory_pressure_ms * min(over / max(1.0 - routing.memory_pressure_from, 1e-9), 1.0)


@scorer("temperature", per="snapshot")
def temperature(worker: Worker, context: Context) -> float:
    """The GPU is hot and is expected to slow down."""
    celsius, routing = worker.status.gpu_temperature_c, context.routing
    if celsius is None or celsius <= routing.temperature_from_c:
        return 0.0
    span = routing.temperature_full_c - routing.temperature_from_c
    return routing.temperature_ms * (min((celsius - routing.temperature_from_c) / span, 1.0) if span > 0 else 1.0)
