"""What a run came to, as plain figures for JSON, and as tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.simulate.histogram import Histogram
from deploy.simulate.runs import Found
from deploy.simulate.scenario import Scenario
from deploy.simulate.world import Ran

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def figures(ran: Ran) -> dict[str, Any]:
    """Give the figures of one run; times in milliseconds, shares from 0 to 1."""
    measures = ran.measures
    ttft, tpot, latency = merged(ran, "ttft"), merged(ran, "tpot"), merged(ran, "latency")
    work_ms = sum(tenant.work_ms for tenant in measures.tenants.values())
    answered = measures.engines.total()
    window_s = measures.window_ms / 1000
    return {
        "requests": measures.arrived,
        "ended": dict(sorted(measures.statuses.items())),
        "is_whole": ran.is_whole,
        "simulated_s": round(ran.seconds, 3),
        "gpus": ran.workers,
        "utilisation": _share(measures.useful_ms, ran.gpu_ms),
        "utilisation_with_misses": _share(measures.work_ms, ran.gpu_ms),
        "busy": _share(ran.busy_ms, ran.workers * ran.seconds * 1000),
        "attainment": round(measures.attainment(), 5) if measures.measured else None,
        "ttft_ms": _quantiles(ttft),
        "tpot_ms": _quantiles(tpot),
        "latency_ms": _quantiles(latency),
        "queue_max": measures.queue_most,
        "recovery_s": measures.recovery_s(),
        "engines": {name: _share(count, answered) for name, count in sorted(measures.engines.items())},
        "tenants": {
            name: {
                "arrived": tenant.arrived,
                "answered": tenant.answered,
                "share": _share(tenant.work_ms, work_ms),
                "tokens_per_s": round(tenant.tokens / window_s, 1) if window_s else 0.0,
            }
            for name, tenant in sorted(measures.tenants.items())
        },
        "kinds": [
            {
                "engine": ask.engine,
                "tenant": ask.tenant,
                "class": ask.service_class,
                "requests": kind.count,
                "attainment": _share(kind.met, kind.count),
                "ttft_ms": _quantiles(kind.ttft),
                "tpot_ms": _quantiles(kind.tpot),
                "latency_ms": _quantiles(kind.latency),
            }
            for ask, kind in measures.of_kinds()
        ],
    }


def whole_report(
    scenario: Scenario, where: str, rans: Mapping[str, Ran], found: Mapping[str, Found] | None = None
) -> dict[str, Any]:
    """Give everything as one JSON object."""
    report: dict[str, Any] = {
        "scenario": where,
        "title": scenario.title,
        "seed": scenario.seed,
        "scale": scenario.scale,
        "gpus": scenario.workers,
        "slo": {
            "ttft_ms": scenario.slo.ttft_ms,
            "tpot_ms": scenario.slo.tpot_ms,
            "attainment": scenario.slo.attainment,
            "classes": scenario.slo.classes,
        },
        "policies": {name: figures(ran) for name, ran in rans.items()},
    }
    if found is not None:
        report["found"] = {
            name: {str(scenario.finds): None if one.at is None else round(one.at, 4), "beyond": one.beyond}
            for name, one in found.items()
        }
    return report


def merged(ran: Ran, name: str) -> Histogram:
    """Give the distribution of a figure over all kinds of requests that have an objective, or over all where none has."""
    kinds = ran.measures.of_kinds()
    measured = [kind for ask, kind in kinds if ask.service_class in ran.measures.slo.classes and kind.answered]
    found = Histogram()
    for kind in measured or [kind for _, kind in kinds]:
        found.merge(getattr(kind, name))
    return found


def print_runs(console: Console, scenario: Scenario, rans: Mapping[str, Ran], found: Mapping[str, Found] | None = None) -> None:
    """Print a line for each policy, and the tenants' shares where there are several."""
    slo = scenario.slo
    console.print(scenario.title, highlight=False)
    if slo.classes:
        bounds = f"first token within {slo.ttft_ms / 1000:g} s, {slo.tpot_ms:g} ms per token"
        console.print(f"objective: {slo.attainment:.0%} of {' and '.join(slo.classes)} requests: {bounds}", highlight=False)
    columns = {name: _cells(ran) for name, ran in rans.items()}
    if found is not None:
        head = "load" if scenario.finds == "load" else "GPUs"
        columns = {name: {head: _at(found[name], scenario.finds), **cells} for name, cells in columns.items()}
    table = Table(box=None, padding=(0, 2, 0, 0), caption="p50/p99; queue: the longest", caption_justify="left")
    table.add_column("policy", no_wrap=True)
    for head in next(iter(columns.values()), {}):
        table.add_column(head, justify="right", no_wrap=True)
    for name, cells in columns.items():
        table.add_row(name if rans[name].is_whole else f"{name} (stopped)", *cells.values())
    console.print(table)
    if empty := [name for name, ran in rans.items() if not any(kind.count for _, kind in ran.measures.of_kinds())]:
        what = f"{', '.join(empty)}: nothing was measured, as no request came after the warm-up of {scenario.warmup_s:g} s"
        console.print(what, highlight=False)
    if any(ran.measures.recovery_s() for ran in rans.values()):
        told = "; ".join(f"{name} {_recovery(ran)}" for name, ran in rans.items())
        console.print(f"within the objective again after the shift: {told}", highlight=False)
    if unserved := {name: _unserved(ran) for name, ran in rans.items() if _unserved(ran)}:
        told = "; ".join(
            f"{name}: {', '.join(f'{n} {status}' for status, n in ended.items())}" for name, ended in unserved.items()
        )
        console.print(f"not answered: {told}", highlight=False)
    tenants = sorted({name for ran in rans.values() for name in ran.measures.tenants})
    if len(tenants) > 1:
        shares = Table("share of the work", *tenants, box=None, padding=(0, 2, 0, 0))
        for name, ran in rans.items():
            total = sum(tenant.work_ms for tenant in ran.measures.tenants.values())
            known = ran.measures.tenants
            shares.add_row(name, *(f"{_share(known[one].work_ms, total):.1%}" if one in known else "-" for one in tenants))
        console.print(shares)


def _recovery(ran: Ran) -> str:
    return ", ".join("not within a minute" if s is None else f"after {s:g} s" for s in ran.measures.recovery_s())


def _unserved(ran: Ran) -> dict[str, int]:
    return {status: count for status, count in sorted(ran.measures.statuses.items()) if status != "completed"}


def _at(found: Found, finds: str | None) -> str:
    if found.at is None:
        return "none"
    return f"{found.at:.3g}x" if finds == "load" else f"{found.at:.0f}"


def _cells(ran: Ran) -> dict[str, str]:
    told = figures(ran)
    ttft, tpot, latency = told["ttft_ms"], told["tpot_ms"], told["latency_ms"]
    return {
        "useful": f"{told['utilisation']:.1%}",
        "attained": "-" if told["attainment"] is None else f"{told['attainment']:.2%}",
        "TTFT s": f"{ttft['p50'] / 1000:.2f}/{ttft['p99'] / 1000:.2f}",
        "TPOT ms": f"{tpot['p50']:.0f}/{tpot['p99']:.0f}",
        "latency s": f"{latency['p50'] / 1000:.1f}/{latency['p99'] / 1000:.1f}",
        "queue": str(told["queue_max"]),
    }


def _quantiles(histogram: Histogram) -> dict[str, float]:
    found = {name: round(histogram.quantile(share), 3) for name, share in QUANTILES.items()}
    return {**found, "mean": round(histogram.mean, 3), "max": round(histogram.most, 3)}


def _share(part: float, whole: float) -> float:
    return round(part / whole, 5) if whole else 0.0
