"""`forebay status`: where a request is, and why it waits."""

import asyncio
import time

import click
from msgspec import Struct

from broker.transport.connect import connect
from broker.transport.protocol import Transport
from broker.whereabouts import find_results, find_unfinished
from deploy.cli.common import EXIT_ERROR, config_option, json_option, run
from deploy.cli.numbers import seconds
from deploy.cli.show import plain, whole_json
from deploy.cli.whereabouts import describe
from memory_coordinator import Asking, RedisAsking
from schemas.config import Config
from schemas.control import cancel_of
from schemas.questions import Where, WhereIs
from schemas.topics import Topics

ASK_S = 2.0
UNKNOWN = (
    "it was never sent to this cell, its result has expired (topics.results_retention_ms), "
    "or it was so short a while between two places that each look missed it: try again"
)


class Found(Struct):
    """What was found, and what was not known.

    Attributes:
        id: The request's.
        found: Where its records are.
        notes: What was not looked at, and who did not answer.
    """

    id: str
    found: list[Where]
    notes: list[str]


@click.command()
@click.argument("id", metavar="ID")
@config_option
@click.option("--tenant", help="Whose; tenants may use the same id.")
@click.option("--timeout", "timeout_s", type=seconds(0.1), default=ASK_S, show_default=True, help="Seconds to wait for answers.")
@json_option("Print one JSON object.")
def status(*, id: str, config: Config, tenant: str | None, timeout_s: float, as_json: bool) -> None:  # noqa: A002 - click's
    r"""Say where a request is: how many stand before it, why it waits, where it runs, or how it has ended.

    The dispatcher and the workers are asked over Redis, and Kafka is looked through. Exits with 1 where it is not found.

    \b
    Examples:
        forebay status 01K9ZQ4V7W3M7Y1R2A3B4C5D6E
        forebay status r1 --tenant alice --json
    """
    cancel_of(id, tenant)  # checks both names
    found = run(_look(config, id, tenant, timeout_s))
    if as_json:
        click.echo(whole_json(found))
    else:
        now_ms = time.time_ns() // 1_000_000
        for one in found.found:
            click.echo("\n".join(plain(line) for line in describe(one, now_ms)))
        for note in found.notes:
            click.echo(f"forebay: {note}", err=True)
    if not found.found:
        if not as_json:
            click.echo(f"forebay: request {id}{f' of tenant {tenant}' if tenant else ''} was not found: {UNKNOWN}", err=True)
        raise SystemExit(EXIT_ERROR)


async def look(
    config: Config, transport: Transport, asking: Asking, request_id: str, tenant: str | None, timeout_s: float = ASK_S
) -> Found:
    """Ask whoever has requests in hand, and look for what is on Kafka.

    Raises:
        TransportError: Kafka could not be read.
    """
    topics = Topics(config.kafka.topic_prefix)
    (held, notes), ended = await asyncio.gather(
        _ask(asking, WhereIs(request_id, tenant), timeout_s), find_results(transport, topics, request_id, tenant)
    )
    if held or ended.found:
        return Found(request_id, [*ended.found, *held], notes)
    unfinished = await find_unfinished(transport, config, request_id, tenant)
    if not unfinished.found:  # it may have ended between the two looks
        ended = await find_results(transport, topics, request_id, tenant)
    if not (ended.found or unfinished.found):
        notes += [f"not looked at: {line}" for line in (*ended.left_out, *unfinished.left_out)]
    return Found(request_id, [*ended.found, *unfinished.found], notes)


async def _look(config: Config, request_id: str, tenant: str | None, timeout_s: float) -> Found:
    transport, asking = connect(config.kafka), RedisAsking(config.redis, config.kafka.topic_prefix)
    try:
        await transport.check()
        return await look(config, transport, asking, request_id, tenant, timeout_s)
    finally:
        await asking.close()
        await transport.close()


async def _ask(asking: Asking, question: WhereIs, timeout_s: float) -> tuple[list[Where], list[str]]:
    """Ask all processes; give what they have in hand, and who is missing."""
    try:
        answers = await asking.ask(question, timeout_s)
    except ConnectionError as error:
        return [], [f"nobody was asked: {error}"]
    notes = [] if any(answer.role == "dispatcher" for answer in answers) else ["no active dispatcher has answered"]
    notes += [f"{answer.name} has more of that id in hand than it has told" for answer in answers if answer.is_cut]
    return [one for answer in answers for one in answer.found], notes
