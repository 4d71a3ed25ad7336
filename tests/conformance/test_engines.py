"""One suite for every engine: `engine_cases.py`, on `sim` under virtual time and on each other in its own environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conformance.engine_cases import CASES, run_cases
from conformance.engine_harnesses import Harness
from virtual_loop import run_virtual

from deploy.engines.environments import OFFLINE, cpu_environment, install

ROOT = Path(__file__).parents[2]
SUITE_S = 1500
INSTALLED = ("sim", "transformer")  # the environment of `ssm` is made by hand as yet: run_engine_cases.py runs its cases there

Report = dict[str, dict]  # by case, what `run_cases` tells of it


def sim_report() -> Report:
    lines: list[str] = []
    run_virtual(run_cases(Harness("sim"), list(CASES), lines.append))
    return {line["case"]: line for line in map(json.loads, lines)}


def real_report(kind: str, log: Path) -> Report:
    """Run the cases on a real model on the CPU, installing what is not there."""
    found = install(kind, "cpu", report=lambda _: None)
    environment = cpu_environment(Path(found.python)) if kind == "transformer" else OFFLINE
    with log.open("wb") as errors:
        done = subprocess.run(
            [found.python, ROOT / "tests/conformance/run_engine_cases.py", kind, found.model_path],
            env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=SUITE_S,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(b'{"case"')]  # vLLM's own log goes there too
    told = {line["case"]: line for line in map(json.loads, lines)}
    ended = f"the cases' process ended with {done.returncode} after {sorted(told)}:\n{log.read_text(errors='replace')[-3000:]}"
    return {case: {"case": case, "error": ended, "seconds": None} for case in CASES} | told


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run an engine's whole suite when its first case is asked for: loading a model takes longer than the cases."""
    found: dict[str, Report] = {}

    def report(engine: str) -> Report:
        if engine not in found:
            log = tmp_path_factory.mktemp("engines") / f"{engine}.log"
            found[engine] = sim_report() if engine == "sim" else real_report(engine, log)
        return found[engine]

    return report


@pytest.mark.timeout(SUITE_S + 1200)
@pytest.mark.parametrize("engine", INSTALLED)
@pytest.mark.parametrize("case", CASES)
def test_engine(engine, case, reports, record_property):
    result = reports(engine)[case]
    record_property("engine_case", [engine, case, result["seconds"]])  # for the table at the end
    assert result["error"] is None, f"{engine}: {result['error']}"
