"""One suite for every engine: `engine_cases.py`, on `sim` under virtual time and on each other in its own environment."""

from pathlib import Path

import pytest
from conformance.engine_cases import CASES, run_cases
from conformance.engine_harnesses import KINDS, Harness
from in_environment import Report, report
from virtual_loop import run_virtual

from deploy.engines import engine_config, install

SUITE_S = 1500


def sim_report() -> Report:
    lines: list[str] = []
    run_virtual(run_cases(Harness("sim"), list(CASES), lines.append))
    return Report(lines, "it was not run")


def real_report(kind: str, log: Path) -> Report:
    """Run the cases on a real model on the CPU, installing what is not there."""
    found = install(kind, "cpu", report=lambda _: None)
    config = engine_config(kind, "cpu")
    assert config is not None, "an engine that was just installed"
    script = "tests/conformance/run_engine_cases.py"
    return report(found.python, script, kind, found.model_path, log=log, limit_s=SUITE_S, environment=config.env)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run an engine's whole suite when its first case is asked for: loading a model takes longer than the cases."""
    found: dict[str, Report] = {}

    def of(engine: str) -> Report:
        if engine not in found:
            log = tmp_path_factory.mktemp("engines") / f"{engine}.log"
            found[engine] = sim_report() if engine == "sim" else real_report(engine, log)
        return found[engine]

    return of


@pytest.mark.timeout(SUITE_S + 1200)
@pytest.mark.parametrize("engine", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_engine(engine, case, reports, record_property):
    result = reports(engine)[case]
    record_property("engine_case", [engine, case, result["seconds"]])  # for the table at the end
    assert result["error"] is None, f"{engine}: {result['error']}"
