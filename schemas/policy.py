"""The configuration of the dispatcher's mind: shares and rates, admission, lanes, routing, breakers, engines' profiles.

A rate without a value is no bound. Tokens are those of prompt and output together.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from schemas.messages import EngineKind

Positive = Annotated[int, Meta(ge=1, le=2**53)]
NotNegative = Annotated[int, Meta(ge=0, le=2**53)]
Rate = Annotated[float, Meta(gt=0, le=1e12)]
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1_000.0  # so that of no two tenants the tags of one are lost in rounding beside the other's
Weight = Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)]
Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Factor = Annotated[float, Meta(ge=0, le=1_000_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Celsius = Annotated[float, Meta(ge=-50, le=200)]
PluginName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
ModuleName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.]{0,255}\Z")]

FILTERS = ("model", "context", "features", "healthy", "fresh", "untried", "unpaused", "rate", "breaker")
PREFERENCES = ("hint", "long_context", "low_latency")
SCORERS = ("wait", "run", "memory_pressure", "slo", "temperature", "untrained_context")


class TenantConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant's share and bounds.

    Attributes:
        weight: Share beside other backlogged tenants of its class; by default in proportion to `tokens_per_s` (1 for the
            mean of those that tenants are guaranteed), and 1 where nothing is guaranteed.
        requests_per_s: Guaranteed: so much goes before whatever others borrow.
        tokens_per_s: Guaranteed.
        requests_per_s_max: No more than that, however idle the engines are.
        tokens_per_s_max: No more than that.
        burst_s: Seconds' worth of a rate that may be saved up.
        queue_max: Requests that may wait, those in lanes included; more are rejected.
        paused: Nothing of it is dispatched.
    """

    weight: Weight | None = None
    requests_per_s: Rate | None = None
    tokens_per_s: Rate | None = None
    requests_per_s_max: Rate | None = None
    tokens_per_s_max: Rate | None = None
    burst_s: Seconds = 2.0
    queue_max: Positive | None = None
    paused: bool = False


class PoolSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What may be changed of an engine's pool while it runs; see `EngineConfig`."""

    requests_per_s_max: Rate | None = None
    tokens_per_s_max: Rate | None = None
    burst_s: Seconds = 2.0
    paused: bool = False


class ClassConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The share of a service class; class weights stand above tenant weights.

    Attributes:
        interactive_head_start_ms: Engine time by which interactive may run ahead of its share before batch has its turn.
    """

    interactive_weight: Weight = 4.0
    batch_weight: Weight = 1.0
    interactive_head_start_ms: Milliseconds = 10_000.0


class CellConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of everything together: what tenants are guaranteed comes out of this, and what is left of it is borrowed."""

    requests_per_s_max: Rate | None = None
    tokens_per_s_max: Rate | None = None
    burst_s: Seconds = 2.0


class LanesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a tenant's requests wait in a lane of their own instead of in memory.

    Attributes:
        records_max: Requests of one tenant and class that are held in memory.
        bytes_max: Their bytes.
        hold_ms: A request that keeps a partition's position back for so long moves to a lane.
    """

    records_max: Positive = 200
    bytes_max: Positive = 32 * 2**20
    hold_ms: Positive = 60_000


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is refused at once.

    Attributes:
        deadline: Whether a request is refused whose deadline no engine is predicted to meet.
        queue_max: Requests of one tenant that may wait, where the tenant's own setting does not say.
    """

    deadline: Literal["refuse", "serve"] = "refuse"
    queue_max: Positive | None = None


class BreakerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker or a whole pool is left alone for a while; a client's fault never counts.

    Attributes:
        failures: In a row.
        open_ms: Left alone for so long, then probed; twice as long after each probe that fails.
        probes: Requests at once while it is being probed; after a success twice as many, up to its limit.
    """

    failures: Positive = 5
    open_ms: Positive = 2_000
    open_ms_max: Positive = 60_000
    probes: Positive = 1


class RoutingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Filter -> prefer -> score -> pick; every name is that of a plugin, and every number of the default policy is here.

    Attributes:
        plugins: Modules that register more plugins.
        filters: All must let an engine pass.
        preferences: The first that names a kind of engine decides which is preferred.
        scorers: Weights of the costs, in milliseconds, that are added up where no preferred engine has room; least wins.
        long_context_tokens: Longer prompts prefer `long_context_kind`.
        low_latency_ms: A request with a shorter `slo_latency_ms` prefers `low_latency_kind`.
        preferred_load_max: A preferred engine is taken only while its load is below so much of its limit.
        degradation: In which order kinds stand in for another model.
        memory_pressure_from: Share of a GPU's memory from which on it costs.
        memory_pressure_ms: Cost at full memory.
        temperature_from_c: From here a GPU is expected to slow down.
        temperature_full_c: Cost is full here.
        temperature_ms: The full cost.
        untrained_context_ms: Cost of a prompt beyond the length that the model was trained for.
    """

    plugins: list[ModuleName] = field(default_factory=list)
    filters: list[PluginName] = field(default_factory=lambda: list(FILTERS))
    preferences: list[PluginName] = field(default_factory=lambda: list(PREFERENCES))
    scorers: dict[PluginName, Factor] = field(default_factory=lambda: dict.fromkeys(SCORERS, 1.0) | {"slo": 5.0})
    long_context_tokens: Positive = 32_000
    long_context_kind: EngineKind = "ssm"
    low_latency_ms: Positive = 100
    low_latency_kind: EngineKind = "moe"
    preferred_load_max: Annotated[float, Meta(gt=0, le=1)] = 1.0
    degradation: list[EngineKind] = field(default_factory=lambda: ["moe", "transformer", "ssm"])
    memory_pressure_from: Share = 0.85
    memory_pressure_ms: Milliseconds = 2_000.0
    temperature_from_c: Celsius = 80.0
    temperature_full_c: Celsius = 90.0
    temperature_ms: Milliseconds = 2_000.0
    untrained_context_ms: Milliseconds = 5_000.0


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is believed of an engine's speed until it is known; by default that of its kind.

    Time to the first token = ttft_ms + prefill_ms_per_1k * n / 1000 + prefill_quadratic_ms * (n / 1000)^2 for a prompt of n
    tokens; time per token = tpot_ms + tpot_batch_ms * (requests beside it) + tpot_kv_ms * (share of the cache in use).
    """

    ttft_ms: Milliseconds | None = None
    prefill_ms_per_1k: Milliseconds | None = None
    prefill_quadratic_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    tpot_batch_ms: Milliseconds | None = None
    tpot_kv_ms: Milliseconds | None = None
