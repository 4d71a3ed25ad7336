"""Measure rows of figures, each as a ratio against a baseline in the same run; print a table and write results.json.

    python tests/benchmarks/run.py --rows 1,2,3,17 [--rounds 5]

Each figure is the median of alternating rounds, with its spread. A figure that misses its goal fails nothing.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # cells.py
sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, whichever is installed
sys.path.insert(0, str(Path(__file__).parent))

import agreement_row
import backlog_row
import chaos_row
import experts_row
import live_rows
import policy_rows
import prediction_row
import simulate_rows
import slices_row
import ssm_row
from hop_rows import latency, throughput
from install_row import import_seconds, install
from rich.console import Console
from rich.table import Table

from deploy.local.services import services
from deploy.processes import relax_collector

RESULTS = Path(__file__).with_name("results.json")
RECORDS, PROBES, GAP_S = 40_000, 400, 0.02
FLAT_MB = 20  # how much more the last quarter may hold than the second
COMMAND = "make bench ROWS={}"


def line(row: int, metric: str, *values: Any) -> dict[str, Any]:
    """One entry of results.json: ours, baseline, limit, ratio, goal, met."""
    names = ("row", "metric", "ours", "baseline", "limit", "ratio", "goal", "met", "command")
    return dict(zip(names, (row, metric, *values, COMMAND.format(row)), strict=True))


def spread(values: list[float], digits: int = 0) -> dict[str, float]:
    """Median, least and greatest."""
    return {name: round(f(values), digits) for name, f in (("median", median), ("min", min), ("max", max))}


def throughput_row(row: int, delivery: str, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home, services(Path(home), "kafka") as running:
        ours, bare = asyncio.run(throughput(running.kafka, delivery, rounds, RECORDS))
    ratio = round(median(o / b for o, b in zip(ours, bare, strict=True)), 3)
    metric = f"dispatcher msgs/s, 1 KB, {delivery}"
    return [line(row, metric, spread(ours), spread(bare), "the bare loop", ratio, ">= 0.85", ratio >= 0.85)]


def latency_row(rounds: int) -> list[dict[str, Any]]:
    lines = []
    for delivery in ("exactly_once", "at_least_once"):
        with tempfile.TemporaryDirectory() as home, services(Path(home), "kafka") as running:
            found = asyncio.run(latency(running.kafka, delivery, rounds, PROBES, GAP_S))
        for quantile, goal in (("p50", 1.2), ("p99", 1.5)):
            ours, bare = found[f"ours {quantile}"], found[f"bare {quantile}"]
            ratio = round(median(ours) / median(bare), 3)
            metric = f"latency of one hop, ms, {quantile}, {delivery}"
            lines.append(line(3, metric, spread(ours, 1), spread(bare, 1), "the bare loop", ratio, f"<= {goal}x", ratio <= goal))
    return lines


def install_rows(rounds: int) -> list[dict[str, Any]]:
    seconds, megabytes, torch = install()
    ours = [import_seconds("from broker import Client") for _ in range(rounds)]
    empty = [import_seconds("pass") for _ in range(rounds)]
    ratio = round(median(ours) / median(empty), 2)
    installed = {"seconds": round(seconds, 1), "megabytes": round(megabytes), "torch": torch}
    return [
        line(17, "core install", installed, None, "-", None, "no torch", not torch),
        line(
            17,
            "import of the client, s",
            spread(ours, 3),
            spread(empty, 3),
            "an interpreter",
            ratio,
            "< 0.3 s",
            median(ours) < 0.3,
        ),
    ]


def chaos_rows() -> list[dict[str, Any]]:
    """What was lost and repeated; the baseline's faults are those of the real run."""
    simulated, ours, bare = chaos_row.simulated(), chaos_row.real(bare=False), chaos_row.real(bare=True)
    lines = []
    for metric, found in ((f"{chaos_row.SEEDS} simulated runs with kills", simulated), (f"{chaos_row.FAULTS} real faults", ours)):
        counts, baseline = ({name: one[name] for name in ("accepted", "lost", "duplicated")} for one in (found, bare))
        is_met = found["lost"] == found["duplicated"] == 0
        lines.append(line(14, f"terminal results, {metric}", counts, baseline, "0 / 0", None, "0 lost, 0 duplicated", is_met))
    return lines


def backlog_rows() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home, services(Path(home) / "services", "kafka") as running:
        ours_s, memory = backlog_row.batch(running, Path(home) / "batch")
        bare_s = backlog_row.bare(running)
    with tempfile.TemporaryDirectory() as home, services(Path(home) / "services", "kafka") as running:
        moved, memory_behind = backlog_row.backlog(running, Path(home) / "backlog")
    ratio = round(ours_s / bare_s, 1)
    goal = "< 300 MB and flat"
    lines = [
        line(16, f"batch of {backlog_row.LINES} lines, s", round(ours_s, 1), round(bare_s, 1), "the bare loop", ratio, "-", None)
    ]
    behind = f"before {backlog_row.BACKLOG} requests, about {moved} of them moved"
    for what, found in (("during that batch", memory), (behind, memory_behind)):
        is_met = found["max MB"] < 300 and found["growth MB"] <= FLAT_MB
        lines.append(line(16, f"dispatcher's RSS {what}", found, None, "-", None, goal, is_met))
    return lines


def prediction_rows(rounds: int) -> list[dict[str, Any]]:
    lines = []
    for told, per_beat, floor in (("told at once", 1, "floor"), ("told 50 at a time", 50, "known")):
        found = [prediction_row.measure(seed, per_beat) for seed in range(1, rounds + 1)]

        def percent(name: str, digits: int = 2, found: list[dict[str, float]] = found) -> dict[str, float]:
            return spread([one[name] * 100 for one in found], digits)

        within, stretches = percent("ours within"), f"{percent('least')['min']} to {percent('greatest')['max']}"
        is_met = within["min"] >= 88 and within["max"] <= 92
        ours = within | {"any 1,000": stretches}
        lines.append(line(10, f"runs within their p90, %, {told}", ours, percent("profile within"), 90, None, "88-92 %", is_met))
        ratio = round(median(one["ours error"] / one[f"{floor} error"] for one in found), 3)
        limit = percent(f"{floor} error") | {"at each moment": percent("floor error")["median"]}
        metric = f"mean error of a run's time, %, {told}"
        both = percent("ours error"), percent("profile error")
        lines.append(line(10, metric, *both, limit, ratio, "<= 1.05x the floor", ratio <= 1.05))
        both = percent("ours reach", 1), percent("profile reach", 1)
        lines.append(line(10, f"p90 over the noiseless time, %, {told}", *both, percent("floor reach", 1), None, "-", None))
    return lines


def share_rows(rounds: int) -> list[dict[str, Any]]:
    """In the simulator, on the live stack, and whether the two agree."""
    measured = simulate_rows.guarantee, live_rows.behind_a_backlog, agreement_row.agreement
    return [entry for measure in measured for entry in measure(line, spread, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,17")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    known = {
        1: lambda: throughput_row(1, "exactly_once", given.rounds),
        2: lambda: throughput_row(2, "at_least_once", given.rounds),
        3: lambda: latency_row(given.rounds),
        4: lambda: policy_rows.decision_lines(line, spread, given.rounds),
        5: lambda: [
            *simulate_rows.utilisation(line, spread, 5, "a", given.rounds),
            simulate_rows.beside_batch(line, spread, given.rounds),
        ],
        6: lambda: simulate_rows.utilisation(line, spread, 6, "b", given.rounds),
        7: lambda: policy_rows.fairness_lines(line),
        8: lambda: share_rows(given.rounds),
        9: lambda: simulate_rows.staleness(line, spread, given.rounds),
        10: lambda: prediction_rows(given.rounds),
        13: lambda: experts_row.residency(line, spread, given.rounds),
        14: chaos_rows,
        15: lambda: ssm_row.beside_generate(line, spread, given.rounds),
        16: backlog_rows,
        17: lambda: install_rows(given.rounds),
        18: lambda: slices_row.turns(line, spread, given.rounds),
    }
    relax_collector()  # as the dispatcher process does; the bare loop profits too
    rows = [int(row) for row in given.rows.split(",") if row]
    if unknown := sorted(set(rows) - set(known)):
        parser.error(f"no such row: {unknown}; there are {sorted(known)}")
    entries = [entry for row in rows for entry in known[row]()]
    old = json.loads(RESULTS.read_text()) if RESULTS.exists() else []  # now, as other rows may have been measured meanwhile
    entries += [entry for entry in old if entry["row"] not in rows]
    entries.sort(key=lambda entry: entry["row"])
    RESULTS.write_text(json.dumps(entries, indent=1) + "\n")
    table = Table("row", "metric", "ours", "baseline", "ratio", "goal", "met", box=None)
    for entry in entries:
        if entry["row"] in rows:
            table.add_row(*(_cell(entry[name]) for name in ("row", "metric", "ours", "baseline", "ratio", "goal", "met")))
    Console(width=160).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    if value is None or isinstance(value, bool):
        return "-" if value is None else "yes" if value else "no"
    return str(value)


if __name__ == "__main__":
    main()
