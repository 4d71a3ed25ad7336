"""Cases that run with an engine's own interpreter: what runs there tells a line of JSON for each, and here they are read.

Nothing here imports pytest or anything else that is not Python's own.
"""

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from trees import ROOT

MARK = '{"case"'  # what libraries print there does not begin so
CASE_S = 240.0


class Report(dict[str, dict[str, Any]]):
    """What was told, by case; where nothing was told of one, how the process ended is its error.

    Attributes:
        code: Exit code of the process; None where it was killed.
        ended: How it ended, and the end of its log.
    """

    def __init__(self, lines: list[str], ended: str, code: int | None = None) -> None:
        super().__init__({one["case"]: one for one in map(json.loads, lines)})
        self.ended, self.code = ended, code

    def __missing__(self, case: str) -> dict[str, Any]:
        return {"case": case, "error": self.ended, "seconds": None}


def report(
    python: str | Path,
    script: str,
    *arguments: str | Path,
    log: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Run a script of this repository with another interpreter, and gather what it tells.

    Args:
        python: The interpreter.
        script: Its path below the root.
        arguments: Its arguments.
        log: Gets what it says otherwise; what it told stands beside it.
        limit_s: After so long it is killed; what it told until then counts.
        environment: Variables besides our own.
    """
    out = log.with_suffix(".out")
    with out.open("wb") as told, log.open("wb") as errors:
        try:
            code = subprocess.run(
                [python, ROOT / script, *arguments],
                env={**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)},
                stdout=told,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    lines = [line for line in out.read_text(errors="replace").splitlines() if line.startswith(MARK)]
    how = f"was killed after {limit_s:g} s" if code is None else f"ended with {code}"
    return Report(lines, f"{script} {how}, after {len(lines)} cases:\n{log.read_text(errors='replace')[-3000:]}", code)


async def tell_cases(
    cases: Mapping[str, Callable[[], Awaitable[object]]], tell: Callable[[str], None] | None = None, case_s: float = CASE_S
) -> None:
    """Run cases one after another and tell of each: `case`, `error`, `seconds`, and `figures` where it gives some."""
    clock = asyncio.get_running_loop().time
    for name, case in cases.items():
        started, error, figures = clock(), None, None
        try:
            figures = await asyncio.wait_for(case(), case_s)
        except Exception as failure:  # noqa: BLE001 - told to whoever asked for the case
            error = f"{type(failure).__name__}: {failure}"
        line = json.dumps({"case": name, "error": error, "seconds": round(clock() - started, 2), "figures": figures})
        (tell or _print)(line)


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - this is how it tells
