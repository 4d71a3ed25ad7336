"""What is to run, decided before anything is started."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import replace

from deploy.engines import RECIPES, engine_config, worker_environment
from deploy.local import brokers, settings
from deploy.local.errors import NotAvailable
from deploy.local.home import BrokerKind, Home, State
from deploy.local.ports import HOST, free_ports
from deploy.local.program import Program
from schemas.config import Config, Delivery, EngineConfig, load_config
from schemas.errors import ConfigError

Report = Callable[[str], None]
Wish = Literal["auto", "kafka", "tansu"]

SIM = EngineConfig(kind="sim", model="sim", slots=8)
TANSU_LACKS = (
    "Tansu serves as the broker: delivery is at_least_once (a crash may run a request twice; readers drop the repeats), "
    "and everything is in memory: nothing survives a restart"
)
_OURS = ("FOREBAY_KAFKA__BOOTSTRAP", "FOREBAY_KAFKA__DELIVERY", "FOREBAY_REDIS__URL")  # the file has what is in force
_GRACE_S = 15.0


class Wanted(Struct, frozen=True):
    """What the user asked for.

    Attributes:
        engines: Names; those of the configuration, or the default one, where empty.
        kafka: A broker's address that is there already.
        redis: A Redis URL that is there already.
        broker: Which broker to start where none is given.
        workers: Workers per engine; what the configuration says by default.
    """

    engines: Sequence[str] = ()
    kafka: str | None = None
    redis: str | None = None
    broker: Wish = "auto"
    workers: int | None = None


class Plan(Struct, frozen=True):
    """What the supervisor runs; each stage is started when the one before it answers, and stopped before it.

    Attributes:
        services: Own broker and Valkey, in the order of their start.
        ensure: A program that makes the topics and ends.
        processes: Dispatcher and workers.
        engines: Engine -> names of its workers' programs.
    """

    home: str
    broker: BrokerKind
    kafka: str
    redis: str
    delivery: Delivery
    services: list[list[Program]]
    ensure: Program
    processes: list[Program]
    engines: dict[str, list[str]]
    ports: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def state(self, pid: int) -> State:
        """The state at the start."""
        return State(
            home=self.home,
            pid=pid,
            phase="starting",
            broker=self.broker,
            kafka=self.kafka,
            redis=self.redis,
            delivery=self.delivery,
            engines=self.engines,
            ports=self.ports,
            notes=self.notes,
        )


def make_plan(home: Home, wanted: Wanted, last: State | None, report: Report) -> Plan:
    """Choose the parts, fetch what is missing, and write the configuration.

    Raises:
        ConfigError: The configuration or an engine's name is wrong.
        LocalStackError: A part cannot be had, or a folder cannot be written.
    """
    notes: list[str] = []
    text = settings.read_text(home.config)
    config = load_config(home.config, os.environ) if home.config.exists() else Config()
    given_kafka = wanted.kafka or os.environ.get("FOREBAY_KAFKA__BOOTSTRAP")
    given_redis = wanted.redis or os.environ.get("FOREBAY_REDIS__URL")
    names = _engines(wanted.engines, config, notes)
    added = {name: _known(name) for name in names if name not in config.engines}
    ports = free_ports(3, last.ports if last else ())
    stages, kind = _broker(home, given_kafka, wanted.broker, ports=ports, notes=notes, report=report)
    kafka = given_kafka or f"{HOST}:{ports[1]}"
    text = settings.set_value(text, "kafka", "bootstrap", kafka)
    if not given_redis:
        report("Valkey: starting with its package" if not home.valkey.exists() else "Valkey: starting")
        stages = [[*(stages[0] if stages else []), brokers.valkey(home.valkey, home.logs, ports[2])], *stages[1:]]
    redis = given_redis or f"redis://{HOST}:{ports[2]}/0"
    text = settings.set_value(text, "redis", "url", redis)
    delivery = _delivery(config, kind, last)
    text = settings.set_value(text, "kafka", "delivery", delivery)
    for name, engine in added.items():
        text = settings.add_engine(text, name, engine)
    settings.write_text(home.config, text)
    config = load_config(home.config, {k: v for k, v in os.environ.items() if k not in _OURS})
    processes, engines = _processes(home, config, names, wanted.workers)
    ensure = _ours(home, "topics", ["topics", "ensure", "--config", str(home.config)])
    return Plan(
        home=str(home.root),
        broker=kind,
        kafka=kafka,
        redis=redis,
        delivery=delivery,
        services=[[_held(home, program) for program in stage] for stage in stages],
        ensure=ensure,
        processes=processes,
        engines=engines,
        ports=ports,
        notes=notes,
    )


def default_engines(config: Config) -> tuple[list[str], str | None]:
    """Give the engines to start where none is named, and the line that says why where none is a real one."""
    real = sorted(name for name, engine in config.engines.items() if not engine.is_simulated)
    if real:
        return real, None
    if "transformer" not in config.engines and engine_config("transformer") is not None:
        return ["transformer"], None
    names = sorted(config.engines) or ["sim"]
    said = "no engine is installed: answers are made up, without a model, by"
    return names, f"{said} {', '.join(f'`{name}`' for name in names)}; `forebay engines install transformer`"


def _engines(wanted: Sequence[str], config: Config, notes: list[str]) -> list[str]:
    if not wanted:
        names, note = default_engines(config)
        notes += [note] if note else []
        return names
    for name in wanted:
        if name not in config.engines and name != "sim" and name not in RECIPES:
            known = ", ".join(sorted({*config.engines, "sim", *RECIPES}))
            message = f"`engines.{name}`: no such engine: known are {known}; others are configured in forebay.toml"
            raise ConfigError(message)
    return list(dict.fromkeys(wanted))


def _known(name: str) -> EngineConfig:
    if name == "sim":
        return SIM
    found = engine_config(name)
    if found is None:
        message = f"the engine {name} is not installed: `forebay engines install {name}`, or `--engine sim`"
        raise NotAvailable(message)
    return found


def _broker(
    home: Home, given: str | None, wish: Wish, *, ports: list[int], notes: list[str], report: Report
) -> tuple[list[list[Program]], BrokerKind]:
    if given:
        return [], "given"
    if wish != "tansu":
        try:
            report("Kafka: making it ready")
            controller, broker = brokers.kafka(home.kafka, home.logs, ports[0], ports[1])
        except NotAvailable as error:
            if wish == "kafka":
                raise
            notes.append(f"no Apache Kafka here: {error}")
        else:
            return [[controller], [broker]], "kafka"
    notes.append(TANSU_LACKS)
    return [[brokers.tansu(home.logs, ports[1])]], "tansu"


def _delivery(config: Config, kind: BrokerKind, last: State | None) -> Delivery:
    """Tansu has no transactions; elsewhere the configuration's word counts, but not what Tansu left in it."""
    if kind == "tansu":
        return "at_least_once"
    return "exactly_once" if last is not None and last.broker == "tansu" else config.kafka.delivery


def _processes(home: Home, config: Config, names: list[str], workers: int | None) -> tuple[list[Program], dict[str, list[str]]]:
    processes = [_ours(home, "dispatcher", ["dispatch", "--config", str(home.config)])]
    engines: dict[str, list[str]] = {}
    for name in names:
        engine = config.engines[name]
        number = engine.workers if workers is None else workers
        if number > config.topics.engine_partitions:
            message = f"`engines.{name}`: {number} workers, and its topic has {config.topics.engine_partitions} partitions"
            raise ConfigError(message + ": raise topics.engine_partitions")
        try:
            env = {**worker_environment(engine.python), **engine.env}
        except NotAvailable as error:
            message = f"`engines.{name}.python`: {error}"
            raise NotAvailable(message) from None
        engines[name] = [f"worker-{name}-{i}" for i in range(number)]
        work = ["work", "--engine", name, "--config", str(home.config)]
        grace_s = config.worker.drain_ms / 1000 + _GRACE_S
        processes += [_ours(home, one, work, python=engine.python, env=env, grace_s=grace_s) for one in engines[name]]
    return processes, engines


def _ours(
    home: Home,
    name: str,
    arguments: list[str],
    *,
    python: str | None = None,
    env: dict[str, str] | None = None,
    grace_s: float = _GRACE_S,
) -> Program:
    """One of our commands; -P keeps a folder of the user's that is called like a package of ours out of the way."""
    return _held(
        home,
        Program(
            name,
            [python or sys.executable, "-P", "-m", "deploy.cli", *arguments],
            str(home.logs / f"{name}.log"),
            grace_s=grace_s,
            env={"PYTHONUNBUFFERED": "1", **(env or {})},
            unset=list(_OURS),
            cwd=str(home.root),
        ),
    )


def _held(home: Home, program: Program) -> Program:

    return replace(program, hold=str(home.guards_lock))


def worker_name(engine: str, pid: int) -> str:
    """The name that a worker process gives itself."""
    return f"{engine}-{socket.gethostname()}-{pid}"
