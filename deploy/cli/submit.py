"""`forebay submit`: one request from the command line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from broker import Client, ResultStream, StreamRestarted
from broker.client import TIMEOUT_S
from broker.requests import prepare, request_bytes_max
from deploy.cli.common import config_option, json_option, run
from deploy.cli.numbers import Finite, seconds
from deploy.cli.show import elsewhere, failure, likelihoods, summary, whole_json
from schemas.config import Config
from schemas.errors import InvalidMessage
from schemas.messages import InferenceResult

STDIN = "-"
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop", "logprobs")


@click.command()
@click.argument("prompt")
@config_option
@click.option("-s", "--stream", "streams", is_flag=True, help="Print tokens as they come.")
@json_option("Print the whole result as one JSON object; with --stream, the chunks on lines before it.")
@click.option("--id", "id", help="The request's id. [default: a fresh one]")
@click.option("--tenant", help="Who asks. [default: default]")
@click.option("--model", help="A model's name or alias. [default: auto]")
@click.option("--system", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Send the text to be continued as it is, not as a message through the chat template.")
@click.option("--max-output-tokens", type=int, help="Upper bound of generated tokens. [default: 256]")
@click.option("--temperature", type=Finite(), help="0 always takes the likeliest token. [default: 1]")
@click.option("--top-p", type=Finite(), help="Draw from the likeliest tokens that make up this share.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest tokens.")
@click.option("--seed", type=int, help="Draw the same tokens again. [default: derived from the id]")
@click.option("--stop", multiple=True, help="End where the output says this; may be repeated.")
@click.option("--logprobs", type=int, metavar="N", help="Tell how likely each token was, beside the N likeliest. [up to 20]")
@click.option(
    "--json-schema", type=click.Path(dir_okay=False), metavar="FILE", help="The answer is JSON that this schema allows."
)
@click.option("--regex", help="The whole answer is matched by this regular expression.")
@click.option("--routing-hint", "--engine-hint", "routing_hint", metavar="KIND", help="The kind of engine preferred.")
@click.option("--fallback", help="Which engines may stand in: any, same_model or none.")
@click.option("--deadline", metavar="RFC3339", help="It expires then: 2026-12-31T23:59:00+01:00.")
@click.option("--slo-latency-ms", type=int, help="Latency wished for: it steers to faster engines, and is no deadline.")
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Returned with the result; may be repeated.")
@click.option("--batch", is_flag=True, help="Send it in the batch class, behind interactive requests.")
@click.option("--timeout", "timeout_s", type=seconds(0.1), default=TIMEOUT_S, show_default=True, help="Seconds to wait.")
def submit(
    *, prompt: str, config: Config, streams: bool, as_json: bool, batch: bool, timeout_s: float, **options: object
) -> None:
    r"""Send one request and print its answer. PROMPT may be - for standard input; it goes as a user's message.

    Exits with 0 only where the request was completed.

    \b
    Examples:
        forebay submit "What is a forebay?"
        forebay submit --stream --temperature 0 --raw "Once upon a time"
        forebay submit --json --tenant alice - < prompt.txt
        forebay submit --regex "yes|no" "Is water wet?"
    """
    fields = _fields(_text(prompt, config), options)
    prepare(fields, {}, bytes_max=request_bytes_max(config))  # what is wrong with it is said before connecting
    arguments = {"service_class": "batch" if batch else "interactive", "timeout_s": timeout_s}
    result = run(_submit(config, fields, arguments, streams=streams, as_json=as_json))
    if as_json:
        click.echo(whole_json(result))
    elif not streams and (result.output_text or result.status == "completed"):
        click.echo(result.output_text)
    if result.status != "completed":
        click.echo(failure(result), err=True)
        raise SystemExit(1)
    if not as_json and (unread := elsewhere(result)):
        click.echo(f"forebay: request {result.request_id} completed, but {unread}", err=True)
        raise SystemExit(1)
    if not as_json and result.logprobs:
        click.echo("\n".join(likelihoods(result.logprobs)))
    if not as_json and sys.stderr.isatty():
        click.echo(summary(result), err=True)


async def _submit(
    config: Config, fields: dict[str, Any], arguments: dict[str, Any], *, streams: bool, as_json: bool
) -> InferenceResult:
    async with Client(config) as client:
        if not streams:
            return await client.submit(fields, **arguments)
        async with client.stream(fields, **arguments) as stream:
            return await _print(stream, as_json=as_json)


async def _print(stream: ResultStream, *, as_json: bool) -> InferenceResult:
    printed = False
    async for item in stream:
        if isinstance(item, StreamRestarted):
            click.echo("\nforebay: another worker took over and says something else; from the start:", err=True)
        elif as_json:
            click.echo(whole_json(item))
        else:
            click.echo(item.text, nl=False)
            printed = printed or bool(item.text)
    if printed:
        click.echo()
    if stream.result is None:
        message = "the stream ended without a result"
        raise RuntimeError(message)
    return stream.result


def _fields(text: str, options: dict[str, object]) -> dict[str, Any]:
    """The request's fields, of the options that were given."""
    if not text.strip():
        message = "`prompt`: it is empty"
        raise InvalidMessage(message, "prompt")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None and value != ()}
    system, raw = given.pop("system", None), given.pop("raw", False)
    if raw and system is not None:
        message = "--system and --raw exclude each other: a raw prompt has no messages"
        raise click.UsageError(message)
    if pairs := given.pop("metadata", ()):
        given["metadata"] = _metadata(pairs)
    if form := _output_format(given.pop("json_schema", None), given.pop("regex", None)):
        given["output_format"] = form
    sampling = {name: given.pop(name) for name in _SAMPLING if name in given}
    if sampling:
        given["sampling"] = sampling
    if raw:
        return {"prompt": text, **given}
    before = [{"role": "system", "content": system}] if system is not None else []
    return {"messages": [*before, {"role": "user", "content": text}], **given}


def _output_format(schema: str | None, regex: str | None) -> dict[str, Any]:
    if schema is not None and regex is not None:
        message = "--json-schema and --regex exclude each other: an answer has one form"
        raise click.UsageError(message)
    if regex is not None:
        return {"regex": regex}
    if schema is None:
        return {}
    try:
        found = msgspec.json.decode(Path(schema).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"--json-schema {schema}: expected a file with a JSON schema, an object: {error}"
        raise InvalidMessage(message, "output_format.json_schema") from None
    return {"json_schema": found}


def _metadata(pairs: Sequence[str]) -> dict[str, str]:
    """Read `KEY=VALUE` pairs."""
    found = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or key in found:
            message = f"--metadata: expected KEY=VALUE, each key once, got {pair!r}."
            raise click.UsageError(message)
        found[key] = value
    return found


def _text(prompt: str, config: Config) -> str:
    if prompt != STDIN:
        return prompt
    limit = request_bytes_max(config)
    raw = sys.stdin.buffer.read(limit + 1)
    if len(raw) > limit:
        message = f"standard input: expected at most {limit} bytes"
        raise InvalidMessage(message, "prompt")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        message = f"standard input is not UTF-8: {error.reason} at byte {error.start}"
        raise InvalidMessage(message, "prompt") from None
