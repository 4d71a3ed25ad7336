"""`forebay local`: the whole stack on this machine."""

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from deploy.cli.numbers import seconds
from deploy.cli.tables import standard_output
from deploy.local import stack
from deploy.local.home import home_path
from deploy.local.plan import Wanted

_home = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="The stack's folder (default: FOREBAY_HOME, else your data folder).",
)


@click.group()
def local() -> None:
    """Run the whole stack on this machine: Kafka, Redis, dispatcher and workers."""


@local.command()
@click.option(
    "--engine", "engines", multiple=True, metavar="NAME", help="Engine to start; may be given again. `sim` starts no model."
)
@_home
@click.option("--kafka", metavar="HOST:PORT", help="Use this Kafka instead of starting one.")
@click.option("--redis", metavar="URL", help="Use this Redis instead of starting one.")
@click.option(
    "--broker", type=click.Choice(["auto", "kafka", "tansu"]), default="auto", show_default=True, help="Which broker to start."
)
@click.option("--workers", type=click.IntRange(0, 64), help="Workers per engine (default: as configured).")
@click.option("--timeout", "timeout_s", type=seconds(1), default=stack.UP_S, show_default=True, help="Seconds to wait.")
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON when it answers.")
def up(
    *,
    engines: tuple[str, ...],
    home: Path | None,
    kafka: str | None,
    redis: str | None,
    broker: Any,  # noqa: ANN401 - one of the choices
    workers: int | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    r"""Start the stack; returns when all of it answers. It goes on in the background until `forebay local down`.

    Where one runs already with all that is asked for, nothing changes; where something of it is missing there, that is
    an error, and the stack goes on.

    \b
    Examples:
        forebay local up
        forebay local up --engine sim --workers 2
        forebay local up --kafka broker1:9092 --redis redis://cache:6379/0
    """
    wanted = Wanted(engines=engines, kafka=kafka, redis=redis, broker=broker, workers=workers)
    console, began = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status("starting") as shown:
            seen: list[str] = []

            def report(line: str) -> None:
                shown.update(line)
                if not line.startswith("waiting for"):
                    seen.append(line)
                    console.print(line, highlight=False, markup=False)

            found = stack.up(home, wanted, limit_s=timeout_s, report=report)
    else:
        found = stack.up(home, wanted, limit_s=timeout_s, report=lambda line: click.echo(line, err=True))
    click.echo(f"the stack answers after {time.monotonic() - began:.1f} s", err=True)
    _show(found, as_json=as_json)


@local.command()
@_home
@click.option("--timeout", "timeout_s", type=seconds(1), default=stack.DOWN_S, show_default=True, help="Seconds to wait.")
def down(home: Path | None, timeout_s: float) -> None:
    r"""Stop the stack; running requests are given time to end, and the data stays.

    \b
    Example:
        forebay local down
    """
    ran = stack.down(home, limit_s=timeout_s)
    click.echo(f"stopped the stack in {home_path(home)}" if ran else f"no stack runs in {home_path(home)}")


@local.command()
@_home
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(home: Path | None, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""Tell what runs; exit code 1 where nothing does.

    \b
    Example:
        forebay local status --json
    """
    _show(stack.status(home), as_json=as_json)


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    console = standard_output()
    for name in ("kafka", "redis", "delivery", "home", "config"):
        console.print(f"{name:<9} {found[name]}", highlight=False, markup=False, soft_wrap=True)
    if found["phase"] != "running":
        console.print(f"{'phase':<9} {found['phase']}", highlight=False, markup=False)
    table = Table("engine", "model", "worker", "pid", "healthy", "running", "restarts", box=None)
    for engine in found["engines"]:
        for worker in engine["workers"]:
            healthy = "yes" if worker["is_healthy"] else "no"
            load = f"{worker['running']}/{worker['slots']}"
            shown = (engine["name"], engine["model"], worker["worker"], worker["pid"] or "-", healthy, load, worker["restarts"])
            table.add_row(*map(str, shown))
    console.print(table)
