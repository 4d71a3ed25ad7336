"""The configuration: one `forebay.toml`, read once into frozen structs, any field overridden by the environment.

`FOREBAY_KAFKA__BOOTSTRAP=host:9092` overrides `[kafka] bootstrap`; `environment.py` says how values are read. A bad value
stops the start with its path and what was expected.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from schemas.config_checks import check
from schemas.environment import cause, override
from schemas.errors import ConfigError, InvalidMessage
from schemas.faults import invalid
from schemas.messages import RUN_HOPS_MAX, BlobUrl, EngineKind, ModelName, Tenant
from schemas.policy import (
    AdmissionConfig,
    BreakerConfig,
    CellConfig,
    ClassConfig,
    LanesConfig,
    NotNegative,
    PoolSettings,
    Positive,
    ProfileConfig,
    Rate,
    RoutingConfig,
    Seconds,
    TenantConfig,
    Weight,
)

PoolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Prefix = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Text = Annotated[str, Meta(min_length=1)]
Delivery = Literal["exactly_once", "at_least_once"]

DAY_MS = 86_400_000
RESERVE_FROM_SLOTS = 4
SIMULATED = "sim"
RECORD_BYTES_MAX = 8 * 2**20
OVERHEAD_BYTES = 64 * 1024  # key, headers, batch, and the envelope that is added on the way, around a value


class KafkaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the cluster. The timeouts are those that a chaos run of 200,000 records was happy with."""

    bootstrap: Text = "127.0.0.1:9092"
    topic_prefix: Prefix = "forebay"
    delivery: Delivery = "exactly_once"
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = None
    ssl_cafile: str | None = None
    connect_timeout_ms: Positive = 10_000
    request_timeout_ms: Positive = 15_000  # must exceed the rebalance timeout
    session_timeout_ms: Positive = 6_000
    heartbeat_ms: Positive = 1_000
    rebalance_timeout_ms: Positive = 3_000
    max_poll_interval_ms: Positive = 60_000  # a process that does not poll for so long leaves its group by itself
    transaction_timeout_ms: Positive = 5_000
    retry_backoff_ms: Positive = 5
    record_bytes_max: Positive = RECORD_BYTES_MAX


class RedisConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where engine status and memory leases live, and over which running processes are asked."""

    url: str = "redis://127.0.0.1:6379/0"
    timeout_ms: Positive = 2_000
    questions_per_s_max: Positive = 20  # that a process answers; more are passed over
    answer_bytes_max: Positive = 4 * 2**20


class TopicsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How topics are made; a pool's topic needs at least as many partitions as the pool will ever have workers."""

    request_partitions: Positive = 4
    engine_partitions: Positive = 8
    retry_partitions: Positive = 4
    lane_partitions: Positive = 16
    result_partitions: Positive = 4
    dead_letter_partitions: Positive = 1
    replication: Positive = 1
    min_insync: Positive = 1
    results_retention_ms: Positive = 7 * DAY_MS
    streams_retention_ms: Positive = DAY_MS


class HopConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one consume-and-produce hop.

    `unfinished_max` keeps a partition's ledger inside the 4,096 bytes of a commit's metadata.
    """

    unfinished_max: Annotated[int, Meta(ge=1, le=400)] = 400
    in_flight_max: Positive = 16_000
    in_flight_bytes_max: Positive = 256 * 2**20
    commit_timeout_ms: Positive = 20_000
    recommit_ms: Positive = 3_600_000  # an idle position is written again so often: clusters forget it, most after 7 days


class DispatcherConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The active dispatcher's bounds and patience."""

    hop: HopConfig = field(default_factory=HopConfig)
    runway_factor: Annotated[float, Meta(ge=1, le=16)] = 1.5  # a worker is sent this many times its slots
    status_stale_ms: Positive = 3_000
    status_poll_ms: Positive = 500
    max_attempts: Positive = 3
    max_hops: Annotated[int, Meta(ge=1, le=RUN_HOPS_MAX)] = 100
    retry_backoff_ms: Positive = 500
    retry_backoff_ms_max: Positive = 30_000
    failover_timeout_ms: Positive = 15_000  # a pool without any worker for so long is dead: its requests go elsewhere
    trim_interval_ms: Positive = 60_000  # between two deletions of finished records
    # A cancel outlives the oldest unfinished request by so much: time for requests that were produced before it and are
    # not visible yet (a producer's retries, a transaction of at most 15 minutes), and for clocks that differ.
    control_retention_ms: Positive = 3_600_000
    steered_max: Positive = 1_000  # tenants, and engines, whose settings may differ from these while it runs
    prompt_bytes_max: Positive = 8_000_000
    reply_topics: list[str] = field(default_factory=lambda: ["*.replies", "*-replies"])  # allow-list; shell patterns
    idempotency_window_ms: NotNegative = 600_000  # an id that comes again meanwhile is not run again; 0: it always is
    idempotency_ids_max: Positive = 100_000  # remembered at most, about 200 bytes each
    cell: CellConfig = field(default_factory=CellConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    lanes: LanesConfig = field(default_factory=LanesConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's bounds and rhythm."""

    hop: HopConfig = field(default_factory=HopConfig)
    heartbeat_ms: Positive = 1_000
    chunk_ms: Positive = 25
    chunk_bytes_max: Positive = 4_096
    drain_ms: Positive = 20_000
    stall_timeout_ms: Positive = 120_000  # a run that gives nothing for so long is ended and tried again
    abort_timeout_ms: Positive = 10_000  # an engine that does not let go of a run for so long hangs, and is started anew
    poison_crashes: Annotated[int, Meta(ge=3, le=7)] = 4  # of worker or engine; from the third on only while it ran alone


class BlobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where inputs and outputs lie that are too large for a record; without a store there are none.

    Attributes:
        store: Where we write them: `file:///srv/forebay` on a file system that all share, `s3://bucket/prefix`, or
            another that fsspec knows.
        readable: Beginnings of URLs, beside the store, from which requests may name an input.
        bytes_max: Larger ones are refused.
        options: Passed to fsspec: credentials, an endpoint.
    """

    store: BlobUrl | None = None
    readable: list[BlobUrl] = field(default_factory=list)
    bytes_max: Positive = 256 * 2**20
    timeout_ms: Positive = 30_000
    options: dict[str, Any] = field(default_factory=dict)


Share = Literal["time", "tokens"]


class TimeSlicesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's part in a device that it shares with other engines on the same host.

    Attributes:
        device: Any name; engines that give the same one take turns.
        weight: Share of the device beside others that want it at the same moment; each worker has as much.
        share_of: What the weights share out: the device's `time`, which suits unlike engines, or the `tokens` that are computed,
            those of prompts too, which suits engines of one model. All at a device give the same.
        slice_ms: The turn ends with the first step that ends after so long, where another is due.
        patience_ms: One that shows no sign of life for so long, stopped or in a long step, loses its turn.
        folder: Where they meet: the same one for all of them, of this host. By default below the folder for temporary
            files, which suits workers of one user.
    """

    device: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    weight: Weight = 1.0
    share_of: Share = "time"
    slice_ms: Annotated[float, Meta(ge=0.1, le=10_000)] = 10.0
    patience_ms: Positive = 2_000
    folder: Text | None = None


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: a pool of like replicas.

    Attributes:
        kind: What it is good at, for routing: `transformer`, `ssm`, `moe`, or another name.
        backend: What runs it: a kind that is registered; by default that of its own kind. `sim` runs no model, only a
            profile, under any kind.
        pool: Its topic's name; the engine's own by default.
        model: Name or folder of the model; what clients may ask for beside the aliases.
        python: Interpreter of the engine's own environment; ours by default.
        slots: Requests that run at once in one worker.
        interactive_slots: Slots of these that batch may not take; by default one, where there are at least four.
        workers: Worker processes that the local stack starts.
        requests_per_s_max: The pool is sent no more than that.
        tokens_per_s_max: The pool is sent no more than that.
        burst_s: Seconds' worth of these rates that may be saved up.
        paused: The pool is sent nothing.
        profile: What is believed of its speed until it is known.
        time_slices: Its part in a device that it shares with other engines; None where it has one of its own.
        options: Passed to the engine as they are.
    """

    kind: EngineKind
    backend: EngineKind | None = None
    model: ModelName = "sim"
    model_path: str | None = None
    pool: PoolName | None = None
    aliases: list[str] = field(default_factory=list)
    python: str | None = None
    slots: Positive = 8
    interactive_slots: NotNegative | None = None
    workers: NotNegative = 1
    requests_per_s_max: Rate | None = None
    tokens_per_s_max: Rate | None = None
    burst_s: Seconds = 2.0
    paused: bool = False
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    time_slices: TimeSlicesConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """What its model is called: itself, and by its aliases."""
        return frozenset({self.model, *self.aliases})

    @property
    def loras(self) -> frozenset[str]:
        """The adapters of its model that it serves, each a model by its own name (`options.loras`)."""
        given = self.options.get("loras")
        return frozenset(given) if isinstance(given, dict) else frozenset()

    @property
    def is_simulated(self) -> bool:
        """Whether no model runs."""
        return (self.backend or self.kind) == SIMULATED

    @property
    def reserved_slots(self) -> int:
        """Slots that batch may not take."""
        if self.interactive_slots is None:
            return 1 if self.slots >= RESERVE_FROM_SLOTS else 0
        return self.interactive_slots

    @property
    def settings(self) -> PoolSettings:
        """What may be changed of it while it runs."""
        return PoolSettings(self.requests_per_s_max, self.tokens_per_s_max, self.burst_s, self.paused)


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a process of ours needs to know."""

    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    dispatcher: DispatcherConfig = field(default_factory=DispatcherConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    blobs: BlobsConfig = field(default_factory=BlobsConfig)
    classes: ClassConfig = field(default_factory=ClassConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    aliases: dict[ModelName, ModelName] = field(default_factory=dict)  # another name -> a model, an alias or a class below
    equivalents: dict[ModelName, list[ModelName]] = field(default_factory=dict)  # a class -> its models
    engines: dict[PoolName, EngineConfig] = field(default_factory=dict)
    tenants: dict[Tenant, TenantConfig] = field(default_factory=dict)

    def pool(self, engine: str) -> str:
        """The pool an engine belongs to."""
        return self.engines[engine].pool or engine

    def resolve(self, model: str) -> str:
        """Follow the configured aliases of a name to a model, an engine's alias or a class of equivalents."""
        passed = set()
        while model in self.aliases and model not in passed:
            passed.add(model)
            model = self.aliases[model]
        return model

    def meant(self, model: str) -> frozenset[str]:
        """The models, adapters or engines' aliases that a name stands for."""
        model = self.resolve(model)
        return frozenset(self.equivalents.get(model, (model,)))

    def answering(self, engine: str, model: str) -> str:
        """The model by which an engine answers who asks for one: an adapter where only that is meant, else its own."""
        spec, meant = self.engines[engine], self.meant(model)
        return spec.model if meant & spec.names else min(meant & spec.loras, default=spec.model)

    @property
    def pool_settings(self) -> dict[str, PoolSettings]:
        """What the configuration says of each pool: its first engine, by name."""
        return {self.pool(name): self.engines[name].settings for name in sorted(self.engines, reverse=True)}

    @property
    def profiles(self) -> dict[str, tuple[EngineKind, ProfileConfig]]:
        """What is believed of each pool: its kind, and its first engine's profile."""
        engines = {name: self.engines[name] for name in sorted(self.engines, reverse=True)}
        return {self.pool(name): (engine.kind, engine.profile) for name, engine in engines.items()}

    @property
    def value_bytes_max(self) -> int:
        """What a request's record may hold: the cluster takes it on all its way, and the dispatcher does."""
        return min(self.kafka.record_bytes_max - OVERHEAD_BYTES, self.dispatcher.prompt_bytes_max)

    @property
    def pools(self) -> list[str]:
        """All pools, sorted."""
        return sorted({self.pool(name) for name in self.engines})


def load_config(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read the file, where one is given, and the environment's overrides.

    Raises:
        ConfigError: Naming the file or the variable, the path and what was expected.
    """
    raw: dict[str, Any] = {}
    if path:
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            message = f"{path}: no such file: give an existing one with --config, or make one with `forebay local up`"
            raise ConfigError(message) from None
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            message = f"{path}: {error}"
            raise ConfigError(message) from None
    variables = override(raw, environ, Config)
    try:
        return _convert(raw)
    except InvalidMessage as error:
        variable = cause(variables, error.param)
        where = f"environment variable {variable}" if variable else str(path or "environment")
        message = f"{where}: {error.message}"
        raise ConfigError(message) from None


def parse_config(raw: Mapping[str, Any], where: str = "config") -> Config:
    """Turn plain tables into the configuration.

    Raises:
        ConfigError: Naming `where`, the path and what was expected.
    """
    try:
        return _convert(raw)
    except InvalidMessage as error:
        message = f"{where}: {error.message}"
        raise ConfigError(message) from None


def _convert(raw: Mapping[str, Any]) -> Config:
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise invalid(error, value=lambda: raw, kind=Config) from None
    check(config)
    return config
