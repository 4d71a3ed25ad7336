"""The benchmarks' own loops run: each moves all that it is given, whatever the dispatcher has come to be."""

import asyncio
import sys

import pytest
from trees import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

from hop_rows import latency, throughput

ROUNDS, RECORDS, PROBES, GAP_S = 1, 3_000, 5, 0.001


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_both_loops_of_the_hop_benchmarks_move_everything(kafka, delivery):
    ours, bare = asyncio.run(throughput(kafka.kafka, delivery, ROUNDS, RECORDS))
    assert min(ours + bare) > 0
    found = asyncio.run(latency(kafka.kafka, delivery, ROUNDS, PROBES, GAP_S))
    assert {name: min(times) > 0 for name, times in found.items()} == dict.fromkeys(found, True)
