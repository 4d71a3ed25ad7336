"""Row 13: how often an expert is there when it is needed, with 58 % of them resident, and how long one waits otherwise.

The routes are real ones: the tiny Mixtral and Qwen2-MoE of the moe engine answer the demo's passages, one at a time and eight
at once, with that share of their experts resident (`experts_side.py`), and what was needed and foreseen is written down.
Each order then has the same routes: ours without and with fetching ahead, the least recently and the least frequently
used, and Belady's, which knows the future but fetches nothing ahead: the bound of all that wait for a need. An expert is
hit that is resident when its layer is computed; one fetched ahead counts as resident, so these figures say what is known in
time, and those of the stall, measured in the same runs with copies that were really made, whether it came in time.

Two synthetic routes by Zipf's law: 256 experts in one line, and 32 layers of 8 of which each token takes two. No route of
them can be foreseen: nobody knows more than how often each is needed, and the best of those who know no more is LFU.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from in_environment import report
from resident_orders import Belady, LeastFrequentlyUsed, LeastRecentlyUsed

from deploy.engines import install
from deploy.engines.recipes.moe import RECIPE
from deploy.local.cache import cache_home
from engine_consumers.core.experts import FETCHED_AHEAD, Residents

Line = Callable[..., dict[str, Any]]
Spread = Callable[..., dict[str, float]]
Event = Sequence[Any]  # of a visit: layer, needed, time, and what the tokens chose; of foresight: layer, and experts by rank
SHARE, GOAL, LIMIT_S = 0.58, 0.95, 3_600.0
ZIPF_STEPS = {(256,): 40_000, (8,) * 32: 600}


def hit_rates(events: Sequence[Event], layers: Sequence[int], chosen: int, places: int) -> dict[str, float]:
    """Give for each order the share of needed experts that were resident, in percent."""
    visits = [(event[0], event[1]) for event in events if len(event) > 2]
    given = layers, chosen, places
    orders = {
        "ours": (Residents(*given), 0),
        "ours, ahead": (Residents(*given), FETCHED_AHEAD),
        "LRU": (LeastRecentlyUsed(*given), 0),
        "LFU": (LeastFrequentlyUsed(*given), 0),
        "Belady": (Belady(*given, visits), 0),
    }
    return {name: 100 * _hit_rate(events, layers, *order) for name, order in orders.items()}


def _hit_rate(events: Sequence[Event], layers: Sequence[int], residents: Residents, ahead: int) -> float:
    for key in [(n, expert) for n, experts in enumerate(layers) for expert in range(experts)][: residents.places]:
        residents.admit(key)
    hits = asked = 0
    for event in events:
        if len(event) > 2:
            layer, needed, now_s, chosen = event
            absent = residents.visit(layer, needed, now_s, chosen)
            asked, hits = asked + len(needed), hits + len(needed) - len(absent)
            for key in absent:
                residents.admit(key)
        elif ahead:
            residents.foresee(*event)
            for key in residents.fetch_ahead(event[0], ahead):
                if not residents.is_worth(key):
                    break
                residents.admit(key)
    return hits / asked


def zipf(layers: Sequence[int], steps: int, seed: int) -> list[Event]:
    """Routes by Zipf's law with exponent 1, in each layer over its experts in an order of its own."""
    dice, events = random.Random(seed), []
    names = [dice.sample(range(experts), experts) for experts in layers]
    each = 1 if len(layers) == 1 else 2
    for step in range(steps):
        for layer, experts in enumerate(layers):
            weights, needed = [1 / (n + 1) for n in range(experts)], set()
            while len(needed) < each:
                needed.add(names[layer][dice.choices(range(experts), weights)[0]])
            events.append((layer, sorted(needed), step * 0.02, ()))
    return events


def residency(line: Line, spread: Spread, rounds: int) -> list[dict[str, Any]]:
    """Run the models, and play their routes to each order."""
    python = install("moe", "cpu", lambda _: None).python
    folders = {model.name: cache_home() / model.folder for model in RECIPE.models}
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "side.log"
        told = report(python, "tests/benchmarks/experts_side.py", str(rounds), *folders.values(), log=log, limit_s=LIMIT_S)
    lines = []
    for model, folder in folders.items():
        if error := told[folder.name]["error"]:
            raise RuntimeError(error)
        lines += _of_model(line, spread, model, told[folder.name]["figures"])
    for layers, steps in ZIPF_STEPS.items():
        places, what = int(SHARE * sum(layers)), f"Zipf-1, {len(layers)} x {layers[0]} experts"
        rates = [hit_rates(zipf(layers, steps, seed), layers, min(2, len(layers)), places) for seed in range(rounds)]
        lines.append(_rate_line(line, spread, f"{what}, nothing foreseen", rates, "ours"))
    return lines


def _of_model(line: Line, spread: Spread, model: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = []
    for slots in sorted({one["slots"] for one in runs}):
        ours, theirs = ([one for one in runs if one["slots"] == slots and ("events" in one) is mine] for mine in (True, False))
        rates = [hit_rates(one["events"], one["layers"], one["chosen"], one["places"]) for one in ours]
        what = f"{model}, {slots} at once"
        lines.append(_rate_line(line, spread, f"{what}, fetched ahead", rates, "ours, ahead"))
        lines.append(_rate_line(line, spread, f"{what}, nothing fetched ahead", rates, "ours"))
        stalls = [[1000 * one["stall_ms"] / (one["hits"] + one["misses"]) for one in side] for side in (ours, theirs)]
        ratio = round(median(one / other for one, other in zip(*stalls, strict=True)), 3)
        metric = f"mean stall for an expert, us, {what}"
        lines.append(line(13, metric, spread(stalls[0], 1), {"LRU": round(median(stalls[1]), 1)}, "-", ratio, "-", None))
    return lines


def _rate_line(line: Line, spread: Spread, what: str, rates: list[dict[str, float]], name: str) -> dict[str, Any]:
    ratio = round(median(one[name] / one["Belady"] for one in rates), 3)
    baseline = {other: round(median(one[other] for one in rates), 1) for other in ("LRU", "LFU")}
    belady = {"Belady": round(median(one["Belady"] for one in rates), 1)}
    ours = spread([one[name] for one in rates], 1)
    metric = f"experts there when needed, %, {what}"
    return line(13, metric, ours, baseline, belady, ratio, f">= {GOAL} of Belady", ratio >= GOAL)
