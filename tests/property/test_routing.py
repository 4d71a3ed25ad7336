"""Routing over random fleets and requests: the fast way and the full one agree, and nobody waits beside an idle engine."""

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import NOW, STALE_MS, Plain, World

from dispatcher.core.fleet import BUSY_MS
from dispatcher.core.item import NEVER_MS, Excluded
from dispatcher.core.routing import Explanation, engine_filter, plugins, scorer
from schemas import parse_config
from schemas.errors import ErrorCode
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
SETTINGS = PoolSettings(tokens_per_s_max=5.0)
TOKENS = [10, 100, 500, 5_000, 40_000]


def some_status(dice):
    slots = dice.randint(1, 5)
    return {
        "pool": dice.choice(POOLS),
        "worker": dice.choice(["w1", "w2", "w3"]),
        "age": dice.choice([0, 0, 100, STALE_MS]),
        "epoch": dice.choice([1, 1, 1, 2]),
        "slots": slots,
        "running": dice.randint(0, slots),
        "queue_depth": dice.choice([0, 0, 0, 1, 2]),
        "batch_load": dice.randint(0, slots),
        "interactive_slots": dice.randint(0, 1),
        "is_healthy": dice.random() < 0.95,
        "max_context": dice.choice([None, 65_536, 65_536, 4_096]),
        "trained_context": dice.choice([None, None, 2_048]),
        "features": dice.choice([[], ["chat", "seed"], ["chat"]]),
        "kv_cache_usage": dice.choice([None, 0.5, 0.9, 0.95]),
        "gpu_temperature_c": dice.choice([None, 70.0, 84.0, 99.0]),
        "avg_latency_ms": dice.choice([None, 20.0, 900.0]),
    }


def some_request(dice):
    pools = dice.sample(POOLS, dice.choice([0, 0, 0, 1, 2]))
    return {
        "model": dice.choice(["auto", "auto", "one", "first", "two", "three", "chat"]),
        "hint": dice.choice(["auto", "auto", "auto", "ssm", "moe", "sim"]),
        "fallback": dice.choice(["any", "any", "same_model", "none"]),
        "service_class": dice.choice(["interactive", "batch"]),
        "input_tokens": float(dice.choice(TOKENS)),
        "max_output_tokens": dice.choice([1, 20, 90]),
        "slo_ms": dice.choice([None, None, 50, 400]),
        "deadline_ms": dice.choice([NEVER_MS, NEVER_MS, NOW + 30, NOW + 5_000]),
        "features": dice.choice([(), (), ("seed",)]),
        "excluded": tuple(Excluded(pool, dice.randint(1, 2), dice.choice(["w1", "w2", None])) for pool in pools),
    }


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


def step(world, now, dice):
    """Something happens; gives the time after it."""
    what = dice.random()
    if what < 0.70:
        asked_for(world, now, some_request(dice))
    elif what < 0.85:
        seen(world, now, **some_status(dice))
    elif what < 0.89:
        failed(world, now, dice.choice(POOLS))
    elif what < 0.95:
        return now + dice.choice([1, 50, 1_000])
    elif what < 0.97:
        world.router.steer({"c": SETTINGS} | {pool: PoolSettings(paused=True) for pool in dice.sample(POOLS, dice.randint(0, 1))})
    else:
        world.rates.used_up = {"c": now + 40} if dice.random() < 0.5 else {}
    return now


@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 2**32))
@settings(deadline=None)
def test_the_fast_choice_is_the_one_that_is_explained(config, seed):
    world, now, dice = World(config=CONFIGS[config], predictor=Plain(a=1.0, b=2.0, c=0.5, d=4.0)), NOW, random.Random(seed)
    for _ in range(8):
        seen(world, now, **some_status(dice))
    for _ in range(60):
        now = step(world, now, dice)


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_what_an_explanation_adds_up_is_what_is_compared(seed):
    world, dice = World(config=CONFIGS["costly"], predictor=Plain(a=1.0, b=2.0, c=0.5, d=4.0)), random.Random(seed)
    for _ in range(8):
        seen(world, NOW, **some_status(dice))
    view = world.router.explain(world.item(**some_request(dice)), NOW)
    assert msgspec.json.decode(msgspec.json.encode(view), type=Explanation) == view
    for pool in view.pools:
        for one in pool.workers:
            total = sum(max(score.value_ms, 0.0) * score.weight for score in one.scores.values())
            assert abs(total - one.cost_ms) <= 1e-6 * max(total, 1.0)
