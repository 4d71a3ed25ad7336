"""The fair queue: no loss, order inside a tenant, and who goes first when something is blocked, dropped or before its time."""

import math

import pytest
from fairness import ANY, OTHER, item, queue
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core import turns
from dispatcher.core.shaping import Band
from schemas.policy import CellConfig, TenantConfig

costs = st.floats(1, 1_000)


def serve_all(q, cost=1.0, now=0, blocked=()):
    order = []
    while (head := q.head(blocked, now)) is not None:
        q.serve(head, cost)
        order.append(head.work[1])
    return order


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), costs, st.sampled_from(["interactive", "batch"]), st.booleans()), max_size=150)
)
def test_everything_that_went_in_comes_out_once(requests):
    q, _ = queue()
    for n, (tenant, _, service_class, other) in enumerate(requests):
        q.push(item(n, tenant, service_class, OTHER if other else ANY))
    assert len(q) == len(requests)
    for name in "abcd":
        for group in ("interactive", "batch"):
            assert q.count(group, name) == sum(one[0] == name and one[2] == group for one in requests)
    out = []
    while (head := q.head((), 0)) is not None:
        q.serve(head, requests[head.work[1]][1])
        out.append(head.work[1])
    assert sorted(out) == list(range(len(requests)))
    assert len(q) == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans(), st.booleans()), max_size=60),
    st.integers(0, 60),
)
def test_a_sweep_changes_nobodys_turn(requests, served):
    """Each request: tenant, other demand, interactive, dropped. One queue is swept, the other passes the dropped over."""
    orders = []
    for is_swept in (True, False):
        q, _ = queue(interactive_head_start_ms=3.0)
        items = [
            item(n, tenant, "interactive" if interactive else "batch", OTHER if other else ANY)
            for n, (tenant, other, interactive, _) in enumerate(requests)
        ]
        for one in items:
            q.push(one)
        order = []
        for n in range(len(requests)):
            if n == served:
                for one, (*_, dropped) in zip(items, requests, strict=True):
                    one.dropped = dropped
                if is_swept:
                    q.sweep()
            while (head := q.head((), 0)) is not None and head.dropped:
                q.discard(head)
            if head is None:
                break
            q.serve(head, 1 + head.work[1] % 3)
            order.append(head.work[1])
        orders.append(order)
        assert len(q) == 0 or served >= len(requests)
    assert orders[0] == orders[1]


def test_only_the_head_can_be_taken_out():
    q, _ = queue()
    first, second = item(0, "a"), item(1, "a")
    q.push(first)
    q.push(second)
    with pytest.raises(AssertionError, match="only the head"):
        q.serve(first, 1.0)
    assert q.head((), 0) is first
    with pytest.raises(AssertionError, match="only the head"):
        q.discard(second)
    q.serve(first, 1.0)
    with pytest.raises(AssertionError, match="only the head"):
        q.serve(first, 1.0)


def test_a_blocked_demand_stands_in_nobodys_way_and_keeps_its_place():
    q, _ = queue()
    for n in range(4):
        q.push(item(n, "a", demand=ANY if n % 2 else OTHER))
    assert serve_all(q, blocked={("batch", OTHER)}) == [1, 3]
    assert q.head({("interactive", OTHER)}, 0).work[1] == 0


def test_a_class_that_is_blocked_holds_up_nobody_and_catches_up_on_no_more_than_the_head_start():
    q, _ = queue(interactive_head_start_ms=40.0)  # 10 for its weight of 4
    for n in range(400):
        q.push(item(n, "a", "interactive", OTHER))
        q.push(item(1_000 + n, "b", "batch"))
    order = []
    for _ in range(200):  # batch alone is blocked
        head = q.head({("batch", ANY)}, 0)
        q.serve(head, 1.0)
        order.append(head.service_class)
    assert set(order) == {"interactive"}
    after = []
    for _ in range(60):
        head = q.head((), 0)
        q.serve(head, 1.0)
        after.append(head.service_class)
    assert 9 <= after[:12].count("batch") <= 12
    assert after[20:60].count("batch") <= 10


def test_who_was_blocked_catches_up_on_no_more_than_its_credit():
    q, _ = queue({"late": TenantConfig(burst_s=0.01)})  # 10 ms of engine time
    for n in range(300):
        q.push(item(n, "busy"))
        q.push(item(1_000 + n, "late", demand=OTHER))
    for _ in range(100):
        q.serve(q.head({("batch", OTHER)}, 0), 1.0)
    order = []
    for _ in range(40):
        head = q.head((), 0)
        q.serve(head, 1.0)
        order.append(head.tenant)
    assert order[:10] == ["late"] * 10
    assert 13 <= order[10:].count("late") <= 17


def test_an_idle_tenant_saves_nothing_up():
    q, _ = queue()
    for n in range(100):
        q.push(item(n, "busy"))
    for _ in range(50):
        q.serve(q.head((), 0), 1.0)
    for n in range(100, 150):
        q.push(item(n, "late"))
    order = []
    for _ in range(20):
        order.append(q.head((), 0).tenant)
        q.serve(q.head((), 0), 1.0)
    assert 9 <= order.count("late") <= 11


def test_what_an_idle_tenant_gets_back_is_not_saved_up_and_what_it_owes_is_owed():
    for more, least, most in ((-50.0, 9, 11), (4.0, 7, 8), (1_000.0, 0, 0)):
        q, _ = queue()
        q.push(item(0, "late"))
        for n in range(1, 100):
            q.push(item(n, "busy"))
        while len(q) > 50:
            head = q.head((), 0)
            q.serve(head, 50.0 if head.tenant == "late" else 1.0)
        q.correct("batch", "late", more, Band.BORROWING)
        for n in range(100, 150):
            q.push(item(n, "late"))
        order = []
        for _ in range(20):
            order.append(q.head((), 0).tenant)
            q.serve(q.head((), 0), 1.0)
        assert least <= order.count("late") <= most, more


def test_who_was_charged_far_too_much_has_its_turn_as_soon_as_that_is_known():
    q, _ = queue()
    for n in range(10):
        q.push(item(n, "a"))
        q.push(item(100 + n, "b"))
    assert q.head((), 0).tenant == "a"
    q.serve(q.head((), 0), 10_000.0)
    for _ in range(5):
        assert q.head((), 0).tenant == "b"
        q.serve(q.head((), 0), 1.0)
    q.correct("batch", "a", -9_999.0, Band.BORROWING)
    assert [q.head((), 0).tenant, q.serve(q.head((), 0), 1.0)] == ["a", Band.BORROWING]


def test_what_is_given_back_from_before_a_tenant_was_idle_is_not_saved_up():
    q, _ = queue()
    q.push(item(0, "a"))
    for n in range(1, 200):
        q.push(item(n, "b"))
    q.serve(q.head((), 0), 1.0)
    for _ in range(100):
        q.serve(q.head((), 0), 1.0)
    for n in range(200, 300):
        q.push(item(n, "a"))
    q.correct("batch", "a", -1_000.0, Band.BORROWING)
    order = []
    for _ in range(26):
        order.append(q.head((), 0).tenant)
        q.serve(q.head((), 0), 1.0)
    assert 12 <= order.count("a") <= 14


def test_the_nearest_deadline_of_a_tenant_goes_first_whatever_its_demand():
    q, _ = queue()
    q.push(item(0, "a"))
    q.push(item(1, "a", deadline_ms=500))
    q.push(item(2, "a", deadline_ms=100, demand=OTHER))
    q.push(item(3, "a", deadline_ms=900, demand=OTHER))
    assert serve_all(q) == [2, 1, 3, 0]


def test_classes_share_by_their_weights_whatever_the_number_of_tenants():
    q, _ = queue(interactive_head_start_ms=0.0)
    for n in range(1_000):
        q.push(item(n, f"t{n % 50}", "batch"))
        q.push(item(1_000 + n, "one", "interactive"))
    served = {"batch": 0, "interactive": 0}
    for _ in range(500):
        head = q.head((), 0)
        served[head.service_class] += 1
        q.serve(head, 1.0)
    assert 395 <= served["interactive"] <= 405


def test_the_head_start_is_had_once_and_again_after_batch_had_its_share():
    q, _ = queue(interactive_head_start_ms=100.0)
    for n in range(1_000):
        q.push(item(n, "a", "interactive"))
    waits = []
    for n in range(20):
        q.push(item(2_000 + n, "b", "batch"))
        served = 0
        while True:
            head = q.head((), 0)
            q.serve(head, 1.0)
            if head.service_class == "batch":
                break
            served += 1
        waits.append(served)
    assert 96 <= waits[0] <= 104, "ahead by the head start"
    assert max(waits[1:]) <= 8, "and by no more, however batch comes"
    lone, _ = queue(interactive_head_start_ms=100.0)
    for n in range(1_000):
        lone.push(item(n, "b", "batch"))
    for n in range(50):
        for _ in range(10):
            assert lone.head((), 0).service_class == "batch"
            lone.serve(lone.head((), 0), 1.0)
        lone.push(item(2_000 + n, "a", "interactive"))
        assert lone.head((), 0).service_class == "interactive", "below its share it goes at once"
        lone.serve(lone.head((), 0), 1.0)


def test_who_waits_for_its_time_lets_others_pass_and_is_ready_when_said():
    q, shaper = queue({"slow": TenantConfig(requests_per_s_max=10.0)})
    for n in range(3):
        q.push(item(n, "slow"))
        q.push(item(10 + n, "fast"))
    order, now = [], 1_000
    while len(q):
        head = q.head((), now)
        if head is None:
            ready_ms = q.next_ready_ms(now)
            assert now < ready_ms < math.inf
            assert q.head((), ready_ms - 1) is None
            now = ready_ms
            continue
        shaper.charge(head.tenant, 1.0, now, q.serve(head, 1.0))
        order.append((head.work[1], now))
    assert [n for n, _ in order] == [10, 11, 12, 0, 1, 2]
    assert [at for n, at in order if n < 10] == [1_001, 1_101, 1_201]
    assert q.next_ready_ms(now) == math.inf


def test_a_paused_tenant_waits_until_it_is_steered():
    tenants = {"a": TenantConfig(paused=True)}
    q, shaper = queue(tenants)
    tenants = shaper._settings
    q.push(item(0, "a"))
    q.push(item(1, "b"))
    assert serve_all(q) == [1]
    assert q.next_ready_ms(0) == math.inf
    del tenants["a"]
    shaper.steered(0)
    q.steered()
    assert serve_all(q) == [0]
    q.push(item(2, "a"))
    assert serve_all(q) == [2]
    tenants["a"] = TenantConfig(paused=True)
    q.push(item(3, "a"))
    shaper.steered(0)
    q.steered()
    assert serve_all(q) == []
    assert len(q) == 1


def test_a_steered_weight_counts_from_the_next_request_on():
    q, shaper = queue({"a": 1.0, "b": 1.0})
    for n in range(100):
        q.push(item(n, "a"))
        q.push(item(100 + n, "b"))
    shaper._settings["a"] = TenantConfig(weight=3.0)
    shaper.steered(0)
    q.steered()
    tenants = [q.head((), 0).tenant for _ in range(40) if q.serve(q.head((), 0), 1.0) is not None]
    assert 28 <= tenants.count("a") <= 32


def test_a_cell_in_debt_lends_nothing_and_keeps_what_is_guaranteed():
    q, shaper = queue({"sure": TenantConfig(requests_per_s=10.0)}, CellConfig(requests_per_s_max=20.0))
    now = 0
    q.head((), now)
    shaper.band("sure", now)
    shaper.charge("other", 1.0, now, Band.BORROWING)
    for n in range(4):
        q.push(item(n, "sure"))
        q.push(item(10 + n, "other"))
    assert q.head((), 0) is None
    assert q.next_ready_ms(0) == 1, "its guarantee begins to fill"
    assert q.head((), 1).tenant == "sure"
    shaper.charge("sure", 1.0, 1, q.serve(q.head((), 1), 1.0))
    assert q.head((), 1) is None
    assert q.next_ready_ms(1) == 101
    assert [q.head((), 101).tenant, q.serve(q.head((), 101), 1.0)] == ["sure", Band.GUARANTEED]


def test_how_many_stand_before_a_request():
    q, _ = queue({"heavy": 4.0}, interactive_head_start_ms=0.0)
    items = [item(n, "a") for n in range(20)] + [item(100 + n, "heavy") for n in range(100)]
    for one in items:
        q.push(one)
    for _ in range(10):  # now it knows what a request costs
        q.serve(q.head((), 0), 1.0)
    told = {one.work[1]: q.ahead(one) for one in items}
    order = serve_all(q)
    for place, n in enumerate(order):
        assert abs(told[n] - place) <= 6, n
    alone, _ = queue()
    for n in range(5):
        alone.push(item(n, "a", deadline_ms=100 - n, demand=ANY if n % 2 else OTHER))
    assert [alone.ahead(item(n, "a")) for n in range(1)] == [5], "not in line: behind all of its tenant"


def test_inside_a_tenant_the_number_that_stand_before_is_exact():
    q, _ = queue()
    items = [item(n, "a", deadline_ms=(n * 7) % 10 * 100, demand=ANY if n % 2 else OTHER) for n in range(10)]
    for one in items:
        q.push(one)
    told = {one.work[1]: q.ahead(one) for one in items}
    assert [told[n] for n in serve_all(q)] == list(range(10))


def test_batch_counts_those_of_interactive_before_it():
    q, _ = queue(interactive_head_start_ms=0.0)
    one = item(0, "a")
    q.push(one)
    for n in range(1, 5):
        q.push(item(n, "b", "interactive"))
    assert 1 <= q.ahead(one) <= 4
    patient, _ = queue(interactive_head_start_ms=1_000.0)
    patient.push(one)
    for n in range(1, 50):
        patient.push(item(n, "b", "interactive"))
        patient.serve(patient.head((), 0), 1.0)
        patient.push(item(50 + n, "b", "interactive"))
    assert patient.ahead(one) >= 40


def test_tenants_that_are_gone_take_no_room(monkeypatch):
    monkeypatch.setattr(turns, "IDLE_MAX", 100)
    monkeypatch.setattr(turns, "SPARE", 50)
    q, shaper = queue()
    q.push(item(0, "stays", demand=OTHER))  # so that the class is never empty
    for n in range(1, 3_000):
        q.push(item(n, f"t{n}"))
        head = q.head({("batch", OTHER)}, 0)
        shaper.charge(head.tenant, 1.0, 0, q.serve(head, 1.0))
    assert len(q._batch.turns.tenants) <= 2 * 100 + 2 * 50
    assert shaper._tenants == {}
    (line,) = q._batch.turns.lines.values()
    assert len(line.heaps[Band.BORROWING]) <= 2 + 50


def test_tags_begin_anew_before_they_lose_precision(monkeypatch):
    monkeypatch.setattr(turns, "TAG_MAX", 100.0)
    q, _ = queue()
    for round_ in range(10):
        for n in range(50):
            q.push(item(round_ * 50 + n, "ab"[n % 2]))
        serve_all(q)
    assert max(q._batch.turns.virtual) <= 100.0


@pytest.mark.parametrize("interactive", [False, True])
def test_a_prediction_that_was_far_too_high_makes_no_newcomer_wait(interactive):
    q, _ = queue(interactive_head_start_ms=0.0)
    for n in range(100):
        q.push(item(n, "giant"))
    for _ in range(10):
        q.serve(q.head((), 0), 60_000.0)
    for n in range(100, 200):
        q.push(item(n, "new", service_class="interactive" if interactive else "batch"))
    for _ in range(10):
        q.correct("batch", "giant", -59_900.0, Band.BORROWING)
    served = []
    for _ in range(20):
        head = q.head((), 0)
        q.serve(head, 100.0)
        served.append(head.tenant)
    assert served.count("new") >= 9
