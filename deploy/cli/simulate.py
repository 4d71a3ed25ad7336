"""`forebay simulate`: what would happen, with the dispatcher's own core under virtual time."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import click
import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.cli.common import json_option
from deploy.cli.numbers import Finite
from deploy.cli.tables import standard_output
from deploy.simulate.plot import check_plot, draw
from deploy.simulate.policies import POLICIES, find_policy
from deploy.simulate.report import print_runs, whole_report
from deploy.simulate.runs import Found, Report, Runs, with_trace
from deploy.simulate.scenario import Scenario, find_scenario, load_scenario, shipped
from deploy.simulate.world import Ran

EXIT_INTERRUPTED = 130
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("scenario", metavar="SCENARIO.toml", required=False)
@click.option("--list", "is_list", is_flag=True, help="List the scenarios and the policies that come with Forebay.")
@click.option("--policy", "policies", multiple=True, help="Run this policy instead of the scenario's; may be given again.")
@click.option("--trace", type=_FILE, help="Put this trace under it: Azure's CSV, or Mooncake's lines of JSON.")
@click.option("--seed", type=click.IntRange(0), help="Of everything that is drawn.")
@click.option("--requests", type=click.IntRange(1), help="Stop after so many requests, and go on until then.")
@click.option("--scale", type=Finite(1e-3, 1e4), default=1.0, show_default=True, help="Times the scenario's load.")
@click.option(
    "--find", "finds", type=click.Choice(["load", "gpus", "nothing"]), help="Search the highest load, or the fewest GPUs."
)
@click.option("--plot", "plot_to", type=_FILE, metavar="FILE.png|.svg", help="Draw utilisation, queue, latency and shares.")
@json_option("Print all figures as one JSON object.")
def simulate(
    scenario: str | None,
    is_list: bool,  # noqa: FBT001 - click passes flags so
    policies: tuple[str, ...],
    trace: Path | None,
    seed: int | None,
    requests: int | None,
    scale: float,
    finds: str | None,
    plot_to: Path | None,
    as_json: bool,  # noqa: FBT001
) -> None:
    r"""Say what would happen: Forebay's own scheduling on modelled engines, beside other policies.

    SCENARIO.toml states the engines, the traffic, the objective and every assumption; a shipped one is found by its
    name. Every policy gets the same requests. Stopped by Ctrl-C, it prints what there is.

    \b
    Example:
        forebay simulate a --plot a.png
    """
    if is_list:
        _list(as_json=as_json)
        return
    if scenario is None:
        message = "name a scenario: a file, or one of `forebay simulate --list`"
        raise click.UsageError(message)
    path = find_scenario(scenario)
    chosen = _changed(load_scenario(path), policies, trace, seed, requests, scale, finds)
    if plot_to is not None:
        check_plot(plot_to)
    with _Shown(chosen, requests) as shown:
        rans, found = _run(Runs(chosen, path.parent, requests, shown.report), chosen)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(whole_report(chosen, str(path), rans, found)), indent=1))
    else:
        print_runs(standard_output(), chosen, rans, found)
    if plot_to is not None:
        draw(plot_to, chosen.title, rans)
    if not all(ran.is_whole for ran in rans.values()):
        click.echo("stopped: these are the figures so far", err=True)
        raise SystemExit(EXIT_INTERRUPTED)


def _changed(
    scenario: Scenario,
    policies: tuple[str, ...],
    trace: Path | None,
    seed: int | None,
    requests: int | None,
    scale: float,
    finds: str | None,
) -> Scenario:
    """The scenario as the options would have it."""
    scenario = replace(
        scenario,
        seed=scenario.seed if seed is None else seed,
        scale=scenario.scale * scale,
        policies=list(policies) or scenario.policies,
        finds=None if finds == "nothing" else finds or scenario.finds,
        duration_s=scenario.duration_s if requests is None else float("inf"),
    )
    for policy in scenario.policies:
        find_policy(policy)
    return scenario if trace is None else with_trace(scenario, trace)


def _run(runs: Runs, scenario: Scenario) -> tuple[dict[str, Ran], dict[str, Found] | None]:
    """Run all policies; after an interrupt no more is begun."""
    rans: dict[str, Ran] = {}
    found: dict[str, Found] = {}
    for policy in scenario.policies:
        if scenario.finds is None:
            rans[policy] = runs.run(policy)
        else:
            found[policy] = runs.find_load(policy) if scenario.finds == "load" else runs.find_gpus(policy)
            rans[policy] = found[policy].ran or runs.run(policy)  # where nothing is borne: the scenario as it is
        if not rans[policy].is_whole:
            break
    return rans, found if scenario.finds else None


class _Shown:
    """A bar on a terminal, and nothing elsewhere."""

    def __init__(self, scenario: Scenario, requests: int | None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[count]} requests")
        self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
        self._is_shown = sys.stderr.isatty()
        self._duration_ms, self._requests = scenario.duration_s * 1000, requests
        self._task = self._bar.add_task("", total=1.0, count=0)

    def __enter__(self) -> Self:
        if self._is_shown:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._bar.stop()

    @property
    def report(self) -> Report | None:
        """What a run tells where it stands; None where nobody looks on."""
        return self._tell if self._is_shown else None

    def _tell(self, policy: str, arrived: int, now_ms: float) -> None:
        done = arrived / self._requests if self._requests is not None else now_ms / self._duration_ms
        self._bar.update(self._task, description=policy, completed=done, count=arrived)


def _list(*, as_json: bool) -> None:
    scenarios = {name: load_scenario(path).title for name, path in shipped().items()}
    policies = {name: text for name, (_, text) in POLICIES.items()}
    if as_json:
        click.echo(msgspec.json.encode({"scenarios": scenarios, "policies": policies}))
        return
    console = standard_output()
    console.print(_table("scenario", scenarios))
    console.print(_table("policy", policies))


def _table(head: str, lines: Mapping[str, str]) -> Table:
    table = Table(head, "", box=None)
    for name, text in lines.items():
        table.add_row(name, text)
    return table
