"""One suite for every engine: the cases of `engine_cases.py`, on `sim` under virtual time and on vLLM in its own environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conformance.engine_cases import CASES, SLOTS, Harness, run_cases
from virtual_loop import run_virtual

from deploy.engines.environments import cpu_environment, install
from engine_consumers.core import babble
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest, Sampling

ROOT = Path(__file__).parents[2]
SIM = {"ttft_ms": 20, "tpot_ms": 5, "max_context": 512, "answer_tokens": 350}
SUITE_S = 1500


def make_sim():
    return load(EngineConfig(kind="sim", slots=SLOTS, options=SIM))


def sim_report() -> dict[str, dict]:
    harness = Harness(
        engine=make_sim(),
        make=make_sim,
        decode=lambda tokens: babble.spell(tokens).decode("utf-8", "replace"),
        kill=lambda engine: engine.kill(),
        backend_open=lambda engine: len(engine._runs),
        multibyte=InferenceRequest(prompt="Water", max_output_tokens=200, sampling=Sampling(temperature=0.0)),
    )
    lines: list[str] = []
    run_virtual(run_cases(harness, list(CASES), lines.append))
    return {line["case"]: line for line in map(json.loads, lines)}


def transformer_report(log: Path) -> dict[str, dict]:
    """Run the cases on SmolLM2 by vLLM on the CPU, installing what is not there."""
    found = install("transformer", "cpu", report=lambda _: None)
    with log.open("wb") as errors:
        done = subprocess.run(
            [found.python, ROOT / "tests/conformance/run_engine_cases.py", found.model_path],
            env={**os.environ, **cpu_environment(Path(found.python)), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=SUITE_S,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(b'{"case"')]  # vLLM's own log goes there too
    told = {line["case"]: line for line in map(json.loads, lines)}
    if len(told) < len(CASES):
        tail = log.read_text(errors="replace")[-3000:]
        pytest.fail(f"the cases' process ended with {done.returncode} after {sorted(told)}:\n{tail}")
    return told


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Run an engine's whole suite when its first case is asked for: loading a model takes longer than the cases."""
    found: dict[str, dict[str, dict]] = {}

    def report(engine: str) -> dict[str, dict]:
        if engine not in found:
            log = tmp_path_factory.mktemp("engines") / f"{engine}.log"
            found[engine] = sim_report() if engine == "sim" else transformer_report(log)
        return found[engine]

    return report


@pytest.mark.timeout(SUITE_S + 1200)
@pytest.mark.parametrize("engine", ["sim", "transformer"])
@pytest.mark.parametrize("case", CASES)
def test_engine(engine, case, reports):
    result = reports(engine)[case]
    assert result["error"] is None, f"{engine}: {result['error']}"
