"""A whole stack with the sim engine, by the command line, shared by the tests that only produce and read."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

UP_S = 240
SIM = """
[engines.sim]
kind = "sim"
slots = 64
workers = 2
options = { ttft_ms = 20, tpot_ms = 5, max_context = 4096 }
"""


@dataclass
class Stack:
    """A running stack, seen as a user sees it."""

    home: Path

    def forebay(self, *arguments: str, timeout_s: float = 120, check: bool = True, **more) -> subprocess.CompletedProcess:
        environment = {**os.environ, "FOREBAY_HOME": str(self.home), "FOREBAY_CONFIG": "", **more.pop("env", {})}
        environment = {name: value for name, value in environment.items() if value}
        argv = [sys.executable, "-m", "deploy.cli", *arguments]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=timeout_s, env=environment, **more)
        if check and done.returncode:
            pytest.fail(f"forebay {' '.join(arguments)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done

    def status(self) -> dict:
        return json.loads(self.forebay("local", "status", "--json").stdout)

    @property
    def kafka(self) -> str:
        return self.status()["kafka"]


@pytest.fixture(scope="session")
def sim_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Apache Kafka, Valkey, a dispatcher and two sim workers."""
    home = tmp_path_factory.mktemp("stack")
    (home / "forebay.toml").write_text(SIM)
    stack = Stack(home)
    try:
        stack.forebay("local", "up", "--engine", "sim", "--broker", "kafka", "--home", str(home), timeout_s=UP_S)
        yield stack
    finally:
        stack.forebay("local", "down", "--home", str(home), timeout_s=UP_S, check=False)
