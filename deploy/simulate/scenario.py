"""The scenario: one TOML file that states every assumption, read once into frozen structs.

What Forebay itself is told stands in the table `forebay`, which is an ordinary configuration; its engines are made from
those of the scenario (`to_config`).
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from deploy.simulate.engine import Speed
from deploy.simulate.errors import ScenarioError
from schemas.config import Config, PoolName, parse_config
from schemas.errors import ConfigError, InvalidMessage
from schemas.faults import invalid
from schemas.messages import AUTO, DEFAULT_TENANT, EngineKind, Fallback, ModelName, ServiceClass, Tenant
from schemas.policy import Celsius, Milliseconds, NotNegative, Positive, ProfileConfig, Seconds, Share

FOLDER = Path(__file__).with_name("scenarios")

Rate = Annotated[float, Meta(gt=0, le=1e6)]
PerSecond = Annotated[float, Meta(ge=0, le=1e6)]
Weight = Annotated[float, Meta(ge=0, le=1e6)]
FromStart = Annotated[float, Meta(ge=0, le=1e7)]
Tokens = Annotated[int, Meta(ge=1, le=2_000_000)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """When a request counts as served well, and how many must be.

    Attributes:
        ttft_ms: From its arrival to its first token.
        tpot_ms: Mean time between its tokens.
        classes: Whose requests are measured by it; others count as served well when they are answered at all.
    """

    ttft_ms: Milliseconds = 2_000.0
    tpot_ms: Milliseconds = 60.0
    attainment: Share = 0.99
    classes: list[ServiceClass] = field(default_factory=lambda: ["interactive"])


class StatusRhythm(Struct, frozen=True, forbid_unknown_fields=True):
    """How fresh what is known of the workers is.

    Attributes:
        heartbeat_ms: Between two snapshots of a worker at most.
        on_change_ms: A change is told at once, but no oftener than this; none: heartbeats only.
        delay_ms: From the worker to the dispatcher.
    """

    heartbeat_ms: Positive = 1_000
    on_change_ms: NotNegative | None = 20
    delay_ms: Milliseconds = 5.0


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine's steps really take; see `engine.py`."""

    ttft_ms: Milliseconds = 0.0
    prefill_ms_per_1k: Milliseconds = 0.0
    prefill_quadratic_ms: Milliseconds = 0.0
    tpot_ms: Milliseconds = 0.0
    tpot_batch_ms: Milliseconds = 0.0
    tpot_kv_ms: Milliseconds = 0.0


class SimulatedEngine(Struct, frozen=True, forbid_unknown_fields=True):
    """A pool of like engines; each worker is one GPU, or one group of them.

    Attributes:
        workers: How many; 0 takes the engine out of the run.
        slots: Requests in one batch at most.
        prefill_chunk: Tokens of prompts that one step reads at most.
        kv_tokens: Tokens that the cache holds; none: it has no bound.
        load_s: From a worker's start until it serves.
        profile: What its steps take.
        believed: What Forebay is told of that; by default the truth.
    """

    kind: EngineKind
    profile: Profile
    model: ModelName = "model"
    workers: NotNegative = 1
    slots: Positive = 32
    interactive_slots: NotNegative | None = None
    prefill_chunk: Tokens = 512
    kv_tokens: Tokens | None = None
    max_context: Tokens = 32_768
    trained_context: Tokens | None = None
    load_s: FromStart = 0.0
    temperature_c: Celsius | None = None
    believed: ProfileConfig | None = None

    def speed(self) -> Speed:
        """Give the engine's model."""
        return Speed(self.slots, self.prefill_chunk, self.kv_tokens, **msgspec.structs.asdict(self.profile))


class FromTrace(Struct, frozen=True, forbid_unknown_fields=True, tag="trace", tag_field="process"):
    """As a trace has it, over and over.

    Attributes:
        trace: A shipped one, or a file; relative to the scenario.
        rate: The trace's own rate times this.
    """

    trace: str = "azure_conv"
    rate: Rate = 1.0


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag="poisson", tag_field="process"):
    """Each at its own time."""

    per_s: Rate


class Gamma(Struct, frozen=True, forbid_unknown_fields=True, tag="gamma", tag_field="process"):
    """Gaps of a gamma distribution: bursts where `cv`, its deviation over its mean, is above 1."""

    per_s: Rate
    cv: Annotated[float, Meta(gt=0, le=100)] = 2.0


class OnOff(Struct, frozen=True, forbid_unknown_fields=True, tag="on_off", tag_field="process"):
    """Poisson arrivals that are on and off in turn, each for a fixed time or, where `random`, exponential ones."""

    per_s: Rate
    on_s: Seconds
    off_s: Seconds
    off_per_s: PerSecond = 0.0
    first_s: FromStart = 0.0
    random: bool = False


class Regular(Struct, frozen=True, forbid_unknown_fields=True, tag="regular", tag_field="process"):
    """One after the other at equal gaps."""

    per_s: Rate


Arrivals = FromTrace | Poisson | Gamma | OnOff | Regular


class Fixed(Struct, frozen=True, forbid_unknown_fields=True, tag="fixed", tag_field="dist"):
    """Always the same."""

    tokens: Tokens


class Uniform(Struct, frozen=True, forbid_unknown_fields=True, tag="uniform", tag_field="dist"):
    """Each as likely."""

    least: Tokens
    most: Tokens


class LogNormal(Struct, frozen=True, forbid_unknown_fields=True, tag="lognormal", tag_field="dist"):
    """As lengths of texts are: a median, a deviation of the logarithm, and bounds."""

    median: Tokens
    sigma: Annotated[float, Meta(ge=0, le=5)]
    least: Tokens = 1
    most: Tokens = 2_000_000


class Exponential(Struct, frozen=True, forbid_unknown_fields=True, tag="exponential", tag_field="dist"):
    """A mean, and bounds."""

    mean: Tokens
    least: Tokens = 1
    most: Tokens = 2_000_000


Lengths = Fixed | Uniform | LogNormal | Exponential


class Kind(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of one kind, and their share of the traffic.

    Attributes:
        share: Beside the other kinds' shares.
        engine: The engine that alone serves it where engines are kept apart.
        answer_max: Bound of the answer that is asked for; twice its true length by default, 256 at least.
        slo_ms: The request's `slo_latency_ms`.
        deadline_ms: After its arrival.
    """

    engine: PoolName
    share: Weight = 1.0
    tenant: Tenant = DEFAULT_TENANT
    service_class: ServiceClass = "interactive"
    model: ModelName = AUTO
    hint: EngineKind = AUTO
    fallback: Fallback = "any"
    answer_max: Tokens | None = None
    slo_ms: Positive | None = None
    deadline_ms: Positive | None = None


class Phase(Struct, frozen=True, forbid_unknown_fields=True):
    """From a moment on the traffic is another one; what is not given stays.

    Attributes:
        ramp_s: It changes evenly for so long.
        rate: Times the rate of its arrivals.
        shares: One for each kind.
        is_shift: Recovery is measured from here.
    """

    at_s: FromStart
    ramp_s: FromStart = 0.0
    rate: PerSecond | None = None
    shares: list[Weight] | None = None
    is_shift: bool = False


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    """One stream of arrivals.

    Attributes:
        input_tokens: Of the prompt; without it, as in the trace.
        output_tokens: Of the answer; without it, as in the trace.
        trace: Where lengths come from, when arrivals do not come from a trace.
        is_scaled: Whether its rate follows the scale of the run.
        first_s: When it begins.
        last_s: When it ends; none: with the run.
    """

    name: Name
    arrivals: Arrivals
    kinds: Annotated[list[Kind], Meta(min_length=1)]
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    trace: str | None = None
    phases: list[Phase] = field(default_factory=list)
    is_scaled: bool = True
    first_s: FromStart = 0.0
    last_s: FromStart | None = None

    @property
    def trace_name(self) -> str | None:
        """The trace it reads, for arrivals or for lengths."""
        return self.arrivals.trace if isinstance(self.arrivals, FromTrace) else self.trace


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to a worker: it dies, it starts again (and loads), or its GPU heats up or cools down.

    Attributes:
        worker: Engine and number: `llama-0`.
        pace: Its steps take so many times as long.
    """

    at_s: FromStart
    worker: str
    does: Literal["die", "restart", "heat"]
    temperature_c: Celsius | None = None
    pace: Annotated[float, Meta(gt=0, le=1000)] = 1.0


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """What is simulated.

    Attributes:
        duration_s: Arrivals come for so long; what is there then is served to its end.
        warmup_s: Figures leave out what arrives before.
        scale: Times the rate of all traffic that is scaled.
        hop_ms: From a decision until the worker has the request: one hop through Kafka.
        session_timeout_ms: A dead worker's requests go to another of its pool after so long.
        forebay: Forebay's own configuration, without engines.
        policies: Which are compared.
        finds: What is looked for: nothing, the highest load under which each policy meets the objective, or the fewest GPUs.
        gpus_max: With how many at most.
    """

    title: str
    engines: Annotated[dict[PoolName, SimulatedEngine], Meta(min_length=1)]
    traffic: Annotated[list[Traffic], Meta(min_length=1)]
    duration_s: Annotated[float, Meta(gt=0, le=1e7)] = 600.0
    warmup_s: FromStart = 30.0
    scale: Rate = 1.0
    seed: int = 1
    slo: Slo = field(default_factory=Slo)
    status: StatusRhythm = field(default_factory=StatusRhythm)
    hop_ms: Milliseconds = 10.0
    session_timeout_ms: Positive = 6_000
    faults: list[Fault] = field(default_factory=list)
    forebay: dict[str, Any] = field(default_factory=dict)
    policies: Annotated[list[str], Meta(min_length=1)] = field(default_factory=lambda: ["isolated", "pooled_fifo", "forebay"])
    finds: Literal["load", "gpus"] | None = None
    gpus_max: Annotated[int, Meta(ge=1, le=10_000)] = 64

    @property
    def workers(self) -> int:
        """Of all engines."""
        return sum(engine.workers for engine in self.engines.values())


def to_config(scenario: Scenario, where: str = "scenario") -> Config:
    """Make the configuration that Forebay runs on.

    Raises:
        ScenarioError: It is wrong, with the path.
    """
    engines = {
        name: {
            "kind": engine.kind,
            "model": engine.model,
            "slots": engine.slots,
            "interactive_slots": engine.interactive_slots,
            "workers": engine.workers,
            "profile": msgspec.to_builtins(engine.believed or engine.profile),
        }
        for name, engine in scenario.engines.items()
        if engine.workers
    }
    given = dict(scenario.forebay)
    for name, more in given.pop("engines", {}).items():  # rates, pauses
        if name not in engines:
            message = f"{where}: `forebay.engines.{name}`: no such engine: there are {', '.join(engines)}"
            raise ScenarioError(message)
        engines[name] |= more
    try:
        return parse_config({**given, "engines": engines}, where)
    except ConfigError as error:
        message = str(error).replace(f"{where}: `", f"{where}: `forebay.", 1)
        raise ScenarioError(message) from None


def shipped() -> dict[str, Path]:
    """Name the scenarios that come with Forebay."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_scenario(name: str) -> Path:
    """Give the file of a scenario: one that is there, or a shipped one by its name."""
    path = Path(name)
    return path if path.is_file() else shipped().get(name, path)


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises:
        ScenarioError: In one line, with the file, the path in it and what was expected.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        message = f"{path}: no such scenario: give a file, or one of {', '.join(shipped())}"
        raise ScenarioError(message) from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: {error}"
        raise ScenarioError(message) from None
    return parse_scenario(raw, str(path))


def parse_scenario(raw: dict[str, Any], where: str = "scenario") -> Scenario:
    """Turn plain tables into a scenario; see `load_scenario`."""
    try:
        scenario = msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        found: InvalidMessage = invalid(error, value=lambda: raw, kind=Scenario)
        message = f"{where}: {found.message}"
        raise ScenarioError(message) from None
    for path, expected in _faults_of(scenario):
        message = f"{where}: `{path}`: {expected}"
        raise ScenarioError(message)
    to_config(scenario, where)
    return scenario


def _faults_of(scenario: Scenario) -> list[tuple[str, str]]:
    """What is wrong between fields."""
    found = []
    if scenario.warmup_s >= scenario.duration_s:
        found.append(("warmup_s", f"expected less than `duration_s` ({scenario.duration_s:g})"))
    if not scenario.workers:
        found.append(("engines", "expected one worker at least"))
    for name, engine in scenario.engines.items():
        if engine.kv_tokens is not None and engine.kv_tokens < engine.max_context:
            found.append((f"engines.{name}.kv_tokens", f"expected `max_context` ({engine.max_context}) at least"))
    for n, traffic in enumerate(scenario.traffic):
        found += _faults_of_traffic(f"traffic[{n}]", traffic, scenario)
    workers = [f"{name}-{n}" for name, engine in scenario.engines.items() for n in range(engine.workers)]
    for n, fault in enumerate(scenario.faults):
        if fault.worker not in workers:
            found.append((f"faults[{n}].worker", f"no worker {fault.worker!r}: there are {', '.join(workers)}"))
    return found


def _faults_of_traffic(path: str, traffic: Traffic, scenario: Scenario) -> list[tuple[str, str]]:
    found = []
    if traffic.trace_name is None:
        missing = [name for name in ("input_tokens", "output_tokens") if getattr(traffic, name) is None]
        found += [(f"{path}.{name}", "required where no trace gives the lengths") for name in missing]
    if not any(kind.share for kind in traffic.kinds):
        found.append((f"{path}.kinds", "expected one share above 0 at least"))
    for n, kind in enumerate(traffic.kinds):
        if kind.engine not in scenario.engines:
            known = ", ".join(scenario.engines)
            found.append((f"{path}.kinds[{n}].engine", f"no engine {kind.engine!r}: there are {known}"))
        kinds = sorted({engine.kind for engine in scenario.engines.values() if engine.workers})
        if kind.hint not in {AUTO, *kinds}:
            found.append((f"{path}.kinds[{n}].hint", f"no engine of kind {kind.hint!r}: there are {', '.join(kinds)}"))
    before_s = 0.0
    for n, phase in enumerate(traffic.phases):
        if phase.shares is not None and (len(phase.shares) != len(traffic.kinds) or not any(phase.shares)):
            found.append((f"{path}.phases[{n}].shares", f"expected {len(traffic.kinds)} numbers, one for each kind, not all 0"))
        if phase.at_s < before_s:
            found.append((f"{path}.phases[{n}].at_s", f"expected at or after the end of the phase before ({before_s:g})"))
        before_s = phase.at_s + phase.ramp_s
    return found
