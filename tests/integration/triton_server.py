"""Triton itself, started as a worker starts it; run by `triton_checks.py`."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from triton_models import make
from tritonclient import grpc

from deploy.local.guard import descendants
from deploy.local.ports import free_ports

LIMIT_S = 90.0
LOOK_S = 0.1
# what starts the launcher, tells its process id, and is then killed
PARENT = "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); child.wait()"


class Served:
    """The launcher as a child, and a client of its server."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        (self.port,) = free_ports(1)
        argv = [sys.executable, "-m", "deploy.triton", "--model-path", str(folder), "--grpc-port", str(self.port), *options]
        self.argv = [*argv, "--threads", "1", "--device", "cpu"]
        self.log = log
        self.client = grpc.InferenceServerClient(f"127.0.0.1:{self.port}")

    def start(self, *before: str) -> subprocess.Popen[str]:
        with self.log.open("w") as log:
            return subprocess.Popen([*before, *self.argv], stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_ready(self, process: subprocess.Popen[str]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                if self.client.is_model_ready("forebay_moe"):
                    return
            except grpc.InferenceServerException:
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        raise AssertionError(self.log.read_text()[-2000:])

    def ask(self, body: dict[str, Any], token_ids: list[int]) -> tuple[list[int], dict[str, Any]]:
        ids = grpc.InferInput("input_ids", [len(token_ids)], "INT32")
        ids.set_data_from_numpy(np.array(token_ids, np.int32))
        request = grpc.InferInput("request", [1], "BYTES")
        request.set_data_from_numpy(np.array([json.dumps(body).encode()], np.object_))
        answers: SimpleQueue[Any] = SimpleQueue()
        with grpc.InferenceServerClient(f"127.0.0.1:{self.port}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=LIMIT_S)
            client.async_stream_infer("forebay_moe", [ids, request], enable_empty_final_response=True)
            tokens, last = [], {}
            while True:
                result, error = answers.get(timeout=LIMIT_S)
                assert error is None, error
                response = result.get_response()
                if response.outputs:
                    tokens += result.as_numpy("output_ids").tolist()
                    last = {name: result.as_numpy(name)[0].decode() for name in ("finish_reason", "error", "statistics")}
                if response.parameters["triton_final_response"].bool_param:
                    return tokens, last


def wait_gone(files: list[int]) -> None:
    """Wait for the end of processes, by what `watched` opened."""
    for file in files:
        assert select.select([file], [], [], LIMIT_S)[0], "a process outlives the others"
        os.close(file)


def watched(pid: int) -> list[int]:
    """Open what tells of the end of a process, and of all that came from it."""
    family = {pid} | descendants(pid)
    assert len(family) >= 3, "the launcher, the server, and the model's process"
    return [os.pidfd_open(one) for one in family]


async def case_the_launcher_serves_and_ends_when_told(home: Path) -> dict[str, Any]:
    wanted = make("mixtral", home / "mixtral")
    served = Served(home / "mixtral", home / "served.log", "--slots", "4", "--expert-budget-bytes", "1000000")
    begun_s = time.monotonic()
    process = served.start()
    try:
        served.wait_ready(process)
        ready_s = time.monotonic() - begun_s
        generate = {"op": "generate", "max_output_tokens": 40, "sampling": {"temperature": 0}}
        for number, (prompt, said) in enumerate(wanted):
            tokens, last = served.ask({**generate, "run": f"r{number}"}, prompt)
            assert tokens == said[: said.index(2) + 1] if 2 in said else said
            assert (last["finish_reason"], last["error"]) == ("stop" if 2 in said else "length", "")
            served.ask({"op": "budget", "bytes": (0, None, 500_000)[number % 3]}, [0])
        _, last = served.ask({"op": "status"}, [0])
        told = json.loads(last["statistics"])
        assert told["running"] == told["waiting"] == 0
        assert told["experts"]["misses"] > 0
        family = watched(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        wait_gone(family)
    finally:
        process.kill()
    return {"ready after s": round(ready_s, 1)}


async def case_nothing_outlives_whoever_started_it(home: Path) -> dict[str, Any]:
    make("mixtral", home / "mixtral")
    for victim in ("parent", "launcher"):
        served = Served(home / "mixtral", home / f"{victim}.log")
        parent = served.start(sys.executable, "-c", PARENT)
        try:
            assert parent.stdout is not None
            launcher = int(parent.stdout.readline())
            served.wait_ready(parent)
            family = watched(launcher)
            if victim == "parent":
                parent.kill()
            else:
                os.kill(launcher, signal.SIGKILL)
            wait_gone(family)
        finally:
            parent.kill()
            parent.wait()
    return {}


async def case_a_model_that_cannot_be_served_is_told_in_a_line(home: Path) -> dict[str, Any]:
    (home / "wrong").mkdir()
    (home / "wrong" / "config.json").write_text('{"model_type": "llama"}')
    served = Served(home / "wrong", home / "wrong.log")
    process = served.start()
    assert process.wait(LIMIT_S) not in {0, None}
    assert "expected one of mixtral, qwen2_moe" in served.log.read_text()[-600:]
    nowhere = Served(home / "nowhere", home / "nowhere.log")
    process = nowhere.start()
    assert process.wait(LIMIT_S) == 2
    assert "--model-path: expected a folder with a model" in nowhere.log.read_text().splitlines()[-1]
    return {}
