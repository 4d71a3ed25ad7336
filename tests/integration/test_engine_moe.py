"""The engine behind Triton: its cases in its own environment, and a server that is killed in mid-stream on a live cell."""

import os
import signal
from pathlib import Path

import pytest
from behind_triton.client import children, command_of
from cells import Cell
from in_environment import Report, report
from trees import ROOT

from deploy.engines import install
from deploy.engines.recipes.recipe import OFFLINE
from deploy.local import ready
from deploy.local.ports import free_ports
from deploy.local.program import Program, Running
from engine_consumers.errors import ENGINE_DEAD

CASES_S = 900
UP_S = 120.0
CASES = (
    "vllm",
    "vllm_chat",
    "tensorrt_llm",
    "tensorrt_llm_bls",
    "stop_strings_end_the_run_there",
    "abort_reaches_the_model",
    "what_it_cannot_do_is_refused",
    "the_models_error_is_told",
    "wrong_models_are_told_at_the_start",
    "no_server",
    "a_child_that_does_not_come_up",
    "limits",
    "loading_and_unloading",
    "a_server_that_goes_and_returns",
    "a_server_that_stands_still_is_away",
    "another_model_in_its_place_is_death",
    "our_model_tells_of_its_experts_and_its_context",
)


@pytest.fixture(scope="module")
def installed():
    return install("moe", "cpu", report=lambda _: None)


@pytest.fixture(scope="module")
def told(installed, tmp_path_factory) -> Report:
    where = {"log": tmp_path_factory.mktemp("moe") / "cases.log", "limit_s": CASES_S, "environment": OFFLINE}
    return report(installed.python, "tests/integration/moe_cases.py", installed.model_path, **where)


@pytest.mark.timeout(CASES_S + 1200)
@pytest.mark.parametrize("case", CASES)
def test_case(case, told):
    assert told[case]["error"] is None, told[case]["error"]


def tables(services, prefix, found, **engines):
    """A cell with engines of one model, each over a Triton as its options say."""
    engine = {"kind": "moe", "model": "m", "model_path": found.model_path, "slots": 2, "interactive_slots": 0}
    return {
        "kafka": {"bootstrap": services.kafka, "topic_prefix": prefix},
        "redis": {"url": services.redis},
        "topics": {"request_partitions": 1, "engine_partitions": 2, "retry_partitions": 1, "result_partitions": 1},
        "dispatcher": {"failover_timeout_ms": 60_000, "admission": {"deadline": "serve"}},
        "engines": {name: {**engine, "options": {"max_context": 512, **more}} for name, more in engines.items()},
    }


def triton_of(found):
    """The command of a Triton with the model."""
    command = [found.python, "-m", "deploy.triton", "--model-path", found.model_path, "--threads", "1"]
    return [*command, "--slots", "2", "--max-context", "512"]


def kill_triton(pid):
    """Kill the server itself, below whoever has started it."""
    os.kill(next(one for one in children(pid) if command_of(one).endswith("tritonserver")), signal.SIGKILL)


LONG = [
    {"id": f"r{n}", "prompt": f"Tell a very long story, number {n}:", "max_output_tokens": 400, "stream": True} for n in range(8)
]


def until_streaming(cell):
    """Wait until the worker `moe` has requests in its slots, and text comes."""
    ready.until(lambda: cell.running("moe") and cell.read(cell.topics.streams), UP_S, "a stream")


def serve(cell, found):
    """Start a dispatcher and a worker for each engine, and wait for them."""
    cell.dispatcher("dispatcher")
    for name in cell.config.engines:
        cell.worker(name, name, entry=(found.python, "-m", "deploy.cli"))
    ready.until(lambda: all(is_serving(cell, name) for name in cell.config.engines), UP_S, "the workers")


def is_serving(cell, worker):
    status = cell.status(worker)
    return status is not None and status.is_healthy and len(status.partitions) == cell.config.topics.engine_partitions


def attempts(result):
    return [(one["engine"], one["outcome"], one.get("error", {}).get("code")) for one in result["route"]]


@pytest.mark.timeout(1200)
def test_a_server_killed_in_mid_stream_returns_and_answers_what_it_had(installed, kafka, tmp_path):
    """Of somebody else: the worker stays, says that it is unwell, and runs again what it had handed back."""
    port = str(free_ports(1)[0])
    program = Program("triton", [*triton_of(installed), "--grpc-port", port], str(tmp_path / "triton.log"), cwd=str(ROOT))
    raw = tables(kafka, "moe-returns", installed, moe={"url": f"127.0.0.1:{port}"})
    triton = Running(program)
    try:
        with Cell(tmp_path, raw) as cell:
            serve(cell, installed)
            pid = cell.processes["moe"].pid
            cell.produce(LONG)
            until_streaming(cell)
            kill_triton(triton.pid)
            ready.until(lambda: not is_serving(cell, "moe"), UP_S, "the word that it is unwell")
            triton.stop()
            triton = Running(program)
            results = cell.answered(len(LONG), UP_S)
            assert cell.processes["moe"].pid == pid
            assert cell.processes["moe"].exit_code is None
    finally:
        triton.stop()
    assert {one["status"] for one in results} == {"completed"}
    handed_back = [one for one in results if len(one["route"]) > 1]
    assert handed_back, "it was killed and had nothing in hand"
    for one in handed_back:
        assert attempts(one)[0] == ("moe", "retried", "unhealthy")
        assert attempts(one)[-1] == ("moe", "completed", None)
        assert "Triton server" in one["route"][0]["error"]["message"]
        assert (one["engine"], one["run_id"] > "000000.") == ("moe", True)


@pytest.mark.timeout(1200)
def test_what_a_killed_server_of_our_own_had_is_answered_by_another_engine(installed, kafka, tmp_path):
    """The worker's child: its end is the worker's, and the route tells who began and who answered."""
    server = {"server": triton_of(installed)}
    with Cell(tmp_path, tables(kafka, "moe-rescued", installed, moe=server, other=server)) as cell:
        serve(cell, installed)
        worker = cell.processes["moe"]
        cell.produce(LONG)
        until_streaming(cell)
        family = children(worker.pid)
        kill_triton(worker.pid)
        ready.until(lambda: worker.exit_code is not None, UP_S, "the end of the worker")
        assert worker.exit_code == ENGINE_DEAD
        results = cell.answered(len(LONG), UP_S)
        ready.until(lambda: not any(Path(f"/proc/{one}").exists() for one in family), UP_S, "the end of its children")
    assert {one["status"] for one in results} == {"completed"}
    rescued = [one for one in results if attempts(one)[0] == ("moe", "retried", "unhealthy")]
    assert rescued, "it was killed and had nothing in hand"
    for one in rescued:
        assert attempts(one)[-1] == ("other", "completed", None)
        assert (one["engine"], one["usage"]["output_tokens"]) == ("other", len(one["output_tokens"]))
