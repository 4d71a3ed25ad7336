"""The benchmarks' own loops run: each moves all that it is given, whatever the dispatcher has come to be."""

import asyncio
import sys

import pytest
from trees import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

from hop_rows import latency, throughput
from prediction_row import measure

ROUNDS, RECORDS, PROBES, GAP_S = 1, 3_000, 5, 0.001


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_both_loops_of_the_hop_benchmarks_move_everything(kafka, delivery):
    ours, bare = asyncio.run(throughput(kafka.kafka, delivery, ROUNDS, RECORDS))
    assert min(ours + bare) > 0
    found = asyncio.run(latency(kafka.kafka, delivery, ROUNDS, PROBES, GAP_S))
    assert {name: min(times) > 0 for name, times in found.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize(("per_beat", "floor"), [(1, "floor"), (50, "known")])
def test_the_predictor_follows_the_drifting_engine_of_its_row(per_beat, floor):
    found = measure(7, per_beat)
    assert 0.88 <= found["ours within"] <= 0.92
    assert found["ours error"] <= 1.05 * found[f"{floor} error"]
    assert found["profile error"] > 2 * found["ours error"]
