"""The default policy: who takes what, in which order, and what the result says of it."""

import pytest
from routing_world import ENGINES, NOW, STALE_MS, Plain, World

from dispatcher.core.item import Excluded
from schemas import ErrorInfo, InferenceRequest, RouteAttempt, Sampling
from schemas.errors import ErrorCode
from schemas.features import needed
from schemas.formats import OutputFormat
from schemas.messages import Completion, Placement
from schemas.policy import PoolSettings


def said(choice):
    placed = choice.placement
    return choice.pool, placed.reason, placed.wanted, placed.why_not, placed.stands_in


# -- the policy ------------------------------------------------------------------------------------------------------------


def test_without_a_preference_the_least_cost_decides():
    world = World(predictor=Plain(llama=3.0, mamba=2.0, mixtral=1.0)).all()
    choice = world.pick()
    assert said(choice) == ("mixtral", "least_cost", None, None, False)
    assert (choice.prediction.run_ms, choice.cost_ms) == (11.0, 5.5), "a run takes one of two slots"
    assert (choice.placement.predicted_ttft_ms, choice.placement.predicted_ms) == (1, 11)


def test_a_hint_is_followed_while_there_is_room_whatever_it_costs():
    world = World(predictor=Plain(mamba=50.0)).all()
    for _ in range(2):
        choice = world.pick(hint="ssm")
        assert said(choice) == ("mamba", "hint", None, None, False)
        world.send(choice)
    assert said(world.pick(hint="ssm")) == ("llama", "least_cost", "ssm", "full", False)


def test_a_long_prompt_goes_to_the_engine_for_long_contexts_as_far_as_that_was_trained():
    world = World().all()
    assert said(world.pick(input_tokens=40_000.0)) == ("mamba", "long_context", None, None, False)
    assert world.pick(input_tokens=30_000.0).placement.reason == "least_cost"
    for limits in ({"trained_context": 8_192}, {"max_context": 32_768}):
        world = World().all()
        world.see(world.status("mamba", updated_at_ms=NOW + 1, **limits))
        choice = world.pick(input_tokens=40_000.0)
        assert (choice.pool, choice.placement.wanted) == ("llama", None)


def test_a_short_wish_goes_to_the_engine_for_low_latency():
    world = World().all()
    assert said(world.pick(slo_ms=50)) == ("mixtral", "low_latency", None, None, False)
    assert world.pick(slo_ms=100).placement.reason == "least_cost"


def test_the_first_preference_that_names_a_kind_decides_and_the_order_is_configured():
    world = World().all()
    assert world.where(hint="transformer", input_tokens=40_000.0, slo_ms=50) == "llama"
    assert world.where(input_tokens=40_000.0, slo_ms=50) == "mamba"
    world = World(routing={"preferences": ["low_latency", "hint"]}).all()
    assert world.where(hint="transformer", slo_ms=50) == "mixtral"
    world = World(routing={"long_context_kind": "moe", "long_context_tokens": 500}).all()
    assert world.where(input_tokens=501.0) == "mixtral"


def test_a_preferred_engine_that_is_down_says_why():
    world = World().all()
    world.see(world.status("mamba", updated_at_ms=NOW + 1, is_healthy=False))
    assert said(world.pick(hint="ssm")) == ("llama", "least_cost", "ssm", "healthy", False)
    world = World()
    world.see(world.status("llama"))
    assert said(world.pick(hint="ssm")) == ("llama", "only", "ssm", "fresh", False)
    assert said(world.pick(model="llama", hint="ssm")) == ("llama", "only", "ssm", "model", False)


def test_a_preferred_engine_is_taken_only_below_its_share():
    world = World(routing={"preferred_load_max": 0.5}).all(slots=4)
    for _ in range(3):
        world.send(world.pick(hint="ssm"))
    choice = world.pick(hint="ssm")
    assert (choice.pool, choice.placement.why_not) == ("llama", "full")


def test_nobody_waits_on_a_busy_engine_while_another_stands_idle():
    world = World(predictor=Plain(llama=1.0, mamba=100.0, mixtral=100.0)).all()
    pools = []
    for _ in range(9):
        choice = world.pick(hint="transformer")
        world.send(choice)
        pools.append(choice.pool)
    assert pools[:2] == ["llama"] * 2
    assert sorted(pools[2:6]) == ["mamba"] * 2 + ["mixtral"] * 2
    assert sorted(pools[6:]) == ["llama", "mamba", "mixtral"], "then their runways"
    assert world.pick() is None


def test_on_the_runways_the_wait_counts():
    world = World(predictor=Plain(llama=1.0, mamba=1.0, mixtral=1.0), factor=2).all()
    for pool, load in (("llama", 3), ("mamba", 2), ("mixtral", 3)):
        world.fill(pool, load)
        world.fleet.believe(world.fleet.pool(pool), 100.0)
    assert world.where() == "mamba"
    world.fleet.believe(world.fleet.pool("mamba"), 500.0)
    choice = world.pick()
    assert choice.pool == "llama"
    assert (choice.placement.predicted_ttft_ms, choice.placement.predicted_ms) == (101, 111)


def test_a_wish_that_would_be_missed_outweighs_a_dearer_run():
    costly = {"wait": 1, "run": 0, "slo": 5, "untrained_context": 1, "temperature": 1}
    world = World(predictor=Plain(llama=1.0, mamba=10.0, mixtral=10.0), routing={"scorers": costly, "preferences": []}).all()
    world.see(world.status("llama", gpu_temperature_c=81.0, updated_at_ms=NOW + 1))
    assert world.where() == "mamba", "200 ms of heat and no run that counts"
    assert world.where(slo_ms=60) == "llama", "110 ms miss it by 50"
    assert world.where(NOW + 100, slo_ms=300) == "mamba", "its age counts: 210 of 300"
    assert world.where(NOW + 300, slo_ms=310) == "llama"


# -- who may stand in -------------------------------------------------------------------------------------------------------


def test_another_model_stands_in_only_as_far_as_fallback_allows_and_the_result_says_so():
    world = World().all()
    world.see(world.status("llama", updated_at_ms=NOW + 1, is_healthy=False))
    assert said(world.pick(model="llama")) == ("mixtral", "only", "llama", "healthy", True)
    assert world.pick(model="llama", fallback="same_model") is None
    assert world.pick(model="llama", fallback="none") is None


def test_kinds_stand_in_in_the_configured_order():
    engines = {"a": {"kind": "ssm", "model": "a"}, "b": {"kind": "moe", "model": "b"}, "c": {"kind": "transformer", "model": "c"}}
    engines |= {"d": {"kind": "other", "model": "d"}, "e": {"kind": "ssm", "model": "asked"}}

    def order(**routing):
        world = World(engines=engines, routing=routing).all(slots=1)
        found = []
        while (choice := world.pick(model="asked")) is not None:
            found.append(choice.pool)
            world.send(choice)
        return found

    assert order() == ["e", "b", "c", "a", "d"]
    assert order(degradation=["ssm", "transformer"]) == ["e", "a", "c", "b", "d"]


def test_who_stands_in_is_checked_for_context_features_and_its_own_caps():
    world = World(
        engines={name: {"kind": name, "model": name, "requests_per_s_max": 5.0} for name in ("moe", "ssm", "transformer")}
    )
    for pool, context, features in (("moe", 4_096, ["chat"]), ("transformer", 32_768, []), ("ssm", 65_536, ["seed"])):
        world.see(world.status(pool, max_context=context, features=features, is_healthy=pool != "transformer"))
    asked = {"model": "transformer"}
    assert world.where(**asked) == "moe"
    assert world.where(**asked, input_tokens=5_000.0) == "ssm"
    assert world.where(**asked, features=("seed",)) == "ssm"
    world.rates.used_up = {"moe": NOW + 5}
    assert world.where(**asked) == "ssm"
    world.rates.used_up |= {"ssm": NOW + 5}
    assert world.where(**asked) is None


def test_who_stands_in_must_answer_before_the_deadline():
    world = World(predictor=Plain(mixtral=100.0, mamba=1.0)).all()
    world.see(world.status("llama", updated_at_ms=NOW + 1, running=3))
    assert world.where(model="llama") == "mixtral"
    assert world.where(model="llama", deadline_ms=NOW + 1_000) == "mamba", "the other needs 1,100 ms"
    assert world.where(model="llama", deadline_ms=NOW + 5) is None, "it waits for its own"


def test_equivalents_serve_one_another_and_a_class_is_served_by_each_of_its_models():
    world = World(equivalents={"small": ["llama", "mamba"]}, aliases={"chat": "small", "talk": "chat", "quick": "fast"}).all()
    assert said(world.pick(model="llama", fallback="same_model")) == ("llama", "only", None, None, False)
    for name in ("small", "chat", "talk"):
        assert said(world.pick(model=name, fallback="none")) == ("llama", "least_cost", None, None, False)
    world.see(world.status("llama", updated_at_ms=NOW + 1, is_healthy=False))
    assert world.where(model="chat", fallback="none") == "mamba"
    for name in ("llama", "fast", "quick"):
        assert said(world.pick(model=name, fallback="same_model")) == ("mamba", "only", "llama", "healthy", True)
        assert world.where(model=name, fallback="none") is None
    assert world.where(model="mixtral", fallback="same_model") == "mixtral"


def test_simulated_engines_of_all_kinds_are_a_fleet_of_their_own():
    sims = {name: {"kind": name, "backend": "sim", "model": name} for name in ("moe", "ssm", "transformer")}
    world = World(engines=sims).all()
    assert world.where(hint="ssm") == "ssm"
    world.see(world.status("ssm", updated_at_ms=NOW + 1, is_healthy=False))
    assert world.where(model="ssm") == "moe"
    world = World(engines={**sims, "real": {"kind": "transformer", "model": "real"}}).all()
    assert {world.where(), world.where(hint="ssm"), world.where(model="real")} == {"real"}
    assert world.where(hint="sim") in sims
    world.see(world.status("real", updated_at_ms=NOW + 1, is_healthy=False))
    assert world.where() is None
    assert world.where(model="real") is None
    world.see(world.status("moe", updated_at_ms=NOW + 1, is_healthy=False))
    assert world.where(model="moe") == "transformer"


def test_unknown_names_and_kinds_are_refused_with_those_there_are():
    world = World(equivalents={"small": ["llama"]}, aliases={"chat": "small"})
    refusal = world.router.refusal(world.item(model="gpt").demand)
    assert refusal.message == "no engine serves model 'gpt': known are chat, fast, llama, mamba, mixtral, small"
    assert world.router.refusal(world.item(hint="tpu").demand).param == "routing_hint"
    assert world.router.refusal(world.item(model="chat", hint="ssm", fallback="none").demand).param == "routing_hint"
    assert world.router.refusal(world.item(model="chat", hint="ssm").demand) is None


# -- demands ----------------------------------------------------------------------------------------------------------------


def test_contexts_are_told_apart_only_as_far_as_engines_tell_them_apart():
    world = World()
    assert world.item(input_tokens=5_000.0).demand.context == 4_096, "nobody has told yet"
    for pool, limit in (("llama", 4_096), ("mamba", 65_536), ("mixtral", 32_768)):
        world.see(world.status(pool, max_context=limit))
    contexts = {n: world.item(input_tokens=float(n)).demand.context for n in (1, 4_095, 4_096, 32_767, 32_768, 10**7)}
    assert contexts == {1: 0, 4_095: 0, 4_096: 4_097, 32_767: 4_097, 32_768: 32_769, 10**7: 65_537}
    assert world.item(input_tokens=6_000.0).demand is world.item(input_tokens=7_000.0).demand


def test_what_fits_nowhere_goes_where_most_fits_and_the_tokenizer_there_has_the_last_word():
    world = World()
    for pool, limit in (("llama", 4_096), ("mamba", 65_536)):
        world.see(world.status(pool, max_context=limit))
    assert world.where(input_tokens=100_000.0) == "mamba"
    assert world.where(input_tokens=5_000.0, model="llama", fallback="none") == "llama"
    world.see(world.status("mamba", max_context=65_536, is_healthy=False, updated_at_ms=NOW + 1))
    assert world.where(input_tokens=100_000.0) is None, "it waits for who may take it"
    assert world.where(input_tokens=4_000.0) == "llama"


def test_features_that_nobody_has_are_left_to_the_engine_to_refuse():
    world = World()
    world.see(world.status("llama", features=["chat"]))
    assert world.where(features=("seed",)) == "llama"
    world.see(world.status("mamba", features=["chat", "seed"]))
    world.fill("mamba", 9)
    assert world.where(features=("seed",)) is None


def test_demands_and_plans_are_bounded():
    world = World().all()
    for n in range(10_000):
        world.pick(excluded=(Excluded("llama", n, "w9"),))
    assert len(world.router._plans) <= 4_096
    assert len(world.router._demands) <= 4_096


def test_a_refusal_by_nature_is_final_only_when_nobody_may_have_more():
    world = World().all(max_context=4_096)
    overflow, lacking = (ErrorInfo(code, "no") for code in (ErrorCode.CONTEXT_OVERFLOW, ErrorCode.UNSUPPORTED_FEATURE))

    def final(*refusals, **asked):
        route = [RouteAttempt(pool, "w1", "retried", error) for pool, error in refusals]
        return world.router.final_error(world.item(envelope={"route": route}, **asked))

    assert final(("llama", overflow)) is overflow
    assert final(("llama", lacking)) is None
    assert final(("llama", lacking), ("mamba", lacking), ("mixtral", lacking)) is lacking
    assert final(("llama", lacking), model="llama", fallback="same_model") is lacking
    world.see(world.status("mamba", max_context=9_000, updated_at_ms=NOW + 1))
    assert final(("llama", overflow)) is None
    assert final(("llama", ErrorInfo(ErrorCode.CAPACITY_EXCEEDED, "full"))) is None


# -- state ------------------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_where_nobody_was_heard_of_lately():
    world = World().all()
    assert world.where(NOW + STALE_MS) is not None
    assert world.where(NOW + STALE_MS + 1) is None
    world.see(world.status("mamba", updated_at_ms=NOW + 5_000), NOW + 5_000)
    choice = world.pick(NOW + 5_000, hint="moe")
    assert said(choice) == ("mamba", "only", "moe", "fresh", False)


def test_a_pause_holds_from_the_moment_it_is_given():
    world = World().all()
    assert world.where(hint="ssm") == "mamba"
    world.router.steer({"mamba": PoolSettings(paused=True)})
    assert said(world.pick(hint="ssm")) == ("llama", "least_cost", "ssm", "unpaused", False)
    world.router.steer({})
    assert world.where(hint="ssm") == "mamba"


def test_a_rate_that_is_used_up_is_told_and_only_pools_with_a_rate_are_asked():
    world = World().all()
    world.rates.used_up = {"mamba": NOW + 10, "llama": NOW + 10}
    assert world.where(hint="ssm") == "mamba"
    world.router.steer({"mamba": PoolSettings(requests_per_s_max=1.0)})
    assert said(world.pick(hint="ssm")) == ("llama", "least_cost", "ssm", "rate", False)
    assert world.where(NOW + 10, hint="ssm") == "mamba"


def fail(world, count, now=NOW, code=ErrorCode.INTERNAL, pool="mamba", start=0, **fields):
    done = [Completion(0, start + n, 1, 1, 0.0, None, 1.0, code=code) for n in range(count)]
    world.see(world.status(pool, completed=start + count + 1, completions=done, updated_at_ms=now, **fields), now)


def test_a_worker_that_fails_is_left_alone_probed_and_taken_back_slowly():
    world = World().all(slots=4)
    fail(world, 5, NOW + 1, slots=4)
    assert said(world.pick(NOW + 1, hint="ssm")) == ("llama", "least_cost", "ssm", "breaker", False)
    assert world.where(NOW + 2_000, hint="ssm") == "llama"
    assert world.where(NOW + 2_001, hint="ssm") == "mamba"
    assert world.where(NOW + 2_001, hint="ssm") == "llama", "one probe at a time"
    fail(world, 1, NOW + 2_100, code=None, start=5, slots=4)
    picked = []
    for _ in range(3):
        picked.append(world.pick(NOW + 2_100, hint="ssm"))
        world.send(picked[-1])
    assert [choice.pool for choice in picked] == ["mamba", "mamba", "llama"]


def test_a_clients_fault_never_shuts_an_engine():
    world = World().all()
    for code in (ErrorCode.INVALID_REQUEST, ErrorCode.CONTEXT_OVERFLOW, ErrorCode.CANCELLED, ErrorCode.PREEMPTED):
        fail(world, 50, NOW + 1, code)
    assert world.where(NOW + 1, hint="ssm") == "mamba"


def test_who_handed_it_back_is_passed_over_while_anybody_else_is_there():
    world = World().all()
    world.see(world.status("mamba", "w2", partitions=[1]))
    back = Excluded("mamba", 1, "w1")
    assert world.pick(hint="ssm", excluded=(back,)).worker.status.worker == "w2"
    assert world.where(hint="ssm", excluded=(Excluded("mamba", 1, None),)) == "llama"
    assert world.pick(model="mamba", fallback="none", excluded=(Excluded("mamba", 1, None),)) is None, (
        "what holds for a pool holds"
    )
    world.fill("mamba", 9, partition=1)
    assert world.where(hint="ssm", excluded=(back,)) == "llama"
    world.see(world.status("mamba", "w2", partitions=[1], is_healthy=False, updated_at_ms=NOW + 1))
    asked = {"model": "mamba", "fallback": "none", "excluded": (back,)}
    assert world.pick(**asked).worker.status.worker == "w1", "nobody else is there"


def test_batch_leaves_the_slots_that_are_not_its_own():
    world = World(engines={"llama": {"kind": "transformer", "model": "llama"}}, factor=1).all(slots=4, interactive_slots=1)
    world.fill("llama", 3, "batch")
    assert world.pick(service_class="batch") is None
    assert world.where(service_class="interactive") == "llama"
    assert world.fleet.pool("llama").workers["w1"].wait_ms("interactive") == 0


# -- predictions ------------------------------------------------------------------------------------------------------------


def test_the_soonest_end_counts_waits_of_those_that_are_full_too():
    world = World(predictor=Plain(llama=1.0, mamba=5.0, mixtral=9.0))
    assert world.router.soonest(world.item(), NOW) is None
    world.all()
    assert world.router.soonest(world.item(), NOW).run_ms == 11.0
    world.see(world.status("llama", running=8, updated_at_ms=NOW + 1))
    world.fleet.believe(world.fleet.pool("llama"), 10.0)
    soonest = world.router.soonest(world.item(), NOW + 1)
    assert (soonest.ttft_ms, soonest.run_ms, soonest.run_p90_ms) == (36.0, 46.0, 51.5), "7 runs ahead, two at a time"
    assert world.router.soonest(world.item(model="mixtral", fallback="none"), NOW).run_ms == 99.0
    world.router.steer({"mixtral": PoolSettings(tokens_per_s_max=1.0)})
    world.rates.used_up = {"mixtral": NOW + 1_000}
    assert world.router.soonest(world.item(model="mixtral", fallback="none"), NOW).run_ms == 1_099.0


def test_the_length_that_is_expected_counts_and_else_the_longest():
    world = World().all()
    assert world.pick(output_tokens=4.0, max_output_tokens=100).prediction.run_ms == 5.0
    assert world.pick(max_output_tokens=100).prediction.run_ms == 101.0


@pytest.mark.parametrize("service_class", ["interactive", "batch"])
def test_a_placement_is_written_small(service_class):
    world = World().all()
    assert world.pick(service_class=service_class).placement == Placement("least_cost", predicted_ttft_ms=1, predicted_ms=11)


# -- adapters, and what an engine must have ----------------------------------------------------------------------------------


def test_an_adapter_is_a_model_of_the_pool_that_has_it_and_is_equivalent_to_nothing():
    engines = ENGINES | {"llama": ENGINES["llama"] | {"options": {"loras": {"sql": "/adapters/sql"}}}}
    world = World(engines=engines, equivalents={"chat": ["llama", "mamba"]}).all()
    assert {world.where(model="sql", fallback=fallback) for fallback in ("any", "same_model", "none")} == {"llama"}
    world.fill("llama", 9)
    assert world.where(model="llama", fallback="same_model") == "mamba"
    assert world.where(model="sql", fallback="same_model") is None


def test_a_form_of_the_output_goes_only_to_those_that_can_hold_to_it():
    request = InferenceRequest(prompt="p", output_format=OutputFormat(json_schema={}), sampling=Sampling(logprobs=0))
    world = World(predictor=Plain(llama=9.0)).all(features=["seed"])
    world.see(world.status("llama", updated_at_ms=NOW + 1, features=["json_schema", "logprobs", "seed"]))
    choice = world.pick(features=needed(request))
    assert (choice.pool, needed(request)) == ("llama", ("json_schema", "logprobs"))
    world.see(world.status("llama", updated_at_ms=NOW + 2, features=["json_schema", "seed"]))
    assert world.pick(features=needed(request)) is not None, "nobody has both: whoever is asked says so itself"
