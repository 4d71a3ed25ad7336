"""Row 14: what is lost and repeated under kills, simulated and real, beside a bare at-least-once loop under the same ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SEEDS = 1_000  # of the simulation: some kills in each
REAL_SEED, FAULTS, REQUESTS = 1, 30, 5_000
LIMIT_S = 1_800


def simulated() -> dict[str, Any]:
    """The simulation's own summary, over a thousand kills and more."""
    return _last_line("simulation/chaos.py", "--seeds", str(SEEDS))


def real(*, bare: bool) -> dict[str, Any]:
    """The summary of a real chaos run: of ours, or of bare loops under the same plan of faults."""
    subject = ["--bare"] if bare else []
    numbers = ["--seed", str(REAL_SEED), "--faults", str(FAULTS), "--requests", str(REQUESTS)]
    return _last_line("chaos/run.py", *numbers, *subject)


def _last_line(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program of ours; a count that is not nought is a figure, not a fault.

    Raises:
        RuntimeError: It ended without a summary.
    """
    argv = [sys.executable, str(TESTS / program), *arguments]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False, cwd=TESTS.parent)
    lines = done.stdout.strip().splitlines()
    try:
        summary: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        message = f"{program} ended with status {done.returncode} and without a summary"
        raise RuntimeError(message) from None
    return summary
