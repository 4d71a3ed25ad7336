"""Start-time fair queueing: the published bound between backlogged tenants, no loss, order inside a tenant."""

from hypothesis import given
from hypothesis import strategies as st

from broker.transport.protocol import TopicPartition
from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.item import NEVER_MS, Demand, Item
from schemas.messages import Envelope

ANY = Demand("auto", "auto", "any")
OTHER = Demand("other", "auto", "any")
SOURCE = TopicPartition("requests", 0)


def item(n, tenant, cost=1.0, service_class="batch", demand=ANY, deadline_ms=NEVER_MS):
    envelope = Envelope(id=f"r{n}", tenant=tenant, service_class=service_class, origin=("requests", 0, n), received_at_ms=n)
    return Item((SOURCE, n), envelope, demand, cost, 0, deadline_ms, b"", ())


def queue(weights=None, classes=None):
    return FairQueue((classes or {"interactive": 4.0, "batch": 1.0}).__getitem__, lambda t: (weights or {}).get(t, 1.0))


costs = st.floats(1, 1_000)


@given(
    st.lists(st.tuples(costs, costs), min_size=10, max_size=200),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_backlogged_tenants_stay_within_the_bound(pairs, weight_a, weight_b):
    weights = {"a": weight_a, "b": weight_b}
    q = queue(weights)
    for n, (cost_a, cost_b) in enumerate(pairs):
        q.push(item(2 * n, "a", cost_a))
        q.push(item(2 * n + 1, "b", cost_b))
    largest = {"a": max(c for c, _ in pairs), "b": max(c for _, c in pairs)}
    bound = largest["a"] / weight_a + largest["b"] / weight_b
    served, left = {"a": 0.0, "b": 0.0}, {"a": len(pairs), "b": len(pairs)}
    while all(left.values()):
        head = q.head()
        q.serve(head)
        served[head.tenant] += head.cost / weights[head.tenant]
        left[head.tenant] -= 1
        assert abs(served["a"] - served["b"]) <= bound * (1 + 1e-9)


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), costs, st.sampled_from(["interactive", "batch"]), st.booleans()), max_size=150)
)
def test_everything_that_went_in_comes_out_once(requests):
    q = queue()
    for n, (tenant, cost, service_class, other) in enumerate(requests):
        q.push(item(n, tenant, cost, service_class, OTHER if other else ANY))
    out = []
    while (head := q.head()) is not None:
        q.serve(head)
        out.append(head.work[1])
    assert sorted(out) == list(range(len(requests)))
    assert len(q) == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans(), st.booleans()), max_size=60),
    st.integers(0, 60),
)
def test_a_sweep_changes_nobodys_turn(requests, served):
    """Each request: tenant, other demand, interactive, dropped. One queue is swept, the other passes the dropped over."""
    swept, plain = queue(), queue()
    for n, (tenant, other, interactive, _) in enumerate(requests):
        for q in (swept, plain):
            q.push(item(n, tenant, 1 + n % 3, "interactive" if interactive else "batch", OTHER if other else ANY))
    orders = []
    for q in (swept, plain):
        order = []
        for n in range(len(requests)):
            if n == served:
                for group in q._classes.values():
                    for line in group.lines.values():
                        for waiting in line.waiting.values():
                            for *_, one in waiting:
                                one.dropped = requests[one.work[1]][3]
                if q is swept:
                    q.sweep()
            while (head := q.head()) is not None and head.dropped:
                q.discard(head)
            if head is None:
                break
            q.serve(head)
            order.append(head.work[1])
        orders.append(order)
        assert len(q) == 0 or served >= len(requests)
    assert orders[0] == orders[1]


def test_a_blocked_demand_stands_in_nobodys_way_and_keeps_its_place():
    q = queue()
    for n in range(4):
        q.push(item(n, "a", demand=ANY if n % 2 else OTHER))
    served = []
    while (head := q.head({OTHER})) is not None:
        q.serve(head)
        served.append(head.work[1])
    assert served == [1, 3]
    assert q.head().work[1] == 0


def test_an_idle_tenant_saves_nothing_up():
    q = queue()
    for n in range(100):
        q.push(item(n, "busy"))
    for _ in range(50):
        q.serve(q.head())
    for n in range(100, 150):
        q.push(item(n, "late"))
    order = []
    for _ in range(20):
        order.append(q.head().tenant)
        q.serve(q.head())
    assert 9 <= order.count("late") <= 11


def test_the_nearest_deadline_of_a_tenant_goes_first():
    q = queue()
    q.push(item(0, "a"))
    q.push(item(1, "a", deadline_ms=500))
    q.push(item(2, "a", deadline_ms=100))
    order = []
    while (head := q.head()) is not None:
        q.serve(head)
        order.append(head.work[1])
    assert order == [2, 1, 0]


def test_classes_share_by_their_weights_whatever_the_number_of_tenants():
    q = queue()
    for n in range(1_000):
        q.push(item(n, f"t{n % 50}", service_class="batch"))
        q.push(item(1_000 + n, "one", service_class="interactive"))
    served = {"batch": 0, "interactive": 0}
    for _ in range(500):
        head = q.head()
        served[head.service_class] += 1
        q.serve(head)
    assert 395 <= served["interactive"] <= 405
