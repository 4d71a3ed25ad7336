"""Lanes on Apache Kafka: one tenant's backlog in a partition, another's request behind it, and dispatchers that are killed."""

import itertools
import re
import signal
import time

import pytest
from cells import Cell
from raw import request, tally

from deploy.local import ready

TIMING = {"session_timeout_ms": 1_500, "heartbeat_ms": 300, "rebalance_timeout_ms": 1_000, "transaction_timeout_ms": 2_000}
UP_S, ANSWER_S = 60.0, 150.0
MANY = 5_000
_numbers = itertools.count()


@pytest.fixture
def cell(kafka, tmp_path):
    name = f"lanes-{next(_numbers)}-{time.time_ns() // 1_000_000}"
    tables = {
        "kafka": {"bootstrap": kafka.kafka, "topic_prefix": name, **TIMING},
        "redis": {"url": kafka.redis},
        "topics": {
            "request_partitions": 1,
            "engine_partitions": 2,
            "retry_partitions": 1,
            "lane_partitions": 4,
            "result_partitions": 1,
        },
        "dispatcher": {"trim_interval_ms": 3_600_000},
        "engines": {"sim": {"kind": "sim", "slots": 16, "options": {"ttft_ms": 100, "tpot_ms": 0}}},
    }
    with Cell(tmp_path / name, tables) as made:
        yield made


def answers(cell):
    return [one["request_id"] for one in cell.results()]


def lanes_known(cell, name):
    """How many lanes a dispatcher found to be somebody's, as it says."""
    found = re.search(r"lanes_known lanes=4 taken=(\d)", cell.log_of(name))
    return None if found is None else int(found[1])


def test_a_backlog_of_one_tenant_stands_in_front_of_nobody_and_outlives_its_dispatchers(cell):
    aggressor, victims = [f"a{n:04d}" for n in range(MANY)], [f"v{n}" for n in range(3)]
    cell.produce([request(ident, tenant="a", max_output_tokens=1) for ident in aggressor])
    cell.produce([request(victims[0], tenant="v", max_output_tokens=1)])
    cell.worker("w")
    cell.dispatcher("d0")
    ready.until(lambda: victims[0] in answers(cell), UP_S, "the first victim's answer")
    assert len(answers(cell)) < MANY // 2, "the others did not wait"
    assert lanes_known(cell, "d0") == 0
    for n in (1, 2):
        cell.signal(f"d{n - 1}", signal.SIGKILL)
        cell.produce([request(victims[n], tenant="v", max_output_tokens=1)])
        before = len(answers(cell))
        cell.dispatcher(f"d{n}")
        ready.until(lambda n=n: victims[n] in answers(cell), UP_S, f"the answer of victim {n}")
        assert lanes_known(cell, f"d{n}") == 1, "whose the lane is was read back"
        assert len(answers(cell)) < max(MANY * 3 // 4, before + 600)
    cell.answered(MANY + len(victims), ANSWER_S)
    cell.stop()
    results = cell.results()
    assert tally(results) == dict.fromkeys([*aggressor, *victims], 1)
    assert {one["status"] for one in results} == {"completed"}
    diverted = cell.read(cell.topics.lanes)
    assert {record.partition for record in diverted} == {0}
    assert len(diverted) > MANY // 2
    assert len({record.key for record in diverted}) == len(diverted), "none was diverted twice"
