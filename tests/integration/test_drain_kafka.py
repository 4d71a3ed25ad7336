"""Rolling restarts on Apache Kafka: processes that are told to stop, one after another, under load."""

import contextlib
import signal
import time

import pytest
from cells import GRACE_S, Cell
from raw import request, tally

from deploy.local import ready

UP_S, ANSWER_S = 60.0, 120.0
EACH, SOME = 250, 20
TIMING = {"session_timeout_ms": 6_000, "heartbeat_ms": 500, "rebalance_timeout_ms": 2_000}
DISPATCHERS, WORKERS = ("d0", "d1"), ("w0", "w1", "w2")
FIRST_RUN = "000000.000000"


@pytest.fixture
def make_cell(kafka, tmp_path):
    """Make a cell of its own on the shared broker."""

    def make(options, slots, drain_ms):
        name = f"drain-{time.time_ns() // 1_000_000}"
        tables = {
            "kafka": {"bootstrap": kafka.kafka, "topic_prefix": name, **TIMING},
            "redis": {"url": kafka.redis},
            "topics": {"request_partitions": 2, "engine_partitions": 6, "retry_partitions": 1, "result_partitions": 2},
            "worker": {"drain_ms": drain_ms},
            "engines": {"sim": {"kind": "sim", "slots": slots, "options": options}},
        }
        return stack.enter_context(Cell(tmp_path / name, tables))

    with contextlib.ExitStack() as stack:
        yield make


def serve(cell, name):
    """Start a process under its name."""
    (cell.worker if name in WORKERS else cell.dispatcher)(name)


def owners(cell):
    """The workers that own partitions and have told the dispatcher so."""
    members = cell.members()
    return {name for name in WORKERS if members.get(name) and (one := cell.status(name)) is not None and one.partitions}


def told_to_stop(cell, name):
    """Let a process leave; gives what it ended with."""
    cell.signal(name, signal.SIGTERM)
    return cell.processes[name].wait(GRACE_S)


def dead_or_failed(cell, results):
    return [one for one in results if one["status"] != "completed" or one.get("error")] + list(cell.dead_letters())


def test_a_rolling_restart_of_every_process_under_load_loses_and_repeats_nothing_and_does_not_stop_it(make_cell):
    cell = make_cell({"ttft_ms": 50, "tpot_ms": 15}, slots=4, drain_ms=15_000)
    for name in (*DISPATCHERS, *WORKERS):
        serve(cell, name)
    ready.until(lambda: owners(cell) == set(WORKERS), UP_S, "all workers to have their share")
    idents, reached = [], 0
    for turn, name in enumerate((*DISPATCHERS, *WORKERS, DISPATCHERS[0])):
        fresh = [f"r{turn}-{n:03d}" for n in range(EACH)]
        cell.produce([request(ident) for ident in fresh])
        idents += fresh
        reached = len(cell.answered(reached + SOME, ANSWER_S))
        assert reached < len(idents), "nothing was under way: nothing was shown"
        assert told_to_stop(cell, name) == 0, cell.log_of(name)
        reached = len(cell.results())
        if reached < len(idents):  # while it is away the others go on
            reached = len(cell.answered(min(reached + SOME, len(idents)), ANSWER_S))
        serve(cell, name)
        if name in WORKERS:
            ready.until(lambda who=name: who in owners(cell), UP_S, f"{name} to be back")
    cell.answered(len(idents), ANSWER_S)
    cell.stop()
    results = cell.results()
    assert tally(results) == dict.fromkeys(idents, 1)
    assert dead_or_failed(cell, results) == []
    assert {one["run_id"] for one in results} == {FIRST_RUN}, "what ran was let finish, and what had not begun had no run"
    assert {one["worker"] for one in results} == set(WORKERS)


def test_what_outlasts_the_grace_is_handed_back_and_another_worker_finishes_it_once(make_cell):
    cell = make_cell({"ttft_ms": 0, "tpot_ms": 100}, slots=2, drain_ms=1_000)
    cell.dispatcher("d0")
    cell.worker("w0")
    ready.until(lambda: "w0" in owners(cell), UP_S, "w0 to be there")
    cell.produce([request("long", max_output_tokens=150), request("short", max_output_tokens=2)])
    cell.answered(1, ANSWER_S)
    cell.worker("w1")
    ready.until(lambda: owners(cell) == {"w0", "w1"}, UP_S, "w1 to have its share")
    assert cell.running("w0") == 1
    assert told_to_stop(cell, "w0") == 0, cell.log_of("w0")
    cell.answered(2, ANSWER_S)
    cell.stop()
    results = {one["request_id"]: one for one in cell.results()}
    assert tally(cell.results()) == {"long": 1, "short": 1}
    assert dead_or_failed(cell, results.values()) == []
    assert (results["short"]["run_id"], results["short"]["worker"]) == (FIRST_RUN, "w0")
    assert (results["long"]["run_id"], results["long"]["worker"]) == ("000000.000001", "w1")
    assert results["long"]["usage"]["output_tokens"] == 150
    assert [one["outcome"] for one in results["long"]["route"]] == ["completed"]
