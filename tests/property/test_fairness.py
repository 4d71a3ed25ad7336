"""The theorems of the fair queue and of the buckets hold at random, and bugs planted in either are found by them."""

from random import Random

import pytest
from fairness import DRIVES, Broken
from hypothesis import given, settings
from hypothesis import strategies as st
from property.fairness_plants import PLANTS

STEPS, SEEDS_MAX, PLANTED_STEPS = 150, 60, 300


@pytest.mark.parametrize("name", DRIVES)
@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_what_is_promised_holds(name, seed):
    assert DRIVES[name](Random(seed), STEPS) <= 1 + 1e-5


def first_broken():
    for seed in range(SEEDS_MAX):
        for drive in DRIVES.values():
            try:
                drive(Random(seed), PLANTED_STEPS)
            except Broken:
                return seed
    return None


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name):
    with PLANTS[name]():
        assert first_broken() is not None, f"{name} was not found in {SEEDS_MAX} seeds"


def test_each_drive_finds_something():
    """None of them is there for nothing."""
    idle = set(DRIVES)
    for make in PLANTS.values():
        with make():
            for name in sorted(idle):
                try:
                    for seed in range(12):
                        DRIVES[name](Random(seed), PLANTED_STEPS)
                except Broken:
                    idle.discard(name)
        if not idle:
            break
    assert idle == set()
