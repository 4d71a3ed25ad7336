"""The simulation finds bugs: each of these, planted, breaks a run within a few seeds that are clean without it."""

import json

import pytest
from simulation import chaos
from simulation.plants import PLANTS

SEEDS_MAX = 60


def first_broken():
    for seed in range(1, 1 + SEEDS_MAX):
        if chaos.run_seed(seed)[0].violations:
            return seed
    return None


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name):
    with PLANTS[name]():
        seed = first_broken()
    assert seed is not None, f"{name} was not found in {SEEDS_MAX} seeds"
    assert chaos.run_seed(seed)[0].violations == []


def test_a_failing_seed_is_named_with_what_broke_and_the_exit_code_tells_it(capsys):
    with PLANTS["the_position_is_committed_and_not_the_low_watermark"]():
        code = chaos.main(["--seeds", "2", "--from", "2", "--processes", "1"])
    *told, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert code == 1
    assert found["lost"] > 0
    assert found["accepted"] == found["terminal"] + found["lost"]
    assert {broken["seed"] for broken in found["violations"]} <= {2, 3}
    assert f"seed {found['violations'][0]['seed']}:" in told
