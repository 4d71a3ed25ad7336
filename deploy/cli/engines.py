"""`forebay engines`: the engines' own environments."""

import sys
import time
from collections.abc import Callable

import click
import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.engines import DEVICES, LATER, TRANSFORMER, Device, Installed, install, installed


@click.group()
def engines() -> None:
    """Install and list the engines' own environments."""


@engines.command("install")
@click.argument("kind")
@click.option("--cpu", "device", flag_value="cpu", default="cpu", help="For this machine's CPU (the default).")
@click.option("--gpu", "device", flag_value="gpu", help="For an NVIDIA GPU; not tried on one yet.")
@click.option("--json", "as_json", is_flag=True, help="Print what was installed as one JSON object.")
def install_engine(kind: str, device: Device, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""Make the environment of an engine, and fetch the small model that comes with it.

    Takes some 6 GB below the cache (FOREBAY_CACHE). Where all is there already, nothing is done.

    \b
    Example:
        forebay engines install transformer --cpu
    """
    if kind in LATER:
        message = f"engine {kind!r} is not yet available in this version: `transformer` is, and `sim` needs no install."
        raise click.UsageError(message)
    if kind != TRANSFORMER:
        message = f"no engine called {kind!r} can be installed: `transformer` can, and `sim` needs no install."
        raise click.UsageError(message)
    began = time.monotonic()
    found = _watched(kind, lambda report: install(kind, device, report))
    click.echo(f"{kind}: ready after {time.monotonic() - began:.0f} s", err=True)
    click.echo(msgspec.json.encode(found) if as_json else _line(found))


def _watched(kind: str, work: Callable[[Callable[[str], None]], Installed]) -> Installed:
    """Show each step with its time on a terminal, and as a plain line elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return work(lambda step: click.echo(f"{kind}: {step}", err=True))
    columns = SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:

        def report(step: str) -> None:
            for task in progress.task_ids:
                progress.update(task, total=1, completed=1)
            progress.add_task(f"{kind}: {step}", total=None)

        found = work(report)
        for task in progress.task_ids:
            progress.update(task, total=1, completed=1)
    return found


@engines.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_engines(as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""List the engines that can run here.

    \b
    Example:
        forebay engines list
    """
    found = [one for device in DEVICES if (one := installed(TRANSFORMER, device))]
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    table = Table("engine", "device", box=None)
    for column in ("versions", "python"):
        table.add_column(column, overflow="fold")
    table.add_row("sim", "-", "-", sys.executable)
    for entry in found:
        table.add_row(entry.kind, entry.device, _versions(entry), entry.python)
    Console().print(table)
    if not found:
        click.echo("transformer: not installed: forebay engines install transformer --cpu", err=True)


def _line(entry: Installed) -> str:
    return f"{entry.kind} ({entry.device}): {_versions(entry)}; model {entry.model_path}; python {entry.python}"


def _versions(entry: Installed) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(entry.versions.items()))
