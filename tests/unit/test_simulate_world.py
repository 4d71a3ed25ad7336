"""Whole runs: every request ends once under every policy, the same seed gives the same run, and policies do as they say."""

import gc
import tracemalloc
from collections import Counter

import pytest
from small_scenario import run_small, small_scenario

from deploy.simulate.arrivals import Arrivals
from deploy.simulate.errors import SimulationError
from deploy.simulate.job import Ask, Job
from deploy.simulate.measures import HORIZON_MS, POINTS_MAX, Measures, Series
from deploy.simulate.policies import POLICIES, find_policy
from deploy.simulate.report import figures
from deploy.simulate.runs import Runs
from deploy.simulate.scenario import Slo
from deploy.simulate.world import World

EVERY = sorted(POLICIES)
FAULTS = [
    {"at_s": 10, "worker": "llama-0", "does": "die"},
    {"at_s": 12, "worker": "mamba-0", "does": "die"},
    {"at_s": 15, "worker": "llama-1", "does": "heat", "temperature_c": 95, "pace": 3},
    {"at_s": 20, "worker": "llama-0", "does": "restart"},
    {"at_s": 40, "worker": "mamba-0", "does": "restart"},
]


def watched(policy, **changes):
    """A run, and how often each request ended."""
    scenario = small_scenario(**changes)
    world = World(scenario, Arrivals(scenario), policy, find_policy(policy))
    ends, ended = Counter(), world.measures.ended

    def count(job, status, now_ms, *, is_open):
        ends[job.number] += 1
        assert now_ms >= job.at_ms
        if status == "completed":
            assert job.at_ms < job.first_ms <= job.end_ms == now_ms
            assert job.made == job.output_tokens
        ended(job, status, now_ms, is_open=is_open)

    world.measures.ended = count
    return world.run(), ends


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("changes", [{}, {"scale": 4.0}, {"faults": FAULTS}], ids=["calm", "overload", "faults"])
def test_every_request_ends_exactly_once(policy, changes):
    ran, ends = watched(policy, **changes)
    assert ran.is_whole
    assert len(ends) == ran.measures.arrived > 300
    assert set(ends.values()) == {1}
    assert ran.measures.statuses == {"completed": ran.measures.arrived}


@pytest.mark.parametrize("policy", EVERY)
def test_the_same_seed_gives_the_same_run(policy):
    first, again, other = (figures(run_small(policy, scale=2.0, seed=seed, faults=FAULTS)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


@pytest.mark.parametrize("policy", EVERY)
def test_light_load_is_served_well_by_everybody(policy):
    told = figures(run_small(policy, scale=0.5))
    assert told["attainment"] == 1.0
    assert 0 < told["utilisation"] == told["utilisation_with_misses"] < told["busy"] < 1
    assert told["queue_max"] <= 1


def test_isolated_engines_serve_their_own_kind_only():
    ran = run_small("isolated", traffic__0__kinds__1__share=8)
    kinds = figures(ran)["kinds"]
    assert figures(ran)["engines"]["mamba"] == pytest.approx(0.8, abs=0.06)
    assert kinds[0]["latency_ms"]["p50"] < kinds[1]["latency_ms"]["p50"]


def test_one_fifo_uses_whatever_is_free():
    crowded = {"traffic__0__kinds__1__share": 8, "traffic__0__kinds__1__service_class": "interactive", "scale": 2.5}
    apart, pooled = (figures(run_small(policy, **crowded)) for policy in ("isolated", "pooled_fifo"))
    assert pooled["engines"]["llama"] > 0.5
    assert pooled["attainment"] > apart["attainment"] + 0.2
    bound = figures(run_small("pooled_fifo", **crowded, traffic__0__kinds__1__fallback="none", traffic__0__kinds__1__hint="ssm"))
    assert bound["engines"] == apart["engines"]  # where nobody may stand in, pooling changes nothing


def test_earliest_deadline_first_lets_batch_wait():
    fifo, edf = (figures(run_small(policy, scale=4.0)) for policy in ("pooled_fifo", "edf"))
    assert edf["attainment"] > fifo["attainment"]
    assert edf["kinds"][1]["ttft_ms"]["p99"] > fifo["kinds"][1]["ttft_ms"]["p99"]


def test_stale_snapshots_hurt_who_believes_them():
    stale = {
        "engines__llama__workers": 8,
        "traffic__0__kinds": [{"engine": "llama", "hint": "transformer", "fallback": "none"}],
        "status__heartbeat_ms": 2_000,
        "status__on_change_ms": None,
        "scale": 4.0,
    }
    fresh, blind, two = (figures(run_small(p, **stale))["ttft_ms"]["p99"] for p in ("fresh_jsq", "least_loaded", "power_of_two"))
    assert fresh < two < blind


def test_who_fits_nowhere_is_rejected():
    for policy in ("isolated", "pooled_fifo", "edf", "fresh_jsq"):
        ran = run_small(policy, engines__llama__max_context=600, engines__mamba__max_context=600)
        assert ran.measures.statuses["rejected"] > 50
        assert ran.measures.statuses.total() == ran.measures.arrived


def test_a_backlog_in_the_same_partition_stands_in_front_of_nobody():
    flood, small = (
        {
            "name": name,
            "arrivals": {"process": "regular", "per_s": per_s},
            "input_tokens": {"dist": "fixed", "tokens": 400},
            "output_tokens": {"dist": "fixed", "tokens": 20},
            "kinds": [{"engine": "llama", "tenant": name}],
        }
        for name, per_s in (("flood", 150.0), ("small", 2.0))
    )
    changes = {"traffic": [flood, small], "forebay": {"topics": {"request_partitions": 1}, "dispatcher": {"runway_factor": 1.0}}}
    fifo, ours = (figures(run_small(policy, **changes)) for policy in ("pooled_fifo", "forebay"))
    assert ours["ended"] == fifo["ended"] == {"completed": fifo["requests"]}
    assert ours["queue_max"] > 1_000  # far more than a partition's ledger and a tenant's memory hold
    assert fifo["kinds"][1]["ttft_ms"]["p50"] > 10_000
    assert ours["kinds"][1]["ttft_ms"]["p99"] < 1_500


def test_a_passed_deadline_is_no_success():
    changes = {"traffic__0__kinds__0__deadline_ms": 700, "scale": 5.0}
    ran, ends = watched("forebay", **changes)
    assert set(ends.values()) == {1}
    assert figures(ran)["kinds"][0]["attainment"] < 0.7
    assert ran.measures.statuses["expired"] + ran.measures.statuses["rejected"] > 50


def test_a_dead_engines_requests_are_run_again_by_another():
    dies = [{"at_s": 20, "worker": "llama-0", "does": "die"}]
    calm, broken = (figures(run_small("forebay", faults=faults)) for faults in ([], dies))
    assert broken["latency_ms"]["max"] > 6_000 > calm["latency_ms"]["max"]  # the session's timeout
    assert broken["ended"] == calm["ended"]


def test_a_pool_without_workers_is_rescued_to_others():
    dies = [{"at_s": 20, "worker": "mamba-0", "does": "die"}]
    told = figures(run_small("forebay", faults=dies))
    assert set(told["ended"]) == {"completed"}
    assert 21_000 < told["kinds"][1]["latency_ms"]["max"] < 40_000  # session and failover


def test_who_never_gets_an_engine_is_told():
    dies = [{"at_s": 20, "worker": "mamba-0", "does": "die"}]
    kinds = [{"engine": "mamba", "hint": "ssm", "fallback": "none"}]
    with pytest.raises(SimulationError, match=r"forebay: \d+ requests never end: no engine takes them"):
        run_small("forebay", faults=dies, traffic__0__kinds=kinds)


def test_an_interrupt_keeps_what_there_is():
    runs = Runs(small_scenario(duration_s=10_000.0), report=lambda _policy, arrived, _now: interrupt() if arrived else None)
    ran = runs.run("forebay")
    assert not ran.is_whole
    assert 1_000 < ran.measures.statuses.total() <= ran.measures.arrived < 5_000
    assert figures(ran)["utilisation"] > 0


def interrupt():
    raise KeyboardInterrupt


def test_memory_does_not_grow_with_the_number_of_requests():
    def peak(requests):
        gc.collect()
        tracemalloc.start()
        try:
            run_small("forebay", requests=requests, duration_s=1e6, warmup_s=0.0)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(200)  # what is imported and cached with the first run
    few, many = peak(4_000), peak(12_000)  # by the first the series is as long as it gets
    assert many < 1.2 * few


def test_the_highest_load_is_found_from_both_sides():
    runs = Runs(small_scenario())
    found = runs.find_load("pooled_fifo")
    assert 1 < found.at < found.beyond <= found.at * 1.011
    assert found.ran.measures.attainment() >= 0.99
    assert runs.run("pooled_fifo", found.beyond).measures.attainment() < 0.99
    hopeless = Runs(small_scenario(slo__ttft_ms=0.01)).find_load("pooled_fifo")
    assert (hopeless.at, hopeless.ran) == (None, None)


def test_the_fewest_gpus_are_found_and_shared_as_the_scenarios_own():
    runs = Runs(small_scenario(scale=8.0, gpus_max=40))
    found = runs.find_gpus("pooled_fifo")
    assert 3 < found.at <= 40
    assert found.beyond == found.at - 1
    assert found.ran.workers == found.at
    assert runs.run("pooled_fifo", scenario=runs.with_gpus(found.at - 1)).measures.attainment() < 0.99
    nine = runs.with_gpus(9).engines
    assert (nine["llama"].workers, nine["mamba"].workers) == (6, 3)
    with pytest.raises(SimulationError, match="gpus_max"):
        Runs(small_scenario(gpus_max=1)).find_gpus("forebay")


def test_recovery_is_the_time_from_which_on_the_rest_is_served_well():
    ask = Ask(0, "llama", "default", "interactive", "auto", "auto", "any", None, None)
    speeds = {"llama": small_scenario().engines["llama"].speed()}
    measures = Measures(Slo(attainment=0.99), [ask], speeds, 0.0, [10_000.0])
    for n in range(2_000):
        job = Job(n, n * 50.0, ask, 10, 1, 10)
        job.worker = "llama-0"
        measures.arrival(job)
        job.first_ms = job.end_ms = job.at_ms + (5_000 if 10_000 <= job.at_ms < 17_500 else 100)
        measures.ended(job, "completed", job.end_ms, is_open=True)
    (recovered,) = measures.recovery_s()
    misses = 0.01 * (HORIZON_MS - 7_500) / 50  # so many may come before the rest of the horizon misses
    assert recovered == pytest.approx(7.5 - misses * 0.05, abs=0.3)


def test_a_series_keeps_its_means_when_it_is_thinned():
    series = Series(1.0)
    for n in range(10 * POINTS_MAX):
        series.add(float(n), {"x": float(n)})
    seconds, values = series.points("x")
    assert POINTS_MAX / 2 <= len(values) <= POINTS_MAX
    assert values[0] == pytest.approx((series.interval_ms - 1) / 2)
    assert seconds[1] == series.interval_ms / 1000
