"""The dispatcher's machine: who is served by whom, when, and what is refused."""

import msgspec
from msgspec.structs import replace

from broker.transport.protocol import Record
from dispatcher.core import Arrived, Cancelled, Dispatcher, Dropped, Finish, Forward, Sent, StatusSeen, Tick
from dispatcher.core.admission import Refused, admit, readmit
from dispatcher.core.deadlines import SPARE
from dispatcher.core.machine import GONE_SPARE
from dispatcher.core.routing import Catalog
from schemas import EngineStatus, ErrorInfo, RouteAttempt, codecs, headers, parse_config
from schemas.errors import ErrorCode
from schemas.messages import Envelope
from schemas.policy import AdmissionConfig

CONFIG = parse_config(
    {
        "engines": {
            "llama": {"kind": "transformer", "model": "llama", "aliases": ["fast"]},
            "mamba": {"kind": "ssm", "model": "mamba"},
            "mixtral": {"kind": "moe", "model": "mixtral"},
            "play": {"kind": "sim", "model": "play"},
        }
    }
)
NOW = 1_000_000


def record(value, offset=0, record_headers=(), topic="forebay.requests.batch"):
    return Record(topic, 0, offset, None, value, tuple(record_headers), NOW)


def request(offset=0, **fields):
    body = {"id": f"r{offset}", "prompt": "hello", **fields}
    return admit(record(msgspec.json.encode(body), offset), "batch", 1 << 20)


def status(pool, worker="w1", **fields):
    kinds = {name: spec.kind for name, spec in CONFIG.engines.items()}
    plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0, 3], "slots": 2, "max_context": 4_096}
    return EngineStatus(engine=pool, kind=kinds[pool], pool=pool, worker=worker, **{**plain, **fields})


def machine(*statuses):
    made = Dispatcher(CONFIG)
    for one in statuses:
        made.handle(StatusSeen(one), NOW)
    return made


def decide(made, *items, now=NOW):
    effects = []
    for one in items:
        effects += made.handle(Arrived(one), now)
    return effects + made.handle(Tick(), now)


def test_a_request_goes_to_the_lowest_partition_of_a_worker_that_serves_its_model():
    (effect,) = decide(machine(status("llama"), status("mamba")), request(model="mamba"))
    assert isinstance(effect, Forward)
    assert (effect.pool, effect.worker, effect.partition) == ("mamba", "w1", 0)


def test_nothing_leaves_while_nobody_has_room_and_all_goes_on_once_somebody_has():
    made = machine(status("llama"))
    effects = decide(made, *(request(n, model="llama", fallback="none") for n in range(10)))
    assert len(effects) == 3  # 1.5 times two slots
    for n, effect in enumerate(effects):
        made.handle(Sent(effect.item.work, n), NOW)
    assert made.handle(Tick(), NOW) == []
    made.handle(StatusSeen(status("llama", updated_at_ms=NOW + 1, positions={0: 3}, running=1)), NOW + 1)
    assert len(made.handle(Tick(), NOW + 1)) == 2
    assert made.queued == 5


def test_load_counts_what_was_sent_since_the_snapshot_and_what_was_read_only_once():
    made = machine(status("llama", slots=4))
    effects = decide(made, *(request(n, model="llama") for n in range(4)))
    for n, effect in enumerate(effects):
        made.handle(Sent(effect.item.work, n), NOW)
    made.handle(StatusSeen(status("llama", slots=4, updated_at_ms=NOW + 1, positions={0: 2}, running=2)), NOW + 1)
    assert len(decide(made, *(request(10 + n, model="llama") for n in range(9)), now=NOW + 1)) == 2  # 6 - 2 running - 2 unread


def test_a_stale_or_unhealthy_worker_is_sent_nothing():
    made = machine(status("llama"))
    assert decide(made, request(model="llama"), now=NOW + 10_000) == []
    assert decide(machine(status("llama", is_healthy=False)), request(model="llama")) == []
    assert decide(machine(status("llama", partitions=[])), request(model="llama")) == []


def test_a_full_engine_is_stood_in_for_as_far_as_fallback_allows():
    made = machine(status("llama", slots=1), status("mixtral"), status("play"))
    pools = [e.pool for e in decide(made, *(request(n, model="llama") for n in range(9)))]
    assert pools[0] == "llama"
    assert set(pools[1:]) == {"mixtral"}
    made = machine(status("llama", slots=1), status("mixtral"))
    assert [e.pool for e in decide(made, *(request(n, model="llama", fallback="same_model") for n in range(9)))] == ["llama"]


def test_a_simulated_engine_answers_only_who_asks_for_it():
    assert decide(machine(status("play")), request()) == []
    assert [e.pool for e in decide(machine(status("play")), request(model="play"))] == ["play"]
    assert [e.pool for e in decide(machine(status("play")), request(routing_hint="sim"))] == ["play"]


def test_a_hint_is_a_preference():
    (effect,) = decide(machine(status("llama"), status("mamba")), request(routing_hint="ssm"))
    assert effect.pool == "mamba"
    (effect,) = decide(machine(status("llama")), request(routing_hint="ssm"))
    assert effect.pool == "llama"


def test_what_nobody_serves_is_refused_by_name():
    policy = Catalog(CONFIG)
    assert policy.refusal(request(model="gpt").demand).code is ErrorCode.MODEL_NOT_FOUND
    assert policy.refusal(request(routing_hint="tpu").demand).param == "routing_hint"
    assert policy.refusal(request(model="fast").demand) is None
    assert policy.refusal(request(model="llama", routing_hint="ssm", fallback="none").demand) is not None


def test_a_full_demand_does_not_hold_up_another():
    made = machine(status("llama", slots=1), status("mamba"))
    items = [request(n, model="llama", fallback="none") for n in range(5)] + [request(9, model="mamba", fallback="none")]
    assert [e.pool for e in decide(made, *items)] == ["llama", "mamba"]


def test_who_waits_for_an_engine_in_time_holds_up_nobody_without_a_deadline():
    made = Dispatcher(replace(CONFIG, dispatcher=replace(CONFIG.dispatcher, admission=AdmissionConfig(deadline="serve"))))
    made.handle(StatusSeen(status("llama", running=3)), NOW)
    made.handle(StatusSeen(status("mamba")), NOW)
    in_a_moment = "1970-01-01T00:16:40.001Z"
    effects = decide(made, request(0, model="llama", deadline=in_a_moment), request(1, model="llama", tenant="other"))
    assert [(e.item.envelope.id, e.pool) for e in effects] == [("r1", "mamba")]


def test_a_passed_deadline_ends_a_request_that_waits():
    made = machine()
    assert decide(made, request(deadline="1970-01-01T00:20:00Z")) == []
    (effect,) = made.handle(Tick(), 1_200_000)
    assert isinstance(effect, Finish)
    assert effect.status == "expired"


def at(second):
    return f"1970-01-01T00:20:{second:02d}Z"


def test_a_passed_deadline_ends_a_request_wherever_it_stands():
    made = machine(status("llama", slots=1))
    decide(made, request(0, model="llama", fallback="none"))  # and the engine is full
    decide(
        made,
        request(1, deadline=at(10)),
        request(2, deadline=at(5)),
        request(3),
        retry(4, {"deadline": at(7)}, not_before_ms=9_000_000),
    )
    ended = {}
    for second in range(12):
        for effect in made.handle(Tick(), 1_200_000 + second * 1000):
            assert effect.status == "expired"
            ended[effect.item.work[1]] = second
    assert ended == {1: 10, 2: 5, 4: 7}
    assert made.queued == 1


def test_a_deadline_does_not_end_what_left_the_hand_or_came_again():
    made = machine(status("llama", slots=1))
    sent, dropped = request(0, model="llama", deadline=at(1)), request(1, model="llama", deadline=at(1))
    assert len(decide(made, sent)) == 1
    decide(made, dropped)
    made.handle(Dropped(dropped.work), NOW)
    again = request(1, model="llama", deadline=at(1))
    made.handle(Arrived(again), NOW)
    (effect,) = made.handle(Tick(), 1_201_000)
    assert effect.item is again


def test_deadlines_of_requests_that_are_gone_take_no_room():
    made = machine()
    for n in range(2_000):
        one = request(n, deadline=at(59))
        decide(made, one)
        made.handle(Dropped(one.work), NOW)
    assert len(made._deadlines) <= 2 * SPARE
    assert len(made._queue) <= 2 * SPARE


def test_a_cancel_ends_what_is_queued_and_what_is_delayed_and_nothing_else():
    made = machine(status("llama", slots=1))
    (sent,) = decide(made, request(0, tenant="a", model="llama"))
    items = [request(n, tenant="ab"[n % 2], model="mamba") for n in range(1, 5)]
    decide(made, *items, retry(5, not_before_ms=9_000_000), retry(6, not_before_ms=9_000_000))
    effects = made.handle(Cancelled(lambda item: item.tenant == "a" or item.work[1] == 6), NOW)
    assert [(e.item.work[1], e.status, e.error.code) for e in effects] == [
        (n, "cancelled", ErrorCode.CANCELLED) for n in (2, 4, 6)
    ]
    assert made.handle(Cancelled(lambda _: True), NOW) != []
    assert made.queued == 0
    made.handle(Sent(sent.item.work, 0), NOW)
    made.handle(StatusSeen(status("mamba")), NOW)
    assert made.handle(Tick(), 9_000_000) == [], "what was cancelled is never forwarded"


def test_a_mass_cancel_leaves_the_others_their_turn():
    made = machine()
    decide(made, *(request(n, tenant="ab"[n % 2], model="mamba") for n in range(1_000)))
    assert len(made.handle(Cancelled(lambda item: item.tenant == "a"), NOW)) == 500
    made.handle(StatusSeen(status("mamba", slots=400)), NOW)
    effects = made.handle(Tick(), NOW)
    assert [e.item.work[1] for e in effects] == list(range(1, 801, 2))[: len(effects)]
    assert len(effects) == 400


def test_what_was_cancelled_behind_others_takes_no_room():
    made = machine()
    decide(made, request(0, deadline=at(1)))  # the nearest deadline goes first, so it stands before all others
    for n in range(1, 2_000):
        decide(made, request(n, prompt="long" * 100), retry(10_000 + n, not_before_ms=9_000_000))
        assert len(made.handle(Cancelled(lambda item: item.work[1] > 0), NOW)) == 2
    assert len(made._queue) + len(made._delayed) <= 2 * GONE_SPARE
    assert made.queued == 1


def test_a_dropped_request_is_never_forwarded():
    made = machine()
    one = request(model="llama")
    decide(made, one)
    made.handle(Dropped(one.work), NOW)
    made.handle(StatusSeen(status("llama")), NOW)
    assert made.handle(Tick(), NOW) == []
    assert made.queued == 0


def retry(offset=0, body=None, **fields):
    envelope = Envelope("r", "t", "batch", ("forebay.requests.batch", 0, 0), NOW, **fields)
    value = msgspec.json.encode({"prompt": "hello", "fallback": "same_model", "model": "llama", **(body or {})})
    carried = [(headers.ENVELOPE, codecs.encode_envelope(envelope))]
    return readmit(record(value, offset, carried, "forebay.retries"))


def test_a_retry_waits_for_its_time_and_passes_over_the_engine_that_handed_it_back():
    made = machine(status("llama"))
    assert decide(made, retry(not_before_ms=NOW + 500)) == []
    assert len(made.handle(Tick(), NOW + 500)) == 1
    assert decide(machine(status("llama")), retry(excluded={"llama": 1})) == []
    assert len(decide(machine(status("llama", epoch=2)), retry(excluded={"llama": 1}))) == 1


def test_a_retry_waits_no_longer_than_the_longest_backoff_however_wrong_the_clock_that_set_it():
    made = machine(status("llama"))
    assert decide(made, retry(not_before_ms=NOW + 3_600_000)) == []
    later = NOW + CONFIG.dispatcher.retry_backoff_ms_max
    made.handle(StatusSeen(status("llama", updated_at_ms=later)), later)
    assert [type(effect) for effect in made.handle(Tick(), later)] == [Forward]


def test_a_retry_goes_to_an_older_worker_of_the_same_pool():
    unhealthy = ErrorInfo(ErrorCode.UNHEALTHY, "the engine is dead")
    back = retry(route=[RouteAttempt("llama", "w2", "retried", unhealthy)], excluded={"llama": 5})
    (effect,) = decide(machine(status("llama", "w1", epoch=5), status("llama", "w2", epoch=5)), back)
    assert effect.worker == "w1"
    full = status("llama", "w1", epoch=5, queue_depth=9)
    assert decide(machine(full, status("llama", "w2", epoch=5)), back) == [], "it waits for who did not hand it back"
    internal = ErrorInfo(ErrorCode.INTERNAL, "its own failure excludes nobody")
    route = [RouteAttempt("llama", "w2", "retried", unhealthy), RouteAttempt("llama", "w1", "retried", internal)]
    assert len(decide(machine(status("llama", "w1", epoch=5)), retry(route=route, excluded={"llama": 5}))) == 1


def handed_back(*places, code=ErrorCode.CAPACITY_EXCEEDED):
    """A request that workers of these pools handed back, one after another."""
    route = [RouteAttempt(pool, "w1", "retried", ErrorInfo(code, "the queue is full")) for pool in places]
    return retry(body={"fallback": "any"}, route=route, excluded=dict.fromkeys(places, 1))


def test_a_retry_goes_again_to_who_handed_it_back_where_nobody_else_is_there():
    (effect,) = decide(machine(status("llama")), handed_back("llama"))
    assert effect.worker == "w1"
    sick = status("llama", "w2", is_healthy=False), status("llama", "w3", partitions=[])
    assert len(decide(machine(status("llama"), *sick), handed_back("llama"))) == 1
    assert decide(machine(status("llama", is_healthy=False)), handed_back("llama")) == []
    assert decide(machine(status("llama")), handed_back("llama", code=ErrorCode.PREEMPTED), now=NOW + 10_000) == []


def test_of_those_that_handed_it_back_who_did_so_longest_ago_is_asked_again():
    both = status("llama"), status("mixtral")
    assert [effect.pool for effect in decide(machine(*both), handed_back("llama"))] == ["mixtral"]
    assert [effect.pool for effect in decide(machine(*both), handed_back("llama", "mixtral"))] == ["llama"]
    assert [effect.pool for effect in decide(machine(*both), handed_back("llama", "mixtral", "llama"))] == ["mixtral"]
    assert [effect.pool for effect in decide(machine(status("llama")), handed_back("mixtral", "llama"))] == ["llama"]


def test_a_worker_whose_clock_was_set_back_is_heard_at_once():
    made = machine(status("llama", slots=1, queue_depth=9))
    made.handle(StatusSeen(status("llama", slots=1, updated_at_ms=NOW - 100)), NOW)
    assert decide(made, request(model="llama")) == []
    made.handle(StatusSeen(status("llama", slots=1, updated_at_ms=NOW - 3_600_000)), NOW)
    assert len(made.handle(Tick(), NOW)) == 1


def test_a_dispatcher_whose_clock_is_set_back_keeps_nobody_waiting_and_believes_in_nobody_it_heard_in_the_future():
    made = machine(status("llama"))
    assert decide(made, retry(not_before_ms=NOW + 100)) == []
    before = NOW - 3_600_000
    assert made.handle(Tick(), before) == []
    made.handle(StatusSeen(status("llama", updated_at_ms=NOW + 50)), before)
    assert len(made.handle(Tick(), before)) == 1


def test_a_context_overflow_is_final_only_when_nobody_has_more():
    overflow = ErrorInfo(ErrorCode.CONTEXT_OVERFLOW, "9000 tokens, 4096 fit")
    route = [RouteAttempt("llama", "w1", "retried", overflow)]
    (effect,) = decide(machine(status("llama")), retry(route=route, excluded={"llama": 1}))
    assert isinstance(effect, Finish)
    assert effect.error is overflow or effect.error.message == overflow.message


def test_a_feature_that_no_engine_has_is_refused_and_not_waited_for():
    lacking, anybody = ErrorInfo(ErrorCode.UNSUPPORTED_FEATURE, "no chat template"), {"fallback": "any"}
    pools = list(Catalog(CONFIG).ranks(retry(body=anybody).demand))
    assert len(pools) > 1
    some = [RouteAttempt(pools[0], "w1", "retried", lacking)]
    assert decide(machine(), retry(body=anybody, route=some, excluded={pools[0]: 1})) == []
    every = [RouteAttempt(pool, "w1", "retried", lacking) for pool in pools]
    (effect,) = decide(machine(), retry(body=anybody, route=every, excluded=dict.fromkeys(pools, 1)))
    assert (effect.status, effect.error) == ("rejected", lacking)


def test_a_request_handed_back_too_often_fails():
    (effect,) = decide(machine(status("llama")), retry(hop=CONFIG.dispatcher.max_hops))
    assert effect.status == "failed"


def test_admission_names_the_field_and_keeps_what_can_be_read():
    refused = admit(record(b'{"id":"x","tenant":"t","prompt":"a","top_p":1}'), "batch", 1 << 20)
    assert isinstance(refused, Refused)
    assert (refused.id, refused.tenant, refused.error.param) == ("x", "t", "top_p")
    huge = admit(record(b'{"id":"x","prompt":"' + b"a" * 500 + b'"}'), "batch", 100)
    assert huge.id == "x"
    assert "at most 100" in huge.error.message


def test_a_record_without_an_id_always_gets_the_same_one():
    one, same, other = (admit(record(b'{"prompt":"a"}', n), "batch", 100) for n in (1, 1, 2))
    assert one.envelope.id == same.envelope.id != other.envelope.id


def test_a_record_behind_a_byte_order_mark_is_refused_under_its_own_id():
    refused = admit(record(b'\xef\xbb\xbf{"id":"x","tenant":"t","prompt":"a"}'), "batch", 1 << 20)
    assert isinstance(refused, Refused)
    assert (refused.id, refused.tenant) == ("x", "t")
    assert "byte order mark" in refused.error.message
