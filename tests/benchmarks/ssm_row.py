"""Row 15: the SSM engine beside mamba_ssm's own `generate`, and short requests beside a prompt of 32,768 tokens."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from in_environment import report

from deploy.engines import install

Line = Callable[..., dict[str, Any]]
Spread = Callable[..., dict[str, float]]
FASTER, LATER, LIMIT_S = 2.0, 2.0, 3_600.0


def beside_generate(line: Line, spread: Spread, rounds: int) -> list[dict[str, Any]]:
    """Tokens/s of 16 requests, and times to the first token; see `ssm_side.py`."""
    python = install("ssm", "cpu", lambda _: None).python
    with tempfile.TemporaryDirectory() as home:
        log = Path(home) / "side.log"
        told = report(python, "tests/benchmarks/ssm_side.py", home, str(rounds), log=log, limit_s=LIMIT_S)
    for case in ("throughput", "first_token"):
        if error := told[case]["error"]:
            raise RuntimeError(error)
    rates, times = told["throughput"]["figures"], told["first_token"]["figures"]
    lines = []
    for name, goal in (("mixed", FASTER), ("equal", None)):
        ours, theirs = rates[f"{name} ours"], rates[f"{name} theirs"]
        ratio = round(median(one / other for one, other in zip(ours, theirs, strict=True)), 2)
        metric = f"SSM engine, tokens/s, 16 requests of {name} length"
        told_goal = ("-", None) if goal is None else (f">= {goal:g}x", ratio >= goal)
        lines.append(line(15, metric, spread(ours, 1), spread(theirs, 1), "-", ratio, *told_goal))
    beside, alone, whole = times["beside"], times["alone"], times["whole prompt"]
    ratio = round(median(one / other for one, other in zip(beside, alone, strict=True)), 2)
    metric = "short requests' TTFT beside a 32k prompt, ms"
    baseline = spread(alone, 1) | {"behind the whole prompt": round(median(whole))}
    lines.append(line(15, metric, spread(beside, 1), baseline, "without it", ratio, f"<= {LATER:g}x", ratio <= LATER))
    return lines
