"""`forebay engines`: the engines' own environments."""

import sys
import time

import click
import msgspec
from rich.console import Console
from rich.table import Table

from deploy.engines import Installed, install, installed


@click.group()
def engines() -> None:
    """Install and list the engines' own environments."""


@engines.command("install")
@click.argument("kind")
@click.option("--cpu", "device", flag_value="cpu", help="For this machine's CPU (the default).")
@click.option("--gpu", "device", flag_value="gpu", help="For an NVIDIA GPU; not tried on one yet.")
@click.option("--json", "as_json", is_flag=True, help="Print what was installed as one JSON object.")
def install_engine(kind: str, device: str | None, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""Make the environment of an engine, and fetch the small model that comes with it.

    \b
    Example:
        forebay engines install transformer --cpu
    """
    console, began = Console(stderr=True), time.monotonic()
    if console.is_terminal:
        with console.status(f"{kind}: looking") as status:
            found = install(kind, "gpu" if device == "gpu" else "cpu", lambda step: status.update(f"{kind}: {step}"))
    else:
        found = install(kind, "gpu" if device == "gpu" else "cpu", lambda step: click.echo(f"{kind}: {step}", err=True))
    click.echo(f"{kind}: ready after {time.monotonic() - began:.0f} s", err=True)
    click.echo(msgspec.json.encode(found) if as_json else _line(found))


@engines.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_engines(as_json: bool) -> None:  # noqa: FBT001
    r"""List the engines that can run here.

    \b
    Example:
        forebay engines list
    """
    found = [i for device in ("cpu", "gpu") if (i := installed("transformer", device))]  # type: ignore[arg-type]
    if as_json:
        click.echo(msgspec.json.encode(found))
        return
    table = Table("engine", "device", "versions", "python", box=None)
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
