"""`forebay demo`: environment, stack, twenty prompts, one stream, and a clean stop."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import click
from msgspec import structs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from deploy.cli.common import run
from deploy.demo import Answers, ask_all, read_passages, stream_one
from deploy.engines import RECIPES, install, is_tiny, weights_of
from deploy.local import stack
from deploy.local.home import Home
from deploy.local.plan import Wanted
from schemas.config import Config, EngineConfig, load_config
from schemas.messages import ChatMessage, InferenceRequest, InferenceResult, Sampling

SHOWN = 8
TOLD_EVERY = 5
ANSWER_CHARS = 240
PLAIN_COLUMNS = 120  # where the output is no terminal
STREAMED = "Name three things that flow, and say one sentence about each."
OUT = Path("demo-output")


@click.command()
@click.option(
    "--engine", "engines", multiple=True, metavar="NAME", help="Engine to show; may be repeated. [default: transformer]"
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=OUT, show_default=True, help="For the answers.")
@click.option("--home", type=click.Path(file_okay=False, path_type=Path), help="The stack's folder. [default: a fresh one]")
@click.option("--broker", type=click.Choice(["auto", "kafka", "tansu"]), default="auto", show_default=True, help="Which broker.")
@click.option("--keep", is_flag=True, help="Leave the stack running.")
def demo(engines: tuple[str, ...], out: Path, home: Path | None, broker: str, keep: bool) -> None:  # noqa: FBT001
    r"""From nothing to answers: installs the engines, starts the stack, answers twenty passages, streams one, stops.

    Of several engines each is asked by its model's name in turn, and the dispatcher chooses for the rest.
    Ends with 0 only if every passage was answered.

    \b
    Examples:
        forebay demo
        forebay demo --engine transformer --engine ssm --engine moe
        forebay demo --engine sim --keep
    """
    wanted = engines or ("transformer",)
    began = time.monotonic()
    simulated = _simulated(home)
    for name in wanted:
        if name in RECIPES and name not in simulated:
            install(name, "cpu", partial(_say_of, began, name))
    home = home or Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    try:
        with _stack(home, Wanted(engines=wanted, broker=broker), began, keep=keep) as config:  # type: ignore[arg-type]
            answers = _show(config, out, began, list(wanted))
    finally:
        _say(began, f"the stack's config and logs: {home}")
    if answers.failed:
        for result in answers.failed:
            reason = result.error.message if result.error else "the answer is empty"
            click.echo(f"forebay: {result.request_id} was not answered: {result.status}: {reason}", err=True)
        sys.exit(1)
    click.echo(f"all {len(answers.results)} passages were answered, {time.monotonic() - began:.0f} s after the start")


def _simulated(home: Path | None) -> set[str]:
    """Engines that need no installation: what a home is configured for, and our own."""
    config = Home(home).config if home else None
    engines = load_config(config, {}).engines if config and config.exists() else {}
    return {"sim", *(name for name, engine in engines.items() if engine.is_simulated)}


@contextmanager
def _stack(home: Path, wanted: Wanted, began: float, *, keep: bool) -> Iterator[Config]:
    was_there = Home(home).is_supervised()
    found = stack.up(home, wanted, report=lambda step: _say(began, step))
    try:
        _say(began, f"Kafka {found['kafka']}, Redis {found['redis']}, delivery {found['delivery']}")
        yield load_config(Path(found["config"]), {})
    finally:
        if keep or was_there:
            _say(began, f"the stack goes on; stop it with `forebay local down --home {home}`")
        else:
            stack.down(home)
            _say(began, "the stack is stopped")


def _show(config: Config, out: Path, began: float, engines: list[str]) -> Answers:
    shown = [config.engines[name] for name in engines]
    requests = [_aimed(request, shown, n) for n, request in enumerate(read_passages())]
    for name in engines:
        engine = config.engines[name]
        if engine.is_simulated:
            _say(began, f"{name} is simulated: its answers are made up, without a model")
        elif (label := weights_of(engine)) and is_tiny(label):
            _say(began, f"{name} runs {engine.model}, which is {label}: its answers show the path, not what the engine can say")
    tenants = len({request.tenant for request in requests})
    _say(began, f"asking about {len(requests)} passages for {tenants} tenants")
    came, asked, last = Answers([]), time.monotonic(), dict[str, float]()
    try:
        with _progress(len(requests)) as tick:

            def answered(result: InferenceResult) -> None:
                came.results.append(result)
                last[result.engine or "-"] = time.monotonic() - asked
                tick(result)

            answers = run(ask_all(config, requests, answered))
        came = answers
    finally:
        if came.results:
            came.write(out / "answers.jsonl")
            _say(began, f"{len(came.results)} of {len(requests)} answers: {out / 'answers.jsonl'}")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
    console.print(_table(requests, answers))
    console.print(_by_engine(config, answers, last))
    click.echo(f"streaming: {STREAMED}")
    chat = InferenceRequest(messages=[ChatMessage("user", STREAMED)], max_output_tokens=96, sampling=Sampling(temperature=0.0))
    result = run(stream_one(config, _aimed(chat, shown, 0), lambda text: click.echo(text, nl=False)))
    click.echo("")
    if result is not None and result.timing.ttft_ms is not None:
        click.echo(f"({result.usage.output_tokens} tokens, the first after {result.timing.ttft_ms:.0f} ms, by {result.engine})")
    return answers


def _aimed(request: InferenceRequest, engines: list[EngineConfig], turn: int) -> InferenceRequest:
    """Ask for one engine's model after the other, and once in each round for none, so that the dispatcher chooses."""
    if len(engines) == 1:
        return structs.replace(request, routing_hint=engines[0].kind)
    at = turn % (len(engines) + 1)
    if at == len(engines):
        return request
    return structs.replace(request, model=engines[at].model, fallback="same_model")  # it waits for that one where it is full


def _table(requests: list[InferenceRequest], answers: Answers) -> Table:
    table = Table("tenant", "engine", "tokens", "latency", "answer", box=None, title="the first answers", title_justify="left")
    for request, result in list(zip(requests, answers.results, strict=True))[:SHOWN]:
        latency = f"{result.timing.latency_ms or 0:.0f} ms"
        answer = " ".join(result.output_text.split()) or (result.error.message if result.error else "")
        question = request.metadata.get("question", "")
        short = answer if len(answer) <= ANSWER_CHARS else answer[:ANSWER_CHARS] + "…"
        table.add_row(result.tenant, result.engine or "-", str(result.usage.output_tokens), latency, f"[dim]{question}[/dim]")
        table.add_row("", "", "", "", Text(short))
    return table


def _by_engine(config: Config, answers: Answers, last: dict[str, float]) -> Table:
    """What each engine did, up to its own last answer; all were asked at once."""
    table = Table("engine", "kind", "model", "weights", box=None, title="by engine", title_justify="left")
    for column in ("requests", "tokens", "median latency", "tokens/s"):
        table.add_column(column, justify="right")
    for name in sorted({result.engine or "-" for result in answers.results}):
        results = [result for result in answers.results if (result.engine or "-") == name]
        tokens = sum(result.usage.output_tokens for result in results)
        latency = f"{median(result.timing.latency_ms or 0 for result in results) / 1000:.1f} s"
        rate = f"{tokens / max(last.get(name, 0.0), 0.001):.1f}"
        engine = config.engines.get(name)
        facts = (engine.kind, engine.model, weights_of(engine) or "-") if engine else ("-", "-", "-")
        table.add_row(name, *facts, str(len(results)), str(tokens), latency, rate)
    return table


@contextmanager
def _progress(total: int) -> Iterator[Callable[[InferenceResult], None]]:
    """A bar on a terminal, a line for each fifth answer elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        done = 0

        def tell(_: InferenceResult) -> None:
            nonlocal done
            done += 1
            if done % TOLD_EVERY == 0 or done == total:
                click.echo(f"answered {done} of {total}", err=True)

        yield tell
        return
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("answered", total=total)
        yield lambda _: progress.advance(task)


def _say_of(began: float, name: str, what: str) -> None:
    _say(began, f"{name}: {what}")


def _say(began: float, what: str) -> None:
    click.echo(f"[{time.monotonic() - began:5.0f} s] {what}", err=True)
