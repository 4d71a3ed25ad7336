"""Plugins of routing: how one is registered, found, loaded and asked."""

import sys

import pytest
from routing_world import NOW, World

from deploy.cli.check import of_routing
from dispatcher.core.fleet import Fleet
from dispatcher.core.routing import builtin, engine_filter, plugins, preference, scorer
from dispatcher.core.routing.plugins import Candidate, Question
from dispatcher.plugins import load_plugins, ready_plugins
from schemas import ConfigError, parse_config
from schemas.policy import FILTERS, PREFERENCES, SCORERS, PoolSettings, RoutingConfig


@pytest.fixture(autouse=True)
def as_before():
    """What a test registers is gone after it."""
    before = {kind: dict(known) for kind, known in plugins._known.items()}
    yield
    plugins._known.update(before)


def routing_of(**fields):
    return parse_config({"routing": fields}).routing


# -- the registry -----------------------------------------------------------------------------------------------------------


def test_the_default_configuration_names_the_plugins_there_are():
    assert set(plugins.known("filter")) == set(FILTERS)
    assert set(plugins.known("preference")) == set(PREFERENCES)
    assert set(plugins.known("scorer")) == set(SCORERS)
    plugins.check(RoutingConfig())
    assert all(one.said for kind in ("filter", "preference", "scorer") for one in plugins.known(kind).values())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"filters": ["model", "modle"]}, "`routing.filters`: no filter 'modle' is registered: known are breaker, context, "),
        ({"preferences": ["cheap"]}, "`routing.preferences`: no preference 'cheap' is registered: known are hint, long_context"),
        ({"scorers": {"wait": 1, "cost": 1}}, "`routing.scorers`: no scorer 'cost' is registered: known are memory_pressure, "),
    ],
)
def test_a_name_that_is_not_known_stops_the_start_with_those_that_are(fields, said):
    with pytest.raises(ConfigError) as caught:
        ready_plugins(routing_of(**fields))
    assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError):
        World(routing=fields)


def test_two_of_one_name_are_refused_and_the_same_one_again_is_not():
    def cheap(request, candidate, context):  # noqa: ARG001
        return 0.0

    scorer("cheap")(cheap)
    scorer("cheap")(cheap)
    with pytest.raises(ConfigError, match="two scorers are named 'wait'"):
        scorer("wait")(cheap)


def test_a_module_brings_a_scorer_in_a_few_lines(tmp_path, monkeypatch):
    (tmp_path / "night_rates.py").write_text(
        "from dispatcher.core.routing import scorer\n\n"
        '@scorer("night_rate")\n'
        "def night_rate(request, candidate, context):\n"
        '    return 500.0 if candidate.pool.name == "llama" else 0.0\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    fields = {"plugins": ["night_rates"], "scorers": {"run": 1, "night_rate": 2}}
    ready_plugins(routing_of(**fields))
    world = World(routing=fields).all()
    assert world.where() == "mamba"
    view = world.router.explain(world.item(), NOW)
    assert view.pools[0].workers[0].scores["night_rate"].value_ms == 500.0
    assert view.pools[0].workers[0].cost_ms == 1_011.0
    del sys.modules["night_rates"]


@pytest.mark.parametrize(("text", "said"), [("import nothing_of_that_name", "No module named"), ("1 / 0", "division by zero")])
def test_a_module_that_cannot_be_loaded_is_told_in_one_line(tmp_path, monkeypatch, text, said):
    (tmp_path / "broken_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_plugins(["json", "broken_plugin"])
    assert str(caught.value).startswith(f"`routing.plugins[1]`: cannot import 'broken_plugin': {said}")
    assert "\n" not in str(caught.value)


def test_check_lists_what_is_used_in_its_order_and_what_is_not():
    config = parse_config({"routing": {"preferences": ["low_latency", "hint"], "scorers": {"run": 1, "wait": 0.5}}})
    found = {one.subject: one.said for one in of_routing(config)}
    assert found == {
        "routing.filters": "model, context, features, healthy, fresh, untried, unpaused, rate, breaker",
        "routing.preferences": "low_latency, hint; not used: long_context",
        "routing.scorers": "run x 1, wait x 0.5; not used: memory_pressure, slo, temperature, untrained_context",
    }
    (wrong,) = of_routing(parse_config({"routing": {"plugins": ["no_such_module"]}}))
    assert (wrong.verdict, wrong.subject) == ("error", "routing")
    assert wrong.said.startswith("`routing.plugins[0]`: cannot import")


# -- filters ----------------------------------------------------------------------------------------------------------------


def why_not(name, world, pool="llama", item=None, **question):
    item = item or world.item()
    one, context = plugins.known("filter")[name], world.router.context
    ranks = world.router.catalog.ranks(item.demand)
    plain = Question(item.demand, ranks, context_max=0, has_features=True, passed_over={}, reach={})
    context.question, context.now_ms = plain._replace(**question), NOW
    worker = next(iter(world.fleet.workers(pool)))
    return one.ask(item.demand if one.per == "demand" else item, world.router.catalog.pools[pool], worker, context)


def test_each_filter_says_why_not():
    world = World().all(max_context=4_096, features=["chat"])
    assert [why_not(name, world) for name in FILTERS] == [None] * len(FILTERS)
    other = world.item(model="mamba", fallback="none")
    assert why_not("model", world, item=other) == "serves llama, and may not stand in"
    long = world.item(input_tokens=9_000.0)
    assert why_not("context", world, item=long, context_max=65_536) == "takes 4096 tokens"
    assert why_not("context", world, item=long, context_max=4_096) is None
    seeded = world.item(features=("chat", "seed", "stop"))
    assert why_not("features", world, item=seeded) == "has no seed, stop"
    assert why_not("features", world, item=seeded, has_features=False) is None
    world.rates.used_up = {"llama": NOW + 1}
    assert why_not("rate", world) == "its rate is used up"
    world.router.steer({"llama": PoolSettings(paused=True)})
    assert why_not("unpaused", world) == "is paused"
    assert why_not("unpaused", world, pool="mamba") is None
    world.see(world.status("llama", is_healthy=False, updated_at_ms=NOW + 1))
    assert why_not("healthy", world) == "says that it is not well"
    world.fleet.settle(NOW + 60_000)
    assert why_not("fresh", world) == "was not heard of lately"


def test_what_an_engine_does_not_tell_is_no_reason_against_it():
    world = World().all()
    assert why_not("context", world, item=world.item(input_tokens=1e6), context_max=65_536) is None
    assert why_not("features", world, item=world.item(features=("seed",))) is None


def test_a_filter_that_is_not_configured_is_not_asked():
    world = World(routing={"filters": ["model"]}).all(is_healthy=False)
    assert world.where(NOW + 60_000) == "llama"
    world = World(routing={"filters": []}).all()
    assert {world.where(model="mamba", fallback="none")} == {"llama"}, "nothing keeps it from another model"


def test_a_filter_of_ones_own_is_asked_for_each_request():
    asked = []

    @engine_filter("no_long_answers")
    def no_long_answers(request, pool, worker, context):  # noqa: ARG001
        asked.append(pool.name)
        return "is for short answers" if pool.name == "llama" and request.max_output_tokens > 100 else None

    world = World(routing={"filters": [*FILTERS, "no_long_answers"]}).all()
    assert world.where() == "llama"
    assert world.where(max_output_tokens=200) == "mamba"
    assert len(asked) == 6
    view = world.router.explain(world.item(max_output_tokens=200), NOW)
    assert view.pools[0].workers[0].filters["no_long_answers"] == "is for short answers"


# -- preferences ------------------------------------------------------------------------------------------------------------


def test_a_preference_of_ones_own_comes_where_it_is_configured():
    @preference("acme_on_ssm")
    def acme_on_ssm(request, context):  # noqa: ARG001
        return "ssm" if request.tenant == "t" else None

    world = World(routing={"preferences": ["acme_on_ssm", "hint"]}).all()
    choice = world.pick(hint="moe")
    assert (choice.pool, choice.placement.reason) == ("mamba", "acme_on_ssm")
    view = world.router.explain(world.item(hint="moe"), NOW)
    assert view.preferences == {"acme_on_ssm": "ssm", "hint": "moe"}


# -- scorers ----------------------------------------------------------------------------------------------------------------


def snapshot_cost(scorer_of, **fields):
    world = World()
    status = world.status("llama", **fields)
    fleet = Fleet(1.5, 3_000)
    fleet.seen(status, NOW)
    return scorer_of(fleet.pool("llama").workers["w1"], world.router.context)


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 0.0),
        ({"gpu_mem_used_bytes": 85, "gpu_mem_total_bytes": 100}, 0.0),
        ({"gpu_mem_used_bytes": 91, "gpu_mem_total_bytes": 100}, 800.0),
        ({"gpu_mem_used_bytes": 91}, 0.0),
        ({"kv_cache_usage": 0.97, "gpu_mem_used_bytes": 91, "gpu_mem_total_bytes": 100}, 1_600.0),
        ({"kv_cache_usage": 1.5}, 2_000.0),
    ],
)
def test_memory_costs_once_it_is_nearly_full(fields, cost):
    assert snapshot_cost(builtin.memory_pressure, **fields) == pytest.approx(cost)


@pytest.mark.parametrize(("celsius", "cost"), [(None, 0), (20, 0), (80, 0), (85, 1_000), (90, 2_000), (120, 2_000)])
def test_heat_costs_between_two_temperatures(celsius, cost):
    assert snapshot_cost(builtin.temperature, gpu_temperature_c=celsius) == cost


def test_what_a_request_costs_is_told_piece_by_piece():
    world = World()
    world.see(world.status("llama", trained_context=1_000, running=3, avg_latency_ms=100.0))
    item = world.item(input_tokens=2_000.0, slo_ms=60)
    (worker,) = world.fleet.workers("llama")
    candidate = Candidate(world.router.catalog.pools["llama"], worker, 100.0, world.router.predict(item, worker))
    context = world.router.context
    context.now_ms = NOW + 5
    said = {
        name: plugins.known("scorer")[name].ask(item, candidate, context) for name in ("wait", "run", "slo", "untrained_context")
    }
    assert said == {"wait": 100.0, "run": 30.0, "slo": 75.0, "untrained_context": 5_000.0}
    view = world.router.explain(item, NOW + 5)
    (seen,) = next(pool for pool in view.pools if pool.pool == "llama").workers
    assert seen.cost_ms == 100.0 + 30.0 + 5 * 75.0 + 5_000.0
    assert (seen.room, seen.load, seen.limit, view.cost_ms) == ("full", 3, 3, None)


def test_a_hot_or_full_worker_is_avoided_while_a_like_one_has_a_free_slot():
    world = World()
    world.see(world.status("llama", "w1", gpu_temperature_c=85.0))
    world.see(world.status("llama", "w2", partitions=[1], running=1))
    world.see(world.status("llama", "w3", partitions=[2], kv_cache_usage=0.99))
    assert world.pick().worker.status.worker == "w2"
    world.fill("llama", 1, partition=1)
    assert world.pick().worker.status.worker == "w1", "it is hot, and yet it is idle"


def test_costs_below_nothing_and_no_numbers_count_as_nothing():
    @scorer("odd", per="pool")
    def odd(request, candidate, context):  # noqa: ARG001
        return {"llama": float("nan"), "mamba": -1e9}.get(candidate.pool.name, 1.0)

    world = World(routing={"scorers": {"run": 1, "odd": 1}}).all()
    assert world.where() == "llama"
    world.see(world.status("llama", is_healthy=False, updated_at_ms=NOW + 1))
    assert world.where() == "mamba"


def test_no_cost_however_great_makes_an_idle_worker_look_busy_or_full():
    @scorer("huge", per="snapshot")
    def huge(worker, context):  # noqa: ARG001
        return float("inf")

    @scorer("huge_too")
    def huge_too(request, candidate, context):  # noqa: ARG001
        return 1e300

    dear = {"huge": 1_000_000, "huge_too": 1_000_000, "memory_pressure": 1_000_000}
    world = World(routing={"scorers": dear}).all(kv_cache_usage=1.0)
    world.fill("llama", 2)
    assert world.where(hint="transformer") == "mamba"
    assert world.router.explain(world.item(), NOW).pool == "mamba"
