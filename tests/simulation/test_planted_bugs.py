"""The simulation finds bugs: each of these, planted, breaks a run within a few seeds, and without it the run is clean."""

import pytest
from simulation.chaos import run_seed
from simulation.plants import PLANTS

SEEDS_MAX = 40


def first_broken(first=1):
    for seed in range(first, first + SEEDS_MAX):
        findings, _ = run_seed(seed)
        if findings.violations:
            return seed, findings
    return None, None


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name):
    with PLANTS[name]():
        seed, findings = first_broken()
    assert seed is not None, f"not found in {SEEDS_MAX} seeds"
    assert not run_seed(seed)[0].violations
    print(name, seed, findings.violations[:3])
