"""When requests come: rates, bursts, phases, traces over and over; all from the seed."""

import itertools
import statistics

import pytest
from small_scenario import small_scenario

from deploy.simulate.arrivals import Arrivals
from deploy.simulate.histogram import Histogram
from deploy.simulate.runs import with_trace

LONG = {"duration_s": 4_000.0}


def times(scale=1.0, seed=None, **changes):
    return [job.at_ms / 1000 for job in Arrivals(small_scenario(**{**LONG, **changes}), seed, scale)]


def gaps(at):
    return [after - before for before, after in itertools.pairwise(at)]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        ({"process": "poisson", "per_s": 5}, 1.0),
        ({"process": "gamma", "per_s": 5, "cv": 3}, 3.0),
        ({"process": "gamma", "per_s": 5, "cv": 0.3}, 0.3),
        ({"process": "regular", "per_s": 5}, 0.0),
        ({"process": "trace", "trace": "azure_conv"}, None),
    ],
)
def test_rate_and_variation_are_what_was_asked_for(arrivals, cv):
    at = times(traffic__0__arrivals=arrivals)
    expected = 5 if arrivals["process"] != "trace" else 19_366 / 3_502
    assert len(at) / 4_000 == pytest.approx(expected, rel=0.05)
    assert at == sorted(at)
    if cv is not None:
        assert statistics.stdev(gaps(at)) / statistics.mean(gaps(at)) == pytest.approx(cv, abs=0.08 * max(cv, 0.1))


def test_the_scale_makes_more_of_the_same():
    arrivals = {"process": "trace", "trace": "azure_conv"}
    slow, fast = times(traffic__0__arrivals=arrivals), times(2.0, traffic__0__arrivals=arrivals)
    assert fast[:1_000] == pytest.approx([at / 2 for at in slow[:1_000]])
    unscaled = times(2.0, traffic__0__arrivals=arrivals, traffic__0__is_scaled=False)
    assert unscaled == slow


def test_bursts_are_on_and_off_at_their_times():
    at = times(traffic__0__arrivals={"process": "on_off", "per_s": 20, "off_per_s": 1, "on_s": 10, "off_s": 30})
    on = [moment for moment in at if moment % 40 < 10]
    assert len(on) / 1_000 == pytest.approx(20, rel=0.05)
    assert (len(at) - len(on)) / 3_000 == pytest.approx(1, rel=0.08)
    at = times(traffic__0__arrivals={"process": "on_off", "per_s": 20, "on_s": 10, "off_s": 30, "random": True})
    assert len(at) / 4_000 == pytest.approx(5, rel=0.4)
    assert max(gaps(at)) > 20


def test_phases_change_rate_and_mix_evenly_over_their_ramp():
    phases = [{"at_s": 1_000, "ramp_s": 1_000, "rate": 3.0, "shares": [0, 1]}, {"at_s": 3_000, "rate": 0.0}]
    scenario = small_scenario(**LONG, traffic__0__phases=phases, traffic__0__arrivals={"process": "poisson", "per_s": 10})
    jobs = list(Arrivals(scenario))

    def between(since_s, until_s):
        found = [job for job in jobs if since_s <= job.at_ms / 1000 < until_s]
        return len(found) / (until_s - since_s), sum(job.ask.tenant == "two" for job in found) / max(1, len(found))

    assert between(0, 1_000) == pytest.approx((10, 1 / 3), rel=0.08)
    assert between(1_450, 1_550) == pytest.approx((20, 2 / 3), rel=0.12)
    assert between(2_000, 3_000) == pytest.approx((30, 1), rel=0.05)
    assert between(3_010, 4_000) == (0, 0)


def test_traffic_begins_and_ends_at_its_times():
    at = times(traffic__0__first_s=100.0, traffic__0__last_s=200.0)
    assert 100 < min(at) < 105
    assert 195 < max(at) < 200


def test_streams_are_merged_in_order_and_numbered():
    traffic = [
        {
            "name": name,
            "arrivals": {"process": "poisson", "per_s": 2},
            "input_tokens": {"dist": "uniform", "least": 5, "most": 9},
            "output_tokens": {"dist": "fixed", "tokens": 7},
            "kinds": [{"engine": "llama", "tenant": name}],
        }
        for name in ("one", "two")
    ]
    jobs = list(Arrivals(small_scenario(traffic=traffic)))
    assert [job.number for job in jobs] == list(range(len(jobs)))
    assert [job.at_ms for job in jobs] == sorted(job.at_ms for job in jobs)
    assert {job.ask.tenant for job in jobs} == {"one", "two"}
    assert [job.at_ms for job in jobs if job.ask.tenant == "one"] != [job.at_ms for job in jobs if job.ask.tenant == "two"]
    assert {job.input_tokens for job in jobs} == {5, 6, 7, 8, 9}
    assert {(job.output_tokens, job.max_output_tokens) for job in jobs} == {(7, 256)}


def test_everything_follows_from_the_seed():
    def drawn(seed):
        return [(job.at_ms, job.ask.number, job.input_tokens, job.output_tokens) for job in Arrivals(small_scenario(), seed)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_another_trace_goes_under_a_scenario_with_its_lengths(tmp_path):
    rows = "".join(f"2024-05-10 00:00:{n:02d},{n + 1},{n + 2}\n" for n in range(60))
    path = tmp_path / "other.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    jobs = list(Arrivals(with_trace(small_scenario(duration_s=90.5), path)))
    assert [job.at_ms for job in jobs] == pytest.approx([1_000 * (n + 1) for n in range(90)])
    assert [(job.input_tokens, job.output_tokens) for job in jobs[59:62]] == [(60, 61), (1, 2), (2, 3)]  # over and over
    lengths_only = small_scenario(traffic__0__input_tokens=None, traffic__0__trace="azure_conv")
    changed = with_trace(lengths_only, path)
    assert changed.traffic[0].arrivals == lengths_only.traffic[0].arrivals
    assert max(job.input_tokens for job in Arrivals(changed)) <= 60


def test_quantiles_are_within_half_a_percent():
    histogram, other = Histogram(), Histogram()
    for n in range(1, 5_001):
        histogram.add(float(n))
        other.add(float(n + 5_000))
    histogram.merge(other)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(10_000 * share, rel=0.006)
    assert histogram.quantile(1.0) == pytest.approx(10_000, rel=0.006)
    assert histogram.most == 10_000
    assert histogram.mean == pytest.approx(5_000.5)
    assert Histogram().quantile(0.5) == 0
