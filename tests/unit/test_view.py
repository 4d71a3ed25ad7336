"""A dispatcher's state, written down and read back: a router made of it says of every request what the dispatcher's does."""

import msgspec
import pytest

from broker.transport.protocol import Record
from dispatcher.core import Arrived, Dispatcher, Sent, StatusSeen, Steered, Tick
from dispatcher.core.admission import admit
from dispatcher.core.view import Mind
from schemas import EngineStatus, ErrorCode, InvalidMessage, parse_config
from schemas.messages import Completion
from schemas.policy import PoolSettings, TenantConfig
from schemas.questions import Why, decode_state, encode_state

NOW = 1_700_000_000_000
CONFIG = parse_config(
    {
        "engines": {
            "llama": {"kind": "transformer", "model": "llama", "aliases": ["fast"], "env": {"TOKEN": "secret"}},
            "mamba": {"kind": "ssm", "model": "mamba", "requests_per_s_max": 2.0},
            "mixtral": {"kind": "moe", "model": "mixtral"},
        },
        "kafka": {"sasl_password": "hunter2"},
        "tenants": {"slow": {"requests_per_s_max": 0.1}, "b": {"weight": 2.0}},
        "dispatcher": {"breaker": {"failures": 2}},
    }
)
REQUESTS = [
    {"prompt": "short", "model": "fast"},
    {"prompt": "short", "model": "mamba", "tenant": "b"},
    {"prompt": "x" * 200_000},
    {"prompt": "short", "slo_latency_ms": 50},
    {"prompt": "short", "routing_hint": "ssm", "fallback": "none"},
    {"prompt": "short", "model": "llama", "fallback": "same_model", "max_output_tokens": 3},
]


def status(pool, worker="w1", completions=(), now=NOW, **fields):
    kind = CONFIG.engines[pool].kind
    plain = {"epoch": 1, "updated_at_ms": now, "partitions": [0, 3], "slots": 4, "max_context": 8_192, "interactive_slots": 1}
    more = {"completed": len(completions), "completions": list(completions)}
    return EngineStatus(engine=pool, kind=kind, pool=pool, worker=worker, **{**plain, **more, **fields})


def item(value, service_class="interactive", offset=0):
    record = Record(f"forebay.requests.{service_class}", 0, offset, None, msgspec.json.encode(value), (), NOW)
    return admit(record, service_class, 1 << 24)


def busy():
    """A machine that has seen something of everything."""
    made = Dispatcher(CONFIG)
    made.handle(StatusSeen(status("llama", running=2, gpu_temperature_c=88.0)), NOW - 500)
    failed = [Completion(0, n, 10, 0, 1.0, None, 5.0, code=ErrorCode.INTERNAL) for n in range(2)]
    made.handle(StatusSeen(status("llama", "w2", failed)), NOW - 400)
    done = [Completion(0, n, 100, 50, 1.0, 40.0, 900.0 + n) for n in range(20)]
    made.handle(StatusSeen(status("mamba", completions=done, trained_context=2_000, max_context=100_000)), NOW - 300)
    made.handle(StatusSeen(status("mixtral", kv_cache_usage=0.5, queue_depth=1)), NOW - 200)
    made.handle(StatusSeen(status("mixtral", "w2", now=NOW - 9_000)), NOW - 9_000)  # not heard of since
    made.handle(Steered({"c": TenantConfig(paused=True)}, {"mixtral": PoolSettings(paused=False, tokens_per_s_max=1e6)}), NOW)
    for n in range(12):
        made.handle(Arrived(item({"id": f"r{n}", "prompt": "p", "tenant": "ab"[n % 2]}, "batch", n)), NOW)
    made.handle(Arrived(item({"id": "paused", "prompt": "p", "tenant": "c"}, "batch", 100)), NOW)
    effects = made.handle(Tick(), NOW)
    assert len(effects) > 3
    made.handle(Sent(effects[0].item.work, 77), NOW)
    return made


def explained(router, one, now=NOW):
    one.demand = router.demand(one)
    return router.explain(one, now)


def reread(state):
    return decode_state(encode_state(state))


@pytest.mark.parametrize("value", REQUESTS)
@pytest.mark.parametrize("service_class", ["interactive", "batch"])
def test_a_saved_state_explains_what_the_dispatcher_would_do(value, service_class):
    made = busy()
    mind = Mind(reread(made.state(None, NOW)))
    mine, its = mind.item(msgspec.json.encode(value), service_class), item(value, service_class)
    predictor, router = made._predictor, made._router
    if its.size_bytes is not None:
        its.input_tokens = predictor.input_tokens(its.demand.model, its.size_bytes)
    its.demand = router.demand(its)
    its.output_tokens = predictor.expected_output(its.tenant, its.demand.model, its.max_output_tokens)
    assert explained(mind.router, mine) == explained(router, its)
    chosen = made._router.pick(its, NOW)
    assert explained(mind.router, mine).pool == (chosen and chosen.pool)


def test_a_state_holds_no_secrets_and_no_completions():
    state = busy().state(None, NOW)
    written = encode_state(state)
    assert b"secret" not in written
    assert b"hunter2" not in written
    assert all(not worker.status.completions for worker in state.workers)
    assert encode_state(reread(reread(state))) == encode_state(reread(state))


def test_a_state_tells_what_was_set_what_waits_and_who_is_left_alone():
    state = busy().state(None, NOW)
    assert set(state.tenants) == {"c"}
    assert set(state.pools) == {"mixtral"}
    assert {(queue.service_class, queue.tenant) for queue in state.queues} >= {("batch", "c")}
    assert [(one.pool, one.worker, one.state) for one in state.breakers] == [("llama", "w2", "open")]
    assert state.pools_run_ms["mamba"] > 800


def test_of_what_was_learned_only_one_tenants_answers_are_told_where_it_is_named():
    made = busy()
    predictor = made._predictor
    for tenant in "abc":
        done = Completion(0, 1, 100, 50, 1.0, 40.0, 900.0)
        for n in range(20):
            predictor.observe("mamba", 1, "mamba", tenant, done, 400, NOW + 10 * n, 256)
    tenants = {one.get("tenant") for one in made.state("a", NOW).predictor["answers"]}
    assert tenants <= {None, "a"}
    assert {one.get("tenant") for one in made.state(None, NOW).predictor["answers"]} >= {"a", "b", "c"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no value|JSON"),
        (b"{}", "`at_ms`: required field is missing"),
        (b'{"at_ms": 1, "config": {"engines": {"a": {"kind": "sim", "slot": 3}}}}', r"`config\.engines\.a\.slot`: unknown field"),
    ],
)
def test_a_state_that_is_none_is_told_with_its_path(text, said):
    with pytest.raises(InvalidMessage, match=said):
        decode_state(text)


def test_what_was_learned_and_cannot_be_is_told():
    state = msgspec.structs.replace(busy().state(None, NOW), predictor={"pools": {"llama": {}}})
    with pytest.raises(InvalidMessage, match="ttft_ms"):
        Mind(state)


# -- where requests are -------------------------------------------------------------------------------------------------


def machine(*statuses, **sections):
    made = Dispatcher(parse_config({"engines": {"sim": {"kind": "sim"}}, **sections}))
    for one in statuses:
        made.handle(StatusSeen(one), NOW)
    return made


def sim(**fields):
    plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0], "slots": 1}
    return EngineStatus(engine="sim", kind="sim", pool="sim", worker="w", **{**plain, **fields})


def waiting(made, now=NOW, **fields):
    for n in range(4):
        made.handle(Arrived(item({"id": f"r{n}", "prompt": "p", **fields}, "batch", n)), NOW)
    made.handle(Tick(), NOW)
    return made.where("r3", None, now)[0]


@pytest.mark.parametrize(
    ("statuses", "sections", "steered", "why"),
    [
        ([], {}, None, Why.NO_ENGINE),
        ([sim(is_healthy=False)], {}, None, Why.NO_ENGINE),
        ([sim()], {}, None, Why.ENGINES_FULL),
        ([sim(slots=100)], {"tenants": {"default": {"paused": True}}}, None, Why.TENANT_PAUSED),
        ([sim(slots=100)], {}, Steered({"default": TenantConfig(paused=True)}, {}), Why.TENANT_PAUSED),
        ([sim(slots=100)], {}, Steered({}, {"sim": PoolSettings(paused=True)}), Why.ENGINES_PAUSED),
        ([sim(slots=100)], {"tenants": {"default": {"requests_per_s_max": 0.01}}}, None, Why.TENANT_RATE),
        ([sim(slots=100)], {}, Steered({}, {"sim": PoolSettings(requests_per_s_max=0.01)}), Why.ENGINES_RATE),
    ],
)
def test_why_a_request_waits(statuses, sections, steered, why):
    made = machine(*statuses, **sections)
    if steered is not None:
        made.handle(steered, NOW)
    one = waiting(made)
    assert one.why is why
    if why in {Why.TENANT_RATE, Why.ENGINES_RATE}:
        assert one.until_ms > NOW
    else:
        assert one.until_ms is None


def test_an_engine_that_failed_over_and_over_is_named_with_the_time_of_its_probe():
    failed = [Completion(0, n, 10, 0, 1.0, None, 5.0, code=ErrorCode.INTERNAL) for n in range(9)]
    made = machine(sim(slots=100))
    made.handle(StatusSeen(sim(slots=100, updated_at_ms=NOW + 1, completed=9, completions=failed)), NOW)
    one = waiting(made)
    assert (one.why, one.until_ms) == (Why.ENGINES_BROKEN, NOW + 2_000)
    assert "failed over and over" in one.engines["sim"]


def test_requests_of_one_id_are_told_of_each_tenant_or_of_one():
    made = machine()
    for n, tenant in enumerate("ab"):
        made.handle(Arrived(item({"id": "same", "prompt": "p", "tenant": tenant}, "batch", n)), NOW)
    assert [one.tenant for one in made.where("same", None, NOW)] == ["a", "b"]
    assert [one.tenant for one in made.where("same", "b", NOW)] == ["b"]
    assert made.where("other", None, NOW) == []
