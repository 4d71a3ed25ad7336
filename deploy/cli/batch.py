"""`forebay batch`: files of OpenAI batch lines."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from broker.batch import Files, Limits, Plan, Progress, Settings, Tally, run_batch
from broker.transport.blobs import Blobs
from broker.transport.connect import connect
from deploy.cli.batch_progress import Bar, Outage, Plain, is_terminal
from deploy.cli.common import EXIT_ERROR, config_option, json_option, run
from deploy.cli.numbers import Finite, seconds
from schemas.config import Config
from schemas.errors import ConfigError
from schemas.messages import DEFAULT_TENANT, Tenant
from schemas.topics import Topics

HOUR_MS = 3_600_000
HOURS_MAX = 24 * 365
_FILE = click.Path(path_type=Path)


@click.group()
def batch() -> None:
    """Run files of OpenAI batch lines."""


@batch.command("run")
@click.argument("source", metavar="IN.jsonl", type=_FILE)
@click.option("-o", "--output", metavar="OUT.jsonl", type=_FILE, required=True, help="A line for each that was answered.")
@click.option("-e", "--errors", metavar="ERR.jsonl", type=_FILE, required=True, help="A line for each that was not.")
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="For whom the requests are.")
@click.option("--model", help="Ask for this model (or `auto`) whatever the lines say.")
@click.option("--max-tokens", type=click.IntRange(1), help="Bound of the output where a line has none.")
@click.option("--max-in-flight", type=click.IntRange(1, 100_000), default=2_000, show_default=True, help="Requests at once.")
@click.option(
    "--window", "window_h", type=Finite(0, HOURS_MAX, min_open=True), default=24.0, show_default=True, help="Hours to answer in."
)
@click.option("--stall", "stall_s", type=seconds(1), default=600.0, show_default=True, help="Seconds without an answer to bear.")
@click.option("--absence", "absence_s", type=seconds(1), default=600.0, show_default=True, help="Seconds without Kafka to bear.")
@click.option("--restart", is_flag=True, help="Forget what an earlier run reached, and replace its outputs.")
@click.option("--resend", is_flag=True, help="Send lines that have no answer again, also those sent already.")
@json_option("Print the counts as one JSON object.")
@config_option
def run_file(
    config: Config,
    source: Path,
    output: Path,
    errors: Path,
    tenant: str,
    model: str | None,
    max_tokens: int | None,
    max_in_flight: int,
    window_h: float,
    stall_s: float,
    absence_s: float,
    restart: bool,  # noqa: FBT001 - click passes flags so
    resend: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    r"""Run a file of OpenAI batch lines (chat completions and completions).

    Every line ends in one of the two output files, in the input's order. What Forebay does not do (several choices,
    tools, log probabilities, embeddings ...) is refused by name in the line's error. Stopped or killed, the same
    command goes on where it was; OUT.jsonl.progress keeps what was reached. A line unanswered after --window hours
    ends as `batch_expired`. While Kafka is away the run waits, says so, and goes on by itself; it stops with an error
    after --absence seconds of that, or after --stall seconds in which Kafka is there and no answer comes.

    Exit code: 0 when every line was answered, 1 when some ended as errors.

    \b
    Example:
        forebay batch run questions.jsonl -o answers.jsonl -e errors.jsonl
    """
    files = Files(source, output, errors)
    settings = Settings(_tenant(tenant), model, max_tokens)
    limits = Limits(max_in_flight, int(window_h * HOUR_MS), int(stall_s * 1000), int(absence_s * 1000))
    plan = Plan(files, settings, config.kafka.record_bytes_max, restart=restart, resend=resend)
    try:
        if plan.is_finished:
            click.echo(f"{output}: was finished before; --restart runs it again", err=True)
        shown = Bar if is_terminal() else Plain
        with shown(plan.tally, Outage(config.kafka.bootstrap, absence_s)) as progress:
            tally = run(_run(config, plan, limits, progress.show))
    finally:
        plan.close()
    _tell(tally, files, as_json=as_json)
    if tally.errors:
        raise SystemExit(EXIT_ERROR)


async def _run(config: Config, plan: Plan, limits: Limits, report: Callable[[Progress], None]) -> Tally:
    transport = connect(config.kafka)
    try:
        if not plan.is_finished:
            await transport.check()
            click.echo(f"batch {plan.name}: `forebay cancel --batch {plan.name}` cancels what was sent", err=True)
        return await run_batch(
            plan, transport, Topics(config.kafka.topic_prefix), limits, report=report, blobs=Blobs(config.blobs)
        )
    except asyncio.CancelledError:
        tally = plan.tally
        reached = f"{tally.answered + tally.errors} of {len(plan.source)} lines have ended"
        click.echo(f"stopped: {reached}; run the same command again to go on", err=True)
        raise
    finally:
        await transport.close()


def _tenant(name: str) -> str:
    try:
        return msgspec.convert(name, Tenant)
    except msgspec.ValidationError:
        message = f"--tenant {name!r}: expected 1 to 64 letters, digits, dots, underscores and dashes"
        raise ConfigError(message) from None


def _tell(tally: Tally, files: Files, *, as_json: bool) -> None:
    if as_json:
        counts = {"total": tally.answered + tally.errors, "answered": tally.answered, "errors": tally.errors}
        click.echo(msgspec.json.encode({**counts, "output": str(files.output), "error_file": str(files.errors)}))
        return
    click.echo(f"{tally.answered} answered: {files.output}", err=True)
    click.echo(f"{tally.errors} errors: {files.errors}", err=True)
