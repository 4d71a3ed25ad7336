"""The import contracts: they hold, and each one refuses what it is there to refuse."""

import subprocess
import sys
from pathlib import Path

import pytest
from trees import copy_tree

LINT = Path(sys.executable).parent / "lint-imports"


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree, in which one bad import at a time is planted."""
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    return folder


def lint(tree):
    ran = subprocess.run([LINT, "--no-cache"], cwd=tree, capture_output=True, text=True, check=False, timeout=60)
    return ran.returncode, ran.stdout


def test_the_contracts_hold(tree):
    code, said = lint(tree)
    assert code == 0, said
    assert " 0 broken" in said


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("schemas/ids.py", "import broker.transport.protocol", "schemas imports nothing of ours"),
        ("memory_coordinator/board.py", "import dispatcher.core.fleet", "broker and memory_coordinator import schemas only"),
        ("broker/transport/turns.py", "import memory_coordinator.board", "broker and memory_coordinator do not know each other"),
        ("dispatcher/service.py", "import broker.client", "dispatcher imports schemas, memory_coordinator and the seam to Kafka"),
        ("dispatcher/service.py", "import engine_consumers.worker", "dispatcher imports schemas, memory_coordinator"),
        ("engine_consumers/worker.py", "import dispatcher.core.fleet", "engine_consumers imports schemas, memory_coordinator"),
        ("engine_consumers/worker.py", "import deploy.processes", "engine_consumers imports schemas, memory_coordinator"),
        ("dispatcher/active.py", "import broker.transport.kafka.consumer", "what works over the seam imports neither adapter"),
        ("dispatcher/core/routing/router.py", "import time", "pure modules have no clock, no dice and no I/O"),
        ("engine_consumers/core/outcome.py", "import asyncio", "pure modules have no clock, no dice and no I/O"),
        ("broker/transport/ledger.py", "from random import random", "pure modules have no clock, no dice and no I/O"),
        ("broker/transport/hop.py", "import aiokafka", "Kafka's client is known to its adapter only"),
        (
            "engine_consumers/worker.py",
            "def late() -> None:\n    import torch",
            "an engine's libraries are imported by that engine only",
        ),
        ("engine_consumers/sim.py", "import vllm.inputs", "an engine's libraries are imported by that engine only"),
    ],
)
def test_a_planted_import_is_refused(tree, file, line, broken):
    path = tree / file
    before = path.read_text(encoding="utf-8")
    path.write_text(f"{before}\n{line}\n", encoding="utf-8")
    try:
        code, said = lint(tree)
    finally:
        path.write_text(before, encoding="utf-8")
    assert code == 1
    verdicts = [verdict for verdict in said.splitlines() if verdict.startswith(broken) and "BROKEN" in verdict]
    assert verdicts, said
    assert file.removesuffix(".py").replace("/", ".") in said.partition("Broken contracts")[2]
