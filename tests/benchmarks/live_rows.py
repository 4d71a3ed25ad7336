"""Row 8 on the live stack: a tenant, and single requests, behind a backlog of 100,000 in the same partition.

Three engines, each with a simulated model, a dispatcher, Apache Kafka. While the aggressor's backlog waits, another
tenant comes again and again with a few hundred requests, then is silent, and now and then one
request of a third one comes. What first in, first out would have done is reckoned: the backlog stands in front.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from live_cell import KINDS, LiveCell, Run, share, tables, utilisation
from raw import request

from deploy.local import ready
from deploy.local.services import services

Line = Callable[..., dict[str, Any]]
Spread = Callable[..., dict[str, float]]
BACKLOG, MINE, ALONE_S, LIMIT_S = 100_000, 600, 6.0, 600.0
SLOTS, TPOT_MS, TOKENS = 24, 10, 100
RUN_MS = TPOT_MS * TOKENS
PER_S = len(KINDS) * SLOTS * 1000 / RUN_MS
WEIGHTS = {"mine": 2.0, "aggressor": 1.0}
GUARANTEE = WEIGHTS["mine"] / sum(WEIGHTS.values())
SHARE, BORROWED, RUNS = 0.99, 0.95, 2.0


def behind_a_backlog(line: Line, spread: Spread, rounds: int) -> list[dict[str, Any]]:
    """What a tenant gets of its guarantee, what of idle capacity is borrowed, and how long a single request takes."""
    with tempfile.TemporaryDirectory() as home, services(Path(home) / "services", "kafka") as running:
        profile = {"ttft_ms": 0.0, "prefill_ms_per_1k": 0.0, "prefill_quadratic_ms": 0.0, "tpot_ms": float(TPOT_MS)}
        speed = {"options": {"tpot_ms": TPOT_MS}, "profile": profile}
        tenants = {name: {"weight": weight} for name, weight in WEIGHTS.items()}
        raw = tables(running, "live", 0, SLOTS, engines=dict.fromkeys(KINDS, speed), tenants=tenants)
        with LiveCell(Path(home) / "cell", raw) as cell:
            cell.start_all()
            lengths = itertools.cycle(range(TOKENS // 2, TOKENS * 3 // 2))
            began_s = time.monotonic()
            cell.produce((_one("aggressor", n, next(lengths)) for n in range(BACKLOG)), cell.interactive)
            ready.until(lambda: cell.length(cell.topics.lanes) > 0.95 * BACKLOG, LIMIT_S, "the backlog to be in a lane")
            away_s = time.monotonic() - began_s
            alone_ms = [_round(cell, turn, lengths) for turn in range(rounds)]
            cell.stop()
            runs = cell.runs()
    shares, used, single = [], [], []
    for turn, since_ms in enumerate(alone_ms):
        mine = [run for run in runs if run.ident.startswith(f"mine-{turn}-")]
        from_ms = min(run.began_ms for run in mine) + 2 * RUN_MS
        to_ms = max(run.sent_ms for run in mine)
        shares.append(share(runs, "mine", from_ms, to_ms) / GUARANTEE)
        used.append(utilisation(runs, len(KINDS) * SLOTS, since_ms, since_ms + (ALONE_S - 1) * 1000))
        single.append(_latency_ms(runs, f"single-{turn}") / RUN_MS)
    left = BACKLOG - len(runs)
    behind = f"behind {BACKLOG} requests in its partition (live; in a lane after {away_s:.0f} s)"
    fifo_runs = round(left / PER_S * 1000 / RUN_MS)
    return [
        line(
            8,
            f"of its guarantee, a tenant {behind}",
            spread(shares, 3),
            {"FIFO, reckoned": 0.0},
            "100 %",
            None,
            f">= {SHARE:.0%}",
            median(shares) >= SHARE,
        ),
        line(
            8,
            "idle capacity that is borrowed (live)",
            spread(used, 3),
            None,
            "all slots",
            round(median(used), 3),
            f">= {BORROWED:.0%}",
            median(used) >= BORROWED,
        ),
        line(
            8,
            f"a single interactive request {behind}, service times",
            spread(single, 2),
            {"FIFO, reckoned": fifo_runs},
            1.0,
            round(median(single), 2),
            f"<= {RUNS:g}",
            max(single) <= RUNS,
        ),
    ]


def _one(tenant: str, number: int | str, tokens: int) -> dict[str, Any]:
    return request(f"{tenant}-{number}", tenant=tenant, max_output_tokens=tokens)


def _round(cell: LiveCell, turn: int, lengths: Any) -> float:
    """Let the tenant come and go; gives the time from which the aggressor was alone."""
    with cell.watching() as watch:
        cell.produce([_one("mine", f"{turn}-{n}", next(lengths)) for n in range(MINE)], cell.interactive)
        cell.produce([_one("single", turn, TOKENS)], cell.interactive)
        wanted = {f"mine-{turn}-{n}" for n in range(MINE)} | {f"single-{turn}"}
        ready.until(lambda: wanted <= watch.seen.keys(), LIMIT_S, "the tenant's results")
    alone_ms = time.time() * 1000 + RUN_MS
    time.sleep(ALONE_S + RUN_MS / 1000)
    return alone_ms


def _latency_ms(runs: list[Run], ident: str) -> float:
    return next(float(run.result["timing"]["latency_ms"]) for run in runs if run.ident == ident)
