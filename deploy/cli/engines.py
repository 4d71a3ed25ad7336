"""`forebay engines`: the engines' own environments, and their settings while it runs."""

import sys
import time
from collections.abc import Callable
from itertools import product

import click
import msgspec
from msgspec import Struct, structs
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from broker.steering import check_engine, engine_change
from deploy.cli.common import config_option, json_option, run
from deploy.cli.numbers import Bound
from deploy.cli.steering import describe, engine_facts, given, print_facts, steer, wanted
from deploy.cli.tables import standard_output
from deploy.engines import DEVICES, RECIPES, Device, Installed, engine_config, install, installed, not_installable, try_token
from deploy.local.plan import SIM
from schemas.config import Config


@click.group()
def engines() -> None:
    """Engines' own environments, and their rates and pauses while it runs."""


@engines.command("install")
@click.argument("kind")
@click.option("--cpu", "device", flag_value="cpu", default="cpu", help="For this machine's CPU (the default).")
@click.option("--gpu", "device", flag_value="gpu", help="For an NVIDIA GPU; not tried on one yet.")
@click.option("--json", "as_json", is_flag=True, help="Print what was installed as one JSON object.")
def install_engine(kind: str, device: Device, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""Make the environment of an engine, and the small model that comes with it: fetched, or trained for a minute.

    Takes some 6 GB below the cache (FOREBAY_CACHE). Where all is there already, nothing is done.

    \b
    Examples:
        forebay engines install transformer --cpu
        forebay engines install ssm --cpu
    """
    if kind not in RECIPES:
        raise click.UsageError(not_installable(kind))
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
@click.option("--try/--no-try", "tries", default=True, show_default=True, help="Start each one and ask it for a token.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_engines(tries: bool, as_json: bool) -> None:  # noqa: FBT001 - click passes flags so
    r"""List the engines of each kind and device: what is installed, and whether it really gives a token.

    Each engine that is installed is started in its own environment, which takes up to a minute or two for each.

    \b
    Examples:
        forebay engines list
        forebay engines list --no-try --json
    """
    rows = [_tried(row, tries=tries) for row in _rows()]
    if as_json:
        click.echo(msgspec.json.encode(rows))
        return
    table = Table("engine", "device", "state", box=None)
    for column in ("versions", "model", "python"):
        table.add_column(column, overflow="fold")
    for row in rows:
        model = f"{row.model} ({row.weights})" if row.weights else row.model or "-"
        table.add_row(row.kind, row.device, Text(_state(row)), _versions(row.versions) or "-", model, row.python or "-")
    standard_output().print(table)


class _Row(Struct, frozen=True):
    """An engine of a kind for a device, as it is told of."""

    kind: str
    device: str
    installed: bool = False
    python: str | None = None
    model: str | None = None
    weights: str | None = None
    versions: dict[str, str] = {}
    works: bool | None = None
    told: str | None = None
    seconds: float | None = None


def _rows() -> list[_Row]:
    rows = [_Row("sim", "-", installed=True, python=sys.executable)]
    for kind, device in product(RECIPES, reversed(DEVICES)):
        found = installed(kind, device)
        rows.append(
            _Row(kind, device, True, found.python, found.model, found.weights, found.versions)  # noqa: FBT003
            if found
            else _Row(kind, device)
        )
    return rows


def _tried(row: _Row, *, tries: bool) -> _Row:
    """Add what a trial tells; one that is not installed tells how to install it."""
    if not row.installed:
        return structs.replace(row, told=f"forebay engines install {row.kind} --{row.device}")
    if not tries:
        return row
    config = SIM if row.device == "-" else engine_config(row.kind, row.device)  # type: ignore[arg-type]
    if config is None:
        return structs.replace(row, works=False, told="it was removed while this was read")
    click.echo(f"{row.kind} ({row.device}): asking for a token", err=True)
    found = try_token(config)
    return structs.replace(row, works=found.works, told=found.told, seconds=found.seconds)


def _state(row: _Row) -> str:
    if not row.installed:
        return f"not installed: {row.told}"
    if row.works is None:
        return "installed, not tried"
    return f"works: {row.told!r} after {row.seconds:.0f} s" if row.works else f"does not work: {row.told}"


@engines.command("set")
@click.argument("name")
@config_option
@click.option("--requests-per-s-max", type=Bound(), help="It is sent no more requests than that.")
@click.option("--tokens-per-s-max", type=Bound(), help="It is sent no more tokens than that, of prompt and output together.")
@click.option("--burst-s", type=Bound(no_bound=False), help="Seconds' worth of these rates that may be saved up.")
@click.option("--pause/--resume", "paused", default=None, help="Send it nothing, or go on; what it has, it finishes.")
@json_option("Print what holds then as one JSON object.")
def set_engine(*, name: str, config: Config, as_json: bool, **fields: object) -> None:
    r"""Change an engine's settings while it runs. NAME is an engine's or a pool's; all engines of the pool are meant.

    A bound may be `none` (no bound) or `config` (back to what the configuration says). It holds within a second, and
    over restarts, until it is changed or reset.

    \b
    Examples:
        forebay engines set llama --pause
        forebay engines set llama --resume --tokens-per-s-max 50000
        forebay engines set llama --requests-per-s-max none
    """
    check_engine(name, config)
    found = run(steer(config, engine_change(name, **given(fields))))
    pool = found.pool_of(name)
    if as_json:
        click.echo(msgspec.json.encode(engine_facts(found, config, pool)))
    else:
        click.echo(f"engine {pool}: {describe(found.pools().get(pool, found.pool_base(pool)))}")


@engines.command("show")
@click.argument("name", required=False)
@config_option
@json_option("Print one JSON object: of each engine what is configured, what was set, and what holds.")
def show_engines(*, name: str | None, config: Config, as_json: bool) -> None:
    r"""Show the settings of engines: of each pool what is configured, what was set, and what holds.

    \b
    Examples:
        forebay engines show
        forebay engines show llama --json
    """
    if name is not None:
        check_engine(name, config)
    found = run(wanted(config))
    pools = config.pools if name is None else [found.pool_of(name)]
    print_facts("engine", {pool: engine_facts(found, config, pool) for pool in pools}, whole=name is not None, as_json=as_json)


@engines.command("reset")
@click.argument("name")
@config_option
def reset_engine(*, name: str, config: Config) -> None:
    r"""Go back to what the configuration says of an engine.

    \b
    Example:
        forebay engines reset llama
    """
    check_engine(name, config)
    found = run(steer(config, engine_change(name, reset=True)))
    pool = found.pool_of(name)
    click.echo(f"engine {pool}: {describe(found.pool_base(pool))}, as configured")


def _line(entry: Installed) -> str:
    what = f"{entry.kind} ({entry.device}): {_versions(entry.versions)}"
    return f"{what}; model {entry.model_path} ({entry.weights}); python {entry.python}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
