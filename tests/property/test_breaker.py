"""The breaker over random histories: what never opens it, and that it always finds back."""

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.breaker import FAILURES, Breakers, State
from schemas.errors import ErrorCode
from schemas.policy import BreakerConfig

WORKERS = {"a": 1, "b": 1, "c": 1}
configs = st.builds(
    BreakerConfig,
    failures=st.integers(1, 5),
    open_ms=st.integers(1, 500),
    open_ms_max=st.integers(500, 5_000),
    probes=st.integers(1, 3),
)
harmless = [None, *(code for code in ErrorCode if code not in FAILURES)]
steps = st.lists(st.tuples(st.sampled_from(sorted(WORKERS)), st.sampled_from([None, *ErrorCode]), st.integers(0, 700)))


@given(configs, st.lists(st.tuples(st.sampled_from(sorted(WORKERS)), st.sampled_from(harmless))))
def test_no_fault_of_a_client_ever_opens_it(config, history):
    made = Breakers(config)
    for now, (worker, code) in enumerate(history):
        made.completed("p", worker, 1, code, now)
        assert made.allows("p", worker, WORKERS)


@given(configs, steps)
def test_with_a_healthy_engine_it_always_closes_again(config, history):
    made, now = Breakers(config), 0
    for worker, code, passed in history:
        now += passed
        made.settle(now)
        if made.allows("p", worker, WORKERS):
            made.sent("p", worker, now)  # and of some of what is sent nothing is ever heard
        made.completed("p", worker, 1, code, now)
    for _ in range(2 * len(WORKERS) + 2):
        now += config.open_ms_max
        made.settle(now)
        for worker in WORKERS:
            if made.allows("p", worker, WORKERS):
                made.sent("p", worker, now)
                made.completed("p", worker, 1, None, now)
    assert {made.state("p", worker) for worker in WORKERS} == {State.CLOSED}


@given(configs, steps)
def test_a_pool_whose_workers_are_all_in_doubt_has_few_probes_out_at_once(config, history):
    made, now = Breakers(config), 0
    for worker, code, passed in history:
        now += passed
        made.settle(now)
        if made.allows("p", worker, WORKERS):
            in_doubt = made.pool_state("p", WORKERS) is State.HALF_OPEN
            made.sent("p", worker, now)
            assert not in_doubt or sum(one.probing for one in made._pools["p"].values()) <= config.probes
        if code is not None:
            made.completed("p", worker, 1, code, now)
