"""`forebay check`: what is wrong, and how to mend it."""

import asyncio
import re
import time
from collections.abc import Awaitable
from typing import Literal

import click
import msgspec
from redis.exceptions import RedisError

from broker.transport.blobs import BlobError, Blobs
from broker.transport.connect import connect
from broker.transport.errors import TransportError
from broker.transport.protocol import Admin, TopicPartition, Transport
from broker.transport.topic_plan import TopicPlan
from deploy.cli.common import CONFIG_PATH, config_option, json_option, run
from dispatcher.core.routing import plugins
from dispatcher.plugins import load_plugins
from engine_consumers.registry import implementation, kinds
from memory_coordinator import StatusBoard
from memory_coordinator.board import Board
from schemas.config import Config, EngineConfig
from schemas.errors import ConfigError
from schemas.messages import EngineStatus
from schemas.topics import Topics, TopicSpec

Verdict = Literal["ok", "warning", "error"]

LIMIT_S = 13.0
ASK_GROUP_S = 5.0
PROBE = b'{"prompt":"forebay check"}'
_MARKS = {"ok": "ok      ", "warning": "warning ", "error": "error   "}


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        subject: What it was: config, sizes, routing, blobs, kafka, delivery, topics, dispatcher, redis, or an engine.
        verdict: An error makes the command fail; a warning does not.
        said: What was found, and what to do where it is not well.
    """

    subject: str
    verdict: Verdict
    said: str


@click.command()
@config_option
@click.option("--running", is_flag=True, help="Fail also where no dispatcher is active or an engine has no healthy worker.")
@json_option("Print the findings as one JSON object.")
def check(config: Config, running: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""Check the configuration, and that Kafka, its topics, Redis, the store, a dispatcher and the engines answer.

    Changes nothing, but for one small file that it writes to `blobs.store`. Exits with 1 where something is wrong. That
    nothing runs yet is a warning only, so that it can be asked before the first start: with --running it is an error.

    \b
    Examples:
        forebay check --config /etc/forebay.toml
        forebay check --running --json
    """
    findings = [
        *of_config(config),
        *of_sizes(config),
        *of_routing(config),
        *run(_look(config, "error" if running else "warning")),
    ]
    is_well = all(finding.verdict != "error" for finding in findings)
    if as_json:
        click.echo(msgspec.json.encode({"ok": is_well, "findings": findings}))
    else:
        for finding in findings:
            click.echo(f"{_MARKS[finding.verdict]}{finding.subject}: {finding.said}")
    if not is_well:
        wrong = ", ".join(dict.fromkeys(finding.subject for finding in findings if finding.verdict == "error"))
        click.echo(f"forebay: not everything is well: {wrong}", err=True)
        raise SystemExit(1)


def of_config(config: Config) -> list[Finding]:
    """Where the configuration was found, and the engines in it that nothing here can run."""
    path = click.get_current_context().meta.get(CONFIG_PATH)
    where = str(path) if path else "defaults and environment, as no forebay.toml was found"
    if not config.engines:
        said = f"{where}; no engine is configured: add one as `[engines.NAME]` with `kind` and `model`"
        return [Finding("config", "error", said)]
    told = Finding("config", "ok", f"{where}; engines {', '.join(sorted(config.engines))}")
    known = kinds()
    engines = config.engines.items()
    return [told, *(_unknown(name, engine, known) for name, engine in engines if implementation(engine) not in known)]


def _unknown(name: str, engine: EngineConfig, known: list[str]) -> Finding:
    """A kind that is not known here; another interpreter's environment may hold a package that brings it."""
    kind, path = implementation(engine), f"`engines.{name}.{'backend' if engine.backend else 'kind'}`"
    if engine.python is None:
        return Finding("config", "error", f"{path}: no engine of kind {kind!r}: expected one of {', '.join(known)}")
    said = f"{path}: no engine of kind {kind!r} is known here: {engine.python} has to have a package that brings it"
    return Finding("config", "warning", said)


def of_sizes(config: Config) -> list[Finding]:
    """Whether what a dispatcher may take is what a record can hold on its way."""
    wished, taken = config.dispatcher.prompt_bytes_max, config.value_bytes_max
    if wished <= taken:
        return [Finding("sizes", "ok", f"requests of up to {taken} bytes, records of up to {config.kafka.record_bytes_max}")]
    said = (
        f"`dispatcher.prompt_bytes_max` ({wished}) is more than `kafka.record_bytes_max` ({config.kafka.record_bytes_max}) "
        f"has room for: {taken} bytes are taken"
    )
    return [Finding("sizes", "warning", said)]


def of_routing(config: Config) -> list[Finding]:
    """The plugins that routing uses, in their order, and those that are registered and not used."""
    routing = config.routing
    try:
        load_plugins(routing.plugins)
        plugins.check(routing)
    except ConfigError as error:
        return [Finding("routing", "error", str(error))]
    used: tuple[tuple[plugins.Kind, list[str]], ...] = (
        ("filter", routing.filters),
        ("preference", routing.preferences),
        ("scorer", list(routing.scorers)),
    )
    found = []
    for kind, names in used:
        shown = [f"{name} x {routing.scorers[name]:g}" for name in names] if kind == "scorer" else names
        unused = sorted(plugins.known(kind).keys() - set(names))
        beside = f"; not used: {', '.join(unused)}" if unused else ""
        found.append(Finding(f"routing.{kind}s", "ok", f"{', '.join(shown) or 'none'}{beside}"))
    return found


async def look_at_blobs(config: Config) -> list[Finding]:
    """Whether the store takes a blob and gives it back; nothing where none is configured."""
    blobs = Blobs(config.blobs)
    if not blobs.has_store:
        return []
    try:
        await blobs.read(await blobs.write(PROBE))
    except BlobError as error:
        return [Finding("blobs", "error", error.message)]
    return [Finding("blobs", "ok", f"{config.blobs.store} takes and gives")]


async def _look(config: Config, absent: Verdict) -> list[Finding]:
    transport, board = connect(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
    try:
        looks = look_at_kafka(config, transport, absent), look_at_redis(config, board, absent), look_at_blobs(config)
        kafka, redis, blobs = await asyncio.gather(*looks)
    finally:
        await board.close()
        await transport.close()
    return [*kafka, *redis, *blobs]


async def look_at_kafka(config: Config, transport: Transport, absent: Verdict = "warning") -> list[Finding]:
    """Whether the cluster answers, does what `kafka.delivery` asks for, has the topics, and has a dispatcher.

    Args:
        config: The configuration.
        transport: The cluster.
        absent: What it is that no dispatcher is active.
    """
    found = await _within("kafka", _reached(config, transport))
    if found[-1].verdict == "error":
        return found
    topics = Topics(config.kafka.topic_prefix)
    admin = await transport.admin()
    found += await _within("topics", _topics(config, admin, topics))
    if await admin.partitions(topics.control) is None:
        return found  # that a topic is missing was said
    found += await _within("delivery", _delivery(config, transport, topics))
    return found + await _within("dispatcher", _dispatcher(admin, topics, absent))


async def look_at_redis(config: Config, board: Board, absent: Verdict = "warning") -> list[Finding]:
    """Whether Redis answers, and the workers that write their status there.

    Args:
        config: The configuration.
        board: Where the workers write.
        absent: What it is that an engine has no healthy worker.
    """
    try:
        async with asyncio.timeout(LIMIT_S):
            await board.check()
            statuses = await board.read()
    except (OSError, RedisError) as error:
        said = str(error) or f"cannot reach Redis at {config.redis.url} in time"
        return [Finding("redis", "error", _without_password(said))]
    said = _without_password(f"{config.redis.url} answers")
    return [Finding("redis", "ok", said), *(_engine(config, name, statuses, absent) for name in config.engines)]


def _without_password(text: str) -> str:
    return re.sub(r"(rediss?://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)


async def _within(subject: str, probe: Awaitable[list[Finding]]) -> list[Finding]:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await probe
    except TransportError as error:
        return [Finding(subject, "error", " ".join(str(error).split()))]
    except TimeoutError:
        return [Finding(subject, "error", f"no answer within {LIMIT_S:g} s")]


async def _reached(config: Config, transport: Transport) -> list[Finding]:
    await transport.check()
    return [Finding("kafka", "ok", f"{config.kafka.bootstrap} answers")]


async def _topics(config: Config, admin: Admin, topics: Topics) -> list[Finding]:
    specs = topics.specs(config.topics, config.pools, config.kafka.record_bytes_max)
    plans = await admin.compare(specs, config.topics.min_insync)
    wrong = [_wrong(spec, plan) for spec, plan in zip(specs, plans, strict=True) if plan.lines]
    if not wrong:
        return [Finding("topics", "ok", f"all {len(specs)} are there, with partitions and settings as configured")]
    return [Finding("topics", "error", f"{said}: mend it with `forebay topics ensure`") for said in wrong]


def _wrong(spec: TopicSpec, plan: TopicPlan) -> str:
    if plan.create:
        return f"{spec.name} is missing"
    said = [] if plan.partitions is None else [f"fewer than {plan.partitions} partitions"]
    return f"{spec.name} has " + " and ".join([*said, *(f"not {name}={value}" for name, value in sorted(plan.settings.items()))])


async def _delivery(config: Config, transport: Transport, topics: Topics) -> list[Finding]:
    """Open the outbox of a group that nobody uses: that is what a broker without transactions refuses."""
    if config.kafka.delivery != "exactly_once":
        said = f"{config.kafka.delivery}: a request may be answered twice after a crash; readers drop repeats by id"
        return [Finding("delivery", "ok", said)]
    source = TopicPartition(topics.control, 0)
    consumer = await transport.assign([source], f"{topics.prefix}.check")
    outbox = transport.outbox(f"{topics.prefix}.check", source, consumer)
    try:
        await outbox.open()
    finally:
        await outbox.close()
        await consumer.close()
    return [Finding("delivery", "ok", "exactly_once: the broker has transactions")]


async def _dispatcher(admin: Admin, topics: Topics, absent: Verdict) -> list[Finding]:
    try:
        async with asyncio.timeout(ASK_GROUP_S):
            members = await admin.members(topics.election_group)
    except (TransportError, TimeoutError) as error:  # Tansu, for one, does not tell
        why = " ".join(str(error).split()) or f"no answer within {ASK_GROUP_S:g} s"
        return [Finding("dispatcher", "warning", f"the broker does not tell whether one is active ({why})")]
    control = TopicPartition(topics.control, 0)
    active = next((name for name, owned in members.items() if control in owned), None)
    if active is None:
        return [Finding("dispatcher", absent, "none is active: start one with `forebay dispatch` or `forebay local up`")]
    return [Finding("dispatcher", "ok", f"{active} is active")]


def _engine(config: Config, name: str, statuses: list[EngineStatus], absent: Verdict) -> Finding:
    stale_ms, now_ms = config.dispatcher.status_stale_ms, time.time() * 1000
    workers = [status for status in statuses if status.engine == name]
    fresh = [status for status in workers if now_ms - status.updated_at_ms <= stale_ms]
    healthy = [status for status in fresh if status.is_healthy]
    if healthy:
        slots, engine = sum(status.slots for status in healthy), config.engines[name]
        served = f"serving {engine.model}" + (", simulated: no model runs" if engine.is_simulated else "")
        return Finding(f"engines.{name}", "ok", f"{len(healthy)} workers with {slots} slots, {served}")
    if fresh:
        return Finding(f"engines.{name}", absent, f"its {len(fresh)} workers are not healthy: see their logs")
    said = "its workers have gone silent" if workers else "no worker runs"
    return Finding(f"engines.{name}", absent, f"{said}: start one with `forebay work --engine {name}` or `forebay local up`")
