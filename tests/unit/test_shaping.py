"""Token buckets of tenants, cell and pools: what passes when, what is borrowed, and what new settings or another clock do."""

import math

import pytest

from dispatcher.core.shaping import Band, PoolRates, Shaper
from schemas.policy import CellConfig, PoolSettings, TenantConfig

G, B, W = Band.GUARANTEED, Band.BORROWING, Band.WAITING


def shaper(cell=None, **tenants):
    return Shaper(cell or CellConfig(), tenants)


def passed(made, tenant, since, until, tokens=1.0, *, borrows=True):
    """Serve all that may pass, at every millisecond; gives how many did in each band."""
    found = {G: 0, B: 0}
    for now in range(since, until):
        while (band := made.band(tenant, now)) is G or (borrows and band is B):
            made.charge(tenant, tokens, now, band)
            found[band] += 1
    return found


def test_who_has_no_rates_borrows_always_and_takes_no_room():
    made = shaper(a=TenantConfig(weight=2.0))
    for n in range(10_000):
        assert made.band(f"t{n}", n) is B
        made.charge(f"t{n}", 1e9, n, B)
        made.correct(f"t{n}", 1e9, n, B)
        assert made.ready_ms(f"t{n}", n) == n
    assert made.band("a", 0) is B
    assert made._tenants == {}
    assert len(made._weights) == 1


def test_a_guarantee_begins_empty_and_counts_from_the_first_millisecond_on():
    made = shaper(a=TenantConfig(requests_per_s=100.0))
    assert made.band("a", 1_000) is B
    assert made.band("a", 1_001) is G
    made.charge("a", 1.0, 1_001, G)
    assert made.standing("a", 1_001) == (B, 1_011.0)
    assert made.band("a", 1_010) is B
    assert made.band("a", 1_011) is G


def test_buckets_fill_from_the_first_time_that_anybody_was_seen():
    made = shaper(a=TenantConfig(requests_per_s=100.0, burst_s=2.0), other=TenantConfig(requests_per_s=1.0))
    made.band("other", 1_000)
    assert passed(made, "a", 2_000, 2_001, borrows=False) == {G: 100, B: 0}


def test_a_burst_is_all_that_is_saved_up():
    made = shaper(a=TenantConfig(requests_per_s=10.0, tokens_per_s_max=1_000.0, burst_s=3.0))
    made.band("a", 0)
    assert passed(made, "a", 1_000_000, 1_000_001, borrows=False) == {G: 30, B: 0}
    assert passed(made, "a", 2_000_000, 2_000_001, tokens=100.0) == {G: 30, B: 0}
    assert made.band("a", 2_000_000) is W, "all its tokens are gone"


def test_what_is_borrowed_does_not_pay_the_guarantee():
    made = shaper(a=TenantConfig(requests_per_s=10.0, requests_per_s_max=1_000.0))
    assert passed(made, "a", 0, 10_000)[B] > 9_000
    assert passed(made, "a", 10_000, 20_000, borrows=False) == {G: 100, B: 0}


def test_a_ceiling_holds_for_requests_and_for_tokens():
    made = shaper(a=TenantConfig(requests_per_s_max=100.0), b=TenantConfig(tokens_per_s_max=1_000.0))
    assert passed(made, "a", 0, 10_000) == {G: 0, B: 1_000}
    assert passed(made, "b", 0, 10_000, tokens=500.0) == {G: 0, B: 20}


def test_a_guarantee_in_two_units_is_over_when_one_is():
    made = shaper(a=TenantConfig(requests_per_s=1_000.0, tokens_per_s=100.0))
    made.band("a", 0)
    assert made.band("a", 1_000) is G
    made.charge("a", 500.0, 1_000, G)
    assert made.standing("a", 1_000) == (B, 5_001.0)


def test_a_debt_is_paid_before_anything_passes_again():
    made = shaper(a=TenantConfig(tokens_per_s_max=100.0))
    made.band("a", 0)
    made.charge("a", 1_000.0, 1, made.band("a", 1))
    assert made.band("a", 1) is W
    assert made.ready_ms("a", 1) == 10_001.0
    assert made.band("a", 9_999) is W
    assert made.band("a", 10_001) is B


def test_what_was_not_taken_is_given_back_and_what_was_taken_more_is_paid():
    made = shaper(a=TenantConfig(tokens_per_s=100.0, tokens_per_s_max=100.0))
    made.band("a", 0)
    made.charge("a", 1_000.0, 100, G)
    made.correct("a", -950.0, 100, G)
    assert made.ready_ms("a", 100) == 501.0
    made.correct("a", 50.0, 200, G)
    assert made.ready_ms("a", 200) == 1_001.0
    made.correct("a", -1e9, 200, G)
    assert made.state(200)["a"].ceilings == {"tokens": 200.0}, "and no more than a burst"


def test_a_cell_lends_what_is_left_and_never_holds_up_a_guarantee():
    made = shaper(CellConfig(requests_per_s_max=100.0), a=TenantConfig(requests_per_s=60.0))
    total = {G: 0, B: 0}
    others = 0
    for now in range(10_000):
        while made.band("a", now) is G:
            made.charge("a", 1.0, now, G)
            total[G] += 1
        while made.band("plain", now) is B:
            made.charge("plain", 1.0, now, B)
            others += 1
    assert abs(total[G] - 600) <= 1
    assert abs(others - 400) <= 2
    assert not made.lends(10_000 - 1)
    assert made.ready_ms("plain", 9_999) == made.lends_at_ms(9_999) > 9_999
    assert made.ready_ms("a", 9_999) <= 10_017


def test_a_ceiling_and_the_cell_are_both_waited_for():
    made = shaper(CellConfig(requests_per_s_max=1.0), a=TenantConfig(requests_per_s_max=10.0))
    made.band("a", 0)
    made.charge("a", 1.0, 0, B)
    assert made.standing("a", 0) == (W, 101.0)
    assert made.ready_ms("a", 0) == 1_001.0


def test_a_paused_tenant_waits_without_end():
    tenants = {"a": TenantConfig(paused=True, requests_per_s=10.0)}
    made = Shaper(CellConfig(), tenants)
    assert made.band("a", 5) is W
    assert made.ready_ms("a", 5) == math.inf
    tenants["a"] = TenantConfig()
    made.steered(6)
    assert made.band("a", 6) is B
    assert made._tenants == {}


def test_steering_keeps_what_was_saved_up_and_begins_new_rates_empty():
    tenants = {"a": TenantConfig(requests_per_s=10.0, burst_s=2.0)}
    made = Shaper(CellConfig(), tenants)
    made.band("a", 0)
    tenants["a"] = TenantConfig(requests_per_s=1_000.0, burst_s=2.0, tokens_per_s_max=5.0)
    tenants["b"] = TenantConfig(requests_per_s=10.0)
    made.steered(1_000)
    assert made.state(1_000)["a"].assured == {"requests": 10.0}
    assert made.state(1_000)["a"].ceilings == {"tokens": 0.0}
    assert made.state(1_000)["b"].assured == {"requests": 0.0}
    tenants["a"] = TenantConfig(requests_per_s=1.0, burst_s=2.0)
    made.steered(1_000)
    assert made.state(1_000)["a"].assured == {"requests": 2.0}


def test_a_clock_that_is_set_back_neither_freezes_nor_fills():
    made = shaper(a=TenantConfig(requests_per_s_max=10.0))
    made.band("a", 3_600_000)
    assert passed(made, "a", 3_600_000, 3_601_000) == {G: 0, B: 10}
    back = passed(made, "a", 0, 1_000)
    assert 9 <= back[B] <= 10
    assert made.band("a", 3_601_000) is B, "a clock that jumps ahead gives a burst"
    assert passed(made, "a", 3_601_000, 3_601_001)[B] <= 20


def test_the_weight_is_given_or_in_proportion_to_the_guarantee_in_tokens():
    made = shaper(
        a=TenantConfig(tokens_per_s=100.0),
        b=TenantConfig(tokens_per_s=300.0),
        c=TenantConfig(weight=7.0),
        d=TenantConfig(requests_per_s=5.0),
    )
    assert [made.weight(name) for name in "abcde"] == [0.5, 1.5, 7.0, 1.0, 1.0]
    tiny = shaper(
        a=TenantConfig(tokens_per_s=5e-324), b=TenantConfig(tokens_per_s=1e12), c=TenantConfig(requests_per_s_max=5e-324)
    )
    assert tiny.weight("a") == 0.001
    tiny.charge("a", 1.0, 0, B)
    assert 0 < tiny.standing("a", 0)[1] <= 86_400_001


def test_states_tell_band_weight_and_levels():
    made = shaper(a=TenantConfig(requests_per_s=10.0, tokens_per_s_max=100.0, weight=3.0), b=TenantConfig(weight=2.0))
    made.band("a", 0)
    state = made.state(1_000)
    assert (state["a"].band, state["a"].weight, state["a"].assured, state["a"].ceilings) == (
        "guaranteed",
        3.0,
        {"requests": 10.0},
        {"tokens": 100.0},
    )
    assert (state["b"].band, state["b"].assured) == ("borrowing", {})


def test_a_pool_is_sent_what_its_rates_allow():
    pools = {"p": PoolSettings(requests_per_s_max=100.0), "t": PoolSettings(tokens_per_s_max=1_000.0)}
    rates = PoolRates(pools)
    assert rates.allows("free", 0)
    rates.charge("free", 1e9, 0)
    assert rates.allows("free", 0)
    sent = 0
    for now in range(10_000):
        while rates.allows("p", now):
            rates.charge("p", 1.0, now)
            sent += 1
    assert sent == pytest.approx(1_000, abs=1)
    assert not rates.allows("t", 0)
    rates.charge("t", 500.0, 1)
    assert rates.ready_ms("t", 1) == 501.0
    rates.correct("t", -400.0, 1)
    assert rates.ready_ms("t", 1) == 101.0


def test_a_pool_can_be_paused_and_steered():
    pools = {"p": PoolSettings(paused=True)}
    rates = PoolRates(pools)
    assert not rates.allows("p", 5)
    assert rates.ready_ms("p", 5) == math.inf
    pools["p"] = PoolSettings(requests_per_s_max=10.0, burst_s=1.0)
    rates.steered(5)
    assert not rates.allows("p", 5)
    assert rates.allows("p", 6)
    rates.charge("p", 1.0, 1_000_000)
    pools["p"] = PoolSettings(requests_per_s_max=2.0, burst_s=1.0)
    rates.steered(1_000_000)
    for _ in range(2):
        assert rates.allows("p", 1_000_000)
        rates.charge("p", 1.0, 1_000_000)
    assert not rates.allows("p", 1_000_000), "what was saved up is cut to the new burst"
    del pools["p"]
    rates.steered(1_000_000)
    assert rates.allows("p", 1_000_000)
