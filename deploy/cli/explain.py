"""`forebay explain`: where one request would go, and why."""

from pathlib import Path
from typing import BinaryIO

import click
from msgspec import Struct

from deploy.cli.common import EXIT_ERROR, config_option, json_option, run
from deploy.cli.explained import print_explained
from deploy.cli.numbers import seconds
from deploy.cli.show import whole_json
from dispatcher.core.admission import Refused
from dispatcher.core.item import NEVER_MS
from dispatcher.core.routing import Explanation
from dispatcher.core.view import Mind
from dispatcher.plugins import load_plugins
from memory_coordinator import Asking, RedisAsking
from schemas import codecs
from schemas.config import Config
from schemas.errors import ConfigError, ErrorCode, InvalidMessage
from schemas.messages import ErrorInfo, ServiceClass
from schemas.questions import DispatcherState, StateOf, decode_state, encode_state

ASK_S = 5.0


class Explained(Struct):
    """What is said of a request.

    Attributes:
        at_ms: As of when (Unix time).
        refused: Why it would be refused at once; None where it would not.
        soonest_ms: The least predicted time until its end, over all engines, waits included.
        explanation: Where it would go; None where no engine will ever serve it.
    """

    at_ms: int
    refused: ErrorInfo | None
    soonest_ms: float | None
    explanation: Explanation | None


@click.command()
@click.argument("request", type=click.File("rb"), metavar="REQUEST.json")
@config_option
@click.option("--state", "state_file", type=click.File("rb"), help="A saved state. [default: the running dispatcher's]")
@click.option("--class", "service_class", type=click.Choice(["interactive", "batch"]), default="interactive", show_default=True)
@click.option("--save-state", type=click.Path(dir_okay=False, path_type=Path), help="Write the state there, for --state.")
@click.option(
    "--timeout", "timeout_s", type=seconds(0.1), default=ASK_S, show_default=True, help="Seconds to wait for the state."
)
@json_option("Print one JSON object.")
def explain(
    *,
    request: BinaryIO,
    config: Config,
    state_file: BinaryIO | None,
    service_class: ServiceClass,
    save_state: Path | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    r"""Explain where a request would go: each engine's filters, costs and prediction, and the choice. Nothing is sent.

    REQUEST.json may be - for standard input. It is asked of the active dispatcher, or of a state that was saved before.
    Exits with 1 where the request would be refused.

    \b
    Examples:
        forebay explain request.json
        echo '{"prompt": "hello", "model": "llama"}' | forebay explain - --class batch --json
        forebay explain request.json --save-state state.json
        forebay explain request.json --state state.json
    """
    value = request.read()
    tenant = _tenant_of(getattr(request, "name", "<stdin>"), value)  # what is wrong with it is said before anybody is asked
    load_plugins(config.routing.plugins)
    state = _saved(state_file) if state_file else run(_running(config, None if save_state else tenant, timeout_s))
    if save_state is not None:
        _save(save_state, encode_state(state))
    said = explained(state, value, service_class)
    if as_json:
        click.echo(whole_json(said))
    else:
        print_explained(said.explanation, said.soonest_ms, is_refused=said.refused is not None)
        if said.refused is not None:
            click.echo(f"forebay: it would be refused: {said.refused.code.value}: {said.refused.message}", err=True)
    if said.refused is not None:
        raise SystemExit(EXIT_ERROR)


def explained(state: DispatcherState, value: bytes, service_class: ServiceClass) -> Explained:
    """Explain a request against a state.

    Args:
        state: How things stood.
        value: The request, as JSON.
        service_class: Interactive or batch.

    Raises:
        InvalidMessage: The state cannot be read.
        ConfigError: A plugin that it names is not registered here.
    """
    mind, at_ms = Mind(state), state.at_ms
    item = mind.item(value, service_class)
    if isinstance(item, Refused):
        return Explained(at_ms, item.error, None, None)
    error = mind.router.refusal(item.demand)
    if error is None and item.deadline_ms <= at_ms:
        error = ErrorInfo(ErrorCode.EXPIRED, "its deadline has passed", "deadline")
    if error is not None:
        return Explained(at_ms, error, None, None)
    soonest = mind.router.soonest(item, at_ms)
    soonest_ms = None if soonest is None else soonest.run_ms
    is_bound = item.deadline_ms < NEVER_MS and state.config.dispatcher.admission.deadline == "refuse"
    if is_bound and soonest_ms is not None and at_ms + soonest_ms > item.deadline_ms:
        message = f"no engine is predicted to answer before its deadline: the soonest takes {soonest_ms:.0f} ms"
        error = ErrorInfo(ErrorCode.CAPACITY_EXCEEDED, message, "deadline")
    return Explained(at_ms, error, soonest_ms, mind.router.explain(item, at_ms))


async def live_state(asking: Asking, tenant: str | None, timeout_s: float) -> DispatcherState:
    """Ask the active dispatcher how it sees things.

    Raises:
        ConnectionError: Nobody has answered, or Redis is not there.
    """
    answers = await asking.ask(StateOf(tenant), timeout_s)
    for answer in answers:
        if answer.state is not None:
            return answer.state
    if any(answer.is_cut for answer in answers):
        message = "the dispatcher's state is larger than an answer may be: raise redis.answer_bytes_max there"
    else:
        message = "no active dispatcher has answered: start one with `forebay dispatch`, or give a saved state with --state"
    raise ConnectionError(message)


async def _running(config: Config, tenant: str | None, timeout_s: float) -> DispatcherState:
    asking = RedisAsking(config.redis, config.kafka.topic_prefix)
    try:
        return await live_state(asking, tenant, timeout_s)
    finally:
        await asking.close()


def _tenant_of(name: str, value: bytes) -> str:
    try:
        return codecs.decode_ingress(value).tenant
    except InvalidMessage as error:
        message = f"{name}: {error.message if value.strip() else 'it is empty: expected a request as JSON'}"
        raise InvalidMessage(message, error.param) from None


def _save(path: Path, state: bytes) -> None:
    """Write a state, over an older one at most: a running stack keeps a file of the same likely name."""
    try:
        if path.exists() and path.stat().st_size:
            decode_state(path.read_bytes())
    except InvalidMessage:
        message = f"--save-state: {path} holds something else: give another name, or remove it"
        raise ConfigError(message) from None
    path.write_bytes(state)


def _saved(file: BinaryIO) -> DispatcherState:
    try:
        return decode_state(file.read())
    except InvalidMessage as error:
        message = f"{file.name}: {error.message}"
        raise InvalidMessage(message, error.param) from None
