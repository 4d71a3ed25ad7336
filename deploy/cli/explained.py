"""An explanation of a route, as tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.cli.tables import standard_output
from deploy.cli.whereabouts import span
from dispatcher.core.routing import Explanation
from dispatcher.core.routing.explain import PoolView, WorkerView
from dispatcher.core.whereabouts import obstacles

_TIERS = {"serves": "serves it", "equivalent": "an equivalent", "stands_in": "stands in", "none": "not for it"}


def print_explained(
    explanation: Explanation | None, soonest_ms: float | None, console: Console | None = None, *, is_refused: bool = False
) -> None:
    """Print the request, each worker's filters, each worker's costs, and the choice.

    Args:
        explanation: What is to be said; None where no engine will ever serve the request.
        soonest_ms: The least predicted time until its end, where it is known.
        console: Where to; standard output by default.
        is_refused: The request goes nowhere, whoever had taken it.
    """
    if explanation is None:
        return
    out = console or standard_output()
    title = f"request {explanation.id} of tenant {explanation.tenant} ({explanation.service_class}): model {explanation.model}, "
    tokens = f"about {explanation.input_tokens:.0f} tokens in and {explanation.output_tokens:.0f} out"
    out.print(escape(title + tokens), highlight=False)
    named = [f"{name} -> {kind}" for name, kind in explanation.preferences.items() if kind is not None]
    out.print(escape(f"preferred: {', '.join(named) or 'nobody'}"), highlight=False)
    out.print(_filters(explanation))
    out.print(_costs(explanation))
    if not is_refused:
        out.print(escape(_choice(explanation, soonest_ms)), highlight=False)


def _filters(explanation: Explanation) -> Table:
    table = Table("engine", "kind", "tier", "worker", "room", "load", box=None)
    table.add_column("kept from it by", overflow="fold")
    for pool in explanation.pools:
        for place, worker in enumerate(pool.workers or [None]):
            table.add_row(*([pool.pool, pool.kind, _TIERS[pool.tier]] if not place else ["", "", ""]), *_standing(worker))
    return table


def _standing(worker: WorkerView | None) -> list[str]:
    if worker is None:
        return ["-", "-", "-", "has no worker"]
    kept = [f"{name}: {why}" for name, why in worker.filters.items() if why is not None]
    return [escape(worker.worker), worker.room, f"{worker.load}/{worker.limit}", escape("; ".join(kept)) or "-"]


def _costs(explanation: Explanation) -> Table:
    scorers = sorted({name for pool in explanation.pools for worker in pool.workers for name in worker.scores})
    table = Table("engine", "worker", "first token", "takes", "p90", *scorers, "cost", box=None, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for pool in explanation.pools:
        for worker in _shown(pool):
            scores = [worker.scores[name] for name in scorers]
            chosen = (pool.pool, worker.worker) == (explanation.pool, explanation.worker)
            table.add_row(
                pool.pool,
                escape(worker.worker),
                *(span(time_ms) for time_ms in (worker.ttft_ms, worker.run_ms, worker.run_p90_ms)),
                *(f"{max(one.value_ms, 0) * one.weight:.0f}" for one in scores),
                f"{worker.cost_ms:.0f}{' <' if chosen else ''}",
            )
    return table


def _shown(pool: PoolView) -> list[WorkerView]:
    return pool.workers if pool.tier != "none" else []


def _choice(explanation: Explanation, soonest_ms: float | None) -> str:
    if explanation.pool is None:
        kept = ", ".join(f"{pool}: {why}" for pool, (_, why) in obstacles(explanation).items())
        soonest = "" if soonest_ms is None else f"; the soonest is predicted to have answered in {span(soonest_ms)}"
        return f"it waits: nobody takes it now ({kept}){soonest}"
    said, placement = [f"it goes to {explanation.pool}/{explanation.worker}"], explanation.placement
    if placement is not None:
        said.append(f"reason {placement.reason}")
        if placement.wanted is not None:
            said.append(f"wanted {placement.wanted}, which was kept from it: {placement.why_not}")
        if placement.stands_in:
            said.append("another model stands in")
        if placement.predicted_ttft_ms is not None and placement.predicted_ms is not None:
            said.append(f"first token in {span(placement.predicted_ttft_ms)}, end in {span(placement.predicted_ms)}")
    if explanation.cost_ms is not None:
        said.append(f"charged {explanation.cost_ms:.0f} ms of engine time")
    return "; ".join(said)
