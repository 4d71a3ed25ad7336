"""Routing over random fleets and requests: the fast way and the full one agree, and nobody waits beside an idle engine."""

from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import NOW, STALE_MS, Plain, World

from dispatcher.core.fleet import BUSY_MS
from dispatcher.core.item import NEVER_MS, Excluded
from dispatcher.core.routing import engine_filter, plugins, scorer
from schemas import parse_config
from schemas.errors import ErrorCode
from schemas.messages import Completion
from schemas.policy import FILTERS, SCORERS, PoolSettings

POOLS = ("a", "b", "c", "d")
ENGINES = {
    "a": {"kind": "transformer", "model": "one", "aliases": ["first"]},
    "b": {"kind": "ssm", "model": "two"},
    "c": {"kind": "moe", "model": "three", "tokens_per_s_max": 5.0},
    "d": {"kind": "ssm", "model": "one"},
    "e": {"kind": "transformer", "backend": "sim", "model": "two"},
}
NAMES = {"aliases": {"chat": "class"}, "equivalents": {"class": ["one", "three"]}}


def odd_workers(request, candidate, context):  # noqa: ARG001
    """It depends on request and worker, so each is asked."""
    return 40.0 if (int(request.input_tokens) + int(candidate.worker.status.worker[1:])) % 2 else 0.0


def dear_pools(request, candidate, context):  # noqa: ARG001
    """It depends on request and pool."""
    return 30.0 if candidate.pool.name == "a" and request.max_output_tokens > 50 else -5.0


def no_third(request, pool, worker, context):  # noqa: ARG001
    """It is asked for each request."""
    return "third" if worker.status.worker == "w3" and request.input_tokens < 500 else None


def setup_module():
    scorer("odd_workers")(odd_workers)
    scorer("dear_pools", per="pool")(dear_pools)
    engine_filter("no_third")(no_third)


def teardown_module():
    for kind, name in (("scorer", "odd_workers"), ("scorer", "dear_pools"), ("filter", "no_third")):
        del plugins._known[kind][name]


ALL_PLUGINS = {
    "filters": [*FILTERS, "no_third"],
    "scorers": dict.fromkeys(SCORERS, 1.0) | {"odd_workers": 1.5, "dear_pools": 1.0},
    "preferred_load_max": 0.5,
}
CONFIGS = {
    "plain": parse_config({"engines": ENGINES, **NAMES}),
    "costly": parse_config({"engines": ENGINES, **NAMES, "routing": ALL_PLUGINS}),
}
few = st.integers(0, 3)
tokens = st.sampled_from([10, 100, 500, 5_000, 40_000])
statuses = st.fixed_dictionaries(
    {
        "pool": st.sampled_from(POOLS),
        "worker": st.sampled_from(["w1", "w2", "w3"]),
        "age": st.sampled_from([0, 100, STALE_MS, STALE_MS + 1]),
        "epoch": st.integers(1, 2),
        "slots": st.integers(1, 4),
        "running": few,
        "queue_depth": few,
        "batch_load": few,
        "interactive_slots": st.integers(0, 1),
        "is_healthy": st.sampled_from([True, True, True, False]),
        "max_context": st.sampled_from([None, 4_096, 65_536]),
        "trained_context": st.sampled_from([None, 2_048]),
        "features": st.sampled_from([[], ["chat"], ["chat", "seed"]]),
        "kv_cache_usage": st.sampled_from([None, 0.5, 0.95]),
        "gpu_temperature_c": st.sampled_from([None, 70.0, 84.0, 99.0]),
        "avg_latency_ms": st.sampled_from([None, 20.0, 900.0]),
    }
)
asked = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["auto", "one", "first", "two", "three", "chat"]),
        "hint": st.sampled_from(["auto", "auto", "ssm", "moe", "sim"]),
        "fallback": st.sampled_from(["any", "same_model", "none"]),
        "service_class": st.sampled_from(["interactive", "batch"]),
        "input_tokens": tokens.map(float),
        "max_output_tokens": st.sampled_from([1, 20, 90]),
        "slo_ms": st.sampled_from([None, 50, 400]),
        "deadline_ms": st.sampled_from([NEVER_MS, NOW + 30, NOW + 5_000]),
        "features": st.sampled_from([(), ("seed",)]),
        "excluded": st.lists(
            st.builds(Excluded, st.sampled_from(POOLS), st.integers(1, 2), st.sampled_from(["w1", "w2", None])),
            max_size=2,
            unique_by=lambda one: one.pool,
        ).map(tuple),
    }
)
events = st.one_of(
    st.tuples(st.just("asked"), asked),
    st.tuples(st.just("asked"), asked),
    st.tuples(st.just("seen"), statuses),
    st.tuples(st.just("failed"), st.sampled_from(POOLS)),
    st.tuples(st.just("later"), st.sampled_from([1, 50, 2_500])),
    st.tuples(st.just("paused"), st.sets(st.sampled_from(POOLS), max_size=1)),
    st.tuples(st.just("used_up"), st.booleans()),
)


def seen(world, now, pool, worker, age, **fields):
    one = world.status(pool, worker, partitions=[int(worker[1:])], updated_at_ms=now, **fields)
    world.see(one, now - age)


def failed(world, now, pool):
    for worker in world.fleet.workers(pool):
        for _ in range(5):
            world.router.completed(pool, worker.status.worker, worker.status.epoch, ErrorCode.INTERNAL, now)


def asked_for(world, now, what):
    item = world.item(**what)
    view = world.router.explain(item, now)
    assert view == world.router.explain(item, now), "explaining changes nothing"
    choice = world.router.pick(item, now)
    if choice is None:
        assert view.pool is None
        return
    name = choice.worker.status.worker
    assert (choice.pool, name, choice.placement) == (view.pool, view.worker, view.placement)
    if choice.worker.key(item.service_class) >= BUSY_MS and item.deadline_ms == NEVER_MS:
        free = [one.worker for pool in view.pools for one in pool.workers if one.passes and one.room == "free"]
        assert not free, "it waits while another that may serve it stands idle"
    (tier,) = [pool.tier for pool in view.pools if pool.pool == choice.pool]
    assert choice.placement.stands_in is (tier != "serves")
    world.send(choice, item.service_class)


@given(st.sampled_from(sorted(CONFIGS)), st.lists(statuses, min_size=2, max_size=8), st.lists(events, max_size=25))
@settings(deadline=None)
def test_the_fast_choice_is_the_one_that_is_explained(config, fleet, history):
    world = World(config=CONFIGS[config], predictor=Plain(a=1.0, b=2.0, c=0.5, d=4.0))
    now = NOW
    for one in fleet:
        seen(world, now, **one)
    for kind, what in history:
        if kind == "asked":
            asked_for(world, now, what)
        elif kind == "seen":
            seen(world, now, **what)
        elif kind == "failed":
            failed(world, now, what)
        elif kind == "later":
            now += what
        elif kind == "paused":
            world.router.steer({pool: PoolSettings(paused=True) for pool in what})
        else:
            world.rates.used_up = {"c": now + 40} if what else {}


@given(st.lists(statuses, min_size=4, max_size=8), asked)
@settings(deadline=None)
def test_what_an_explanation_adds_up_is_what_is_compared(fleet, what):
    world = World(config=CONFIGS["costly"], predictor=Plain(a=1.0, b=2.0, c=0.5, d=4.0))
    for one in fleet:
        seen(world, NOW, **one)
    for pool in world.router.explain(world.item(**what), NOW).pools:
        for one in pool.workers:
            total = sum(max(score.value_ms, 0.0) * score.weight for score in one.scores.values())
            assert abs(total - one.cost_ms) <= 1e-6 * max(total, 1.0)


def test_completions_of_many_workers_do_not_trip_those_that_work():
    world = World(config=CONFIGS["plain"])
    for n in (1, 2):
        done = [Completion(n, k, 1, 1, 0.0, None, 1.0, code=ErrorCode.INTERNAL if n == 1 else None) for k in range(50)]
        world.see(world.status("a", f"w{n}", partitions=[n], completed=51, completions=done))
    assert {world.pick(model="first", fallback="none").worker.status.worker for _ in range(3)} == {"w2"}
