"""The circuit breakers: what trips them, how they are probed, and when they close."""

import pytest

from dispatcher.core.breaker import FAILURES, Breakers, State
from schemas.errors import ErrorCode
from schemas.policy import BreakerConfig

NOW = 1_000_000
CONFIG = BreakerConfig(failures=3, open_ms=1_000, open_ms_max=4_000, probes=2)
ILL = ErrorCode.INTERNAL
ALONE = {"w1": 1}
BOTH = {"w1": 1, "w2": 1}


def tripped(worker="w1", made=None):
    made = made or Breakers(CONFIG)
    for _ in range(CONFIG.failures):
        made.completed("p", worker, 1, ILL, NOW)
    assert made.state("p", worker) is State.OPEN
    return made


def half_open(made=None, workers=ALONE, now=NOW + 1_000):
    made = made or tripped()
    made.settle(now)
    assert all(made.state("p", worker) is State.HALF_OPEN for worker in workers)
    return made


@pytest.mark.parametrize("code", list(ErrorCode))
def test_only_an_engines_own_failures_trip_it(code):
    made = Breakers(CONFIG)
    for _ in range(100):
        made.completed("p", "w1", 1, code, NOW)
    counts = code in {ErrorCode.INTERNAL, ErrorCode.TIMEOUT, ErrorCode.UNHEALTHY}
    assert made.state("p", "w1") is (State.OPEN if counts else State.CLOSED)
    assert made.allows("p", "w1", ALONE) is not counts
    assert not (code.is_client_fault and code in FAILURES)


def test_failures_count_in_a_row_and_what_tells_nothing_does_not_break_the_row():
    made = Breakers(CONFIG)
    for code in (ILL, ILL, None, ILL, ILL):
        made.completed("p", "w1", 1, code, NOW)
    assert made.state("p", "w1") is State.CLOSED
    made.completed("p", "w1", 1, ErrorCode.CANCELLED, NOW)
    made.completed("p", "w1", 1, ErrorCode.TIMEOUT, NOW)
    assert made.state("p", "w1") is State.OPEN


def test_it_is_left_alone_then_probed_and_closes_with_a_success():
    made = tripped()
    version = made.version
    made.settle(NOW + 999)
    assert (made.state("p", "w1"), made.allows("p", "w1", ALONE)) == (State.OPEN, False)
    assert not made.completed("p", "w1", 1, None, NOW + 999), "a run from before tells nothing"
    half_open(made)
    assert made.version > version
    for _ in range(CONFIG.probes):
        assert made.allows("p", "w1", ALONE)
        made.sent("p", "w1", NOW + 1_000)
    assert not made.allows("p", "w1", ALONE)
    assert made.completed("p", "w1", 1, None, NOW + 1_100), "the worker is to start slowly"
    assert made.state("p", "w1") is State.CLOSED
    assert made.allows("p", "w1", ALONE)
    assert not made.completed("p", "w1", 1, None, NOW + 1_200)


def test_it_is_open_twice_as_long_after_each_probe_that_fails_up_to_a_bound():
    made, now, lengths = tripped(), NOW, []
    for _ in range(4):
        since = now
        while made.state("p", "w1") is State.OPEN:
            now += 100
            made.settle(now)
        lengths.append(now - since)
        made.sent("p", "w1", now)
        made.completed("p", "w1", 1, ILL, now)
    assert lengths == [1_000, 2_000, 4_000, 4_000]
    made.settle(now + 4_000)
    made.completed("p", "w1", 1, None, now + 4_000)
    tripped(made=made)
    assert made.turn_ms == NOW + 1_000, "once it was closed it begins anew"


def test_a_probe_that_never_comes_back_holds_nobody_up():
    made = half_open()
    made.sent("p", "w1", NOW + 1_000)
    made.sent("p", "w1", NOW + 1_500)
    made.settle(NOW + 2_499)
    assert not made.allows("p", "w1", ALONE)
    made.settle(NOW + 2_500)
    assert made.allows("p", "w1", ALONE)


def test_a_probe_that_tells_nothing_makes_room_for_another():
    made = half_open()
    made.sent("p", "w1", NOW + 1_000)
    made.sent("p", "w1", NOW + 1_000)
    made.completed("p", "w1", 1, ErrorCode.INVALID_REQUEST, NOW + 1_001)
    assert made.allows("p", "w1", ALONE)
    assert made.state("p", "w1") is State.HALF_OPEN


def test_a_worker_that_was_started_anew_is_probed_at_once_and_its_past_does_not_count():
    made = tripped()
    made.know("p", {"w1": 2})
    assert made.state("p", "w1") is State.HALF_OPEN
    assert not made.completed("p", "w1", 1, None, NOW), "that was the process before"
    assert made.completed("p", "w1", 2, None, NOW)
    made.completed("p", "w2", 1, ILL, NOW)
    made.know("p", {"w1": 2, "w2": 2})
    for _ in range(CONFIG.failures - 1):
        made.completed("p", "w2", 2, ILL, NOW)
    assert made.state("p", "w2") is State.CLOSED


def test_a_pool_is_open_when_all_its_workers_are_and_then_it_is_probed_as_one():
    made = tripped("w2", tripped("w1"))
    assert made.pool_state("p", BOTH) is State.OPEN
    assert made.pool_state("p", {**BOTH, "w3": 1}) is State.CLOSED
    half_open(made, BOTH)
    assert made.pool_state("p", BOTH) is State.HALF_OPEN
    made.sent("p", "w1", NOW + 1_000)
    assert made.allows("p", "w2", BOTH)
    made.sent("p", "w2", NOW + 1_000)
    assert not made.allows("p", "w1", BOTH), "two probes for the whole pool"
    assert not made.allows("p", "w2", BOTH)
    made.completed("p", "w1", 1, None, NOW + 1_001)
    assert made.allows("p", "w1", BOTH)
    assert made.allows("p", "w2", BOTH), "each is probed on its own again"


def test_one_bad_worker_does_not_shut_out_a_good_one():
    made = Breakers(CONFIG)
    for _ in range(50):
        made.completed("p", "bad", 1, ILL, NOW)
    assert made.allows("p", "good", {"bad": 1, "good": 1})
    assert not made.allows("p", "bad", {"bad": 1, "good": 1})


def test_workers_that_are_gone_take_no_room():
    made = Breakers(CONFIG)
    for n in range(1_000):
        made.completed("p", f"w{n}", 1, ILL, NOW)
        made.know("p", {f"w{n}": 1})
    assert len(made._pools["p"]) == 1
    made.completed("p", "w999", 1, None, NOW)
    assert made._pools["p"] == {}
