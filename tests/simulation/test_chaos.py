"""Chaos from seeds: nothing lost, nothing twice, in a thousand runs; and a run repeats to the byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("chaos.py")
SEEDS = 1_000


def chaos(*arguments, **environment):
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.timeout(900)  # under a minute on two free cores; a busy machine is no failure
def test_a_thousand_seeds_lose_nothing_and_repeat_nothing():
    ran = chaos("--seeds", str(SEEDS), "--from", "1", "--processes", "2")
    assert ran.returncode == 0, f"{ran.stdout[-5_000:]}\n{ran.stderr[-5_000:]}"
    assert ran.stderr == ""
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == {"from", "seeds", "accepted", "terminal", "lost", "duplicated", "violations"}
    assert (found["from"], found["seeds"]) == (1, SEEDS)
    assert found["accepted"] == found["terminal"] > 20 * SEEDS
    assert (found["lost"], found["duplicated"], found["violations"]) == (0, 0, 0)


@pytest.mark.parametrize("seed", ["3", "17", "42"])
def test_a_seed_repeats_to_the_byte_whatever_the_order_of_hashes(seed):
    ran = [chaos("--seeds", "1", "--from", seed, "--verbose", PYTHONHASHSEED=hashes) for hashes in ("1", "2")]
    assert ran[0].returncode == 0, ran[0].stderr
    assert ran[0].stdout == ran[1].stdout
    assert len(ran[0].stdout.splitlines()) > 500
    assert f"seed {seed} digest " in ran[0].stdout
