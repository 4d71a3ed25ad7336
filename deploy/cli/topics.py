"""`forebay topics`: the topics of a cell, as they should be."""

import asyncio

import click
import msgspec
from msgspec import structs

from broker.transport.connect import connect
from broker.transport.protocol import Transport
from deploy.cli.common import EXIT_ERROR, config_option, json_option, run
from schemas.config import Config, TopicsConfig, parse_config
from schemas.errors import ConfigError
from schemas.topics import Topics, TopicSpec

NOT_DONE = "NOT done"  # so begins an admin's line on what the broker cannot do


@click.group()
def topics() -> None:
    """Make the topics and mend their settings."""


@topics.command()
@config_option
@click.option("--prefix", help="Prefix of every topic of the cell. [default: kafka.topic_prefix]")
@click.option("--replication", type=click.IntRange(1), help="Copies of each partition. [default: topics.replication]")
@click.option("--min-insync", type=click.IntRange(1), help="Copies that acknowledge a write. [default: topics.min_insync]")
@click.option("--partitions", multiple=True, metavar="TOPIC=N", help="Give a topic at least N partitions; may be repeated.")
@json_option("Print what was done as one JSON object.")
def ensure(
    config: Config,
    prefix: str | None,
    replication: int | None,
    min_insync: int | None,
    partitions: tuple[str, ...],
    as_json: bool,  # noqa: FBT001 - click passes flags so
) -> None:
    r"""Create what is missing, add partitions, and set retention; may be run again at any time.

    Partitions are only ever added: a cluster that has more keeps them. TOPIC may leave out the prefix. --json tells how
    many each topic has in the end.

    \b
    Example:
        forebay topics ensure --replication 3 --min-insync 2 --partitions results=16
    """
    changed = _with(config, prefix, replication, min_insync)
    specs = _widened(Topics(changed.kafka.topic_prefix), changed, partitions)
    lines, partitions_now = run(ensure_topics(changed, specs, connect(changed.kafka)))
    undone = [line for line in lines if line.startswith(NOT_DONE)]
    done = [line for line in lines if line not in undone]
    if as_json:
        click.echo(msgspec.json.encode({"topics": partitions_now, "done": done, "not_done": undone}))
    else:
        for line in done:
            click.echo(line)
    if undone:
        click.echo(f"forebay: {'; '.join(undone)}", err=True)
        raise SystemExit(EXIT_ERROR)
    if not as_json:
        click.echo(f"{len(specs)} topics are as they should be", err=True)


async def ensure_topics(config: Config, specs: list[TopicSpec], transport: Transport) -> tuple[list[str], dict[str, int | None]]:
    """Make and mend topics; the transport is closed in the end.

    Returns:
        A line for each thing done or not done, and the number of partitions that each topic has now.
    """
    try:
        async with asyncio.timeout(config.kafka.connect_timeout_ms / 1000 + 2):
            await transport.check()
        admin = await transport.admin()
        lines = await admin.ensure(specs, config.topics.replication, config.topics.min_insync)
        return lines, {spec.name: await admin.partitions(spec.name) for spec in specs}
    finally:
        await transport.close()


def _with(config: Config, prefix: str | None, replication: int | None, min_insync: int | None) -> Config:
    """The configuration with the options in it, checked anew."""
    topics_changed: TopicsConfig = config.topics
    if replication is not None:
        topics_changed = structs.replace(topics_changed, replication=replication)
    if min_insync is not None:
        topics_changed = structs.replace(topics_changed, min_insync=min_insync)
    kafka = config.kafka if prefix is None else structs.replace(config.kafka, topic_prefix=prefix)
    return parse_config(msgspec.to_builtins(structs.replace(config, kafka=kafka, topics=topics_changed)), "options")


def _widened(names: Topics, config: Config, wanted: tuple[str, ...]) -> list[TopicSpec]:
    specs = {spec.name: spec for spec in names.specs(config.topics, config.pools, config.kafka.record_bytes_max)}
    for one in wanted:
        name, _, number = one.rpartition("=")
        full = name if name in specs else f"{names.prefix}.{name}"
        if full not in specs:
            short = ", ".join(known.removeprefix(f"{names.prefix}.") for known in specs)
            message = f"--partitions {one}: no such topic; known are {short}"
            raise ConfigError(message)
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 10_000:
            message = f"--partitions {one}: expected TOPIC=N with N from 1 to 10000"
            raise ConfigError(message)
        if full == names.control and int(number) != 1:
            message = f"--partitions {one}: {full} has one partition by design: its owner is the active dispatcher"
            raise ConfigError(message)
        specs[full] = TopicSpec(full, int(number), specs[full].settings)
    return list(specs.values())
