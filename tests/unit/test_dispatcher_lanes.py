"""The dispatcher's machine and its lanes: what is diverted, what comes back, and what never goes there."""

import msgspec
import pytest

from broker.transport.protocol import Record
from dispatcher.core import Arrived, Dispatcher, Divert, Dropped, Finish, Forward, LaneRead, LaneSeen, Sent, StatusSeen, Tick
from dispatcher.core.admission import admit, readmit
from dispatcher.core.lanes import HOLD_SPAN
from schemas import EngineStatus, codecs, headers, parse_config
from schemas.errors import ErrorCode

NOW = 1_000_000
HOLD_MS = 5_000


def config_of(records_max=2, unfinished_max=400):
    return parse_config(
        {
            "engines": {name: {"kind": "transformer", "model": name} for name in ("llama", "opt")},
            "dispatcher": {
                "lanes": {"records_max": records_max, "hold_ms": HOLD_MS},
                "hop": {"unfinished_max": unfinished_max},
            },
        }
    )


def machine(lanes=4, slots=0, **bounds):
    """A dispatcher with empty lanes, and a worker of `llama` where there are slots."""
    made = Dispatcher(config_of(**bounds))
    for n in range(lanes):
        made.handle(LaneSeen(n, None, 0), NOW)
    if slots:
        plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0], "slots": slots, "max_context": 4_096}
        made.handle(StatusSeen(EngineStatus(engine="llama", kind="transformer", pool="llama", worker="w", **plain)), NOW)
    return made


def request(offset, tenant="a", service_class="batch", model="llama"):
    value = {"id": f"{tenant}{offset}", "tenant": tenant, "prompt": "hello", "model": model, "fallback": "none"}
    record = Record(f"forebay.requests.{service_class}", 0, offset, None, msgspec.json.encode(value), (), NOW)
    return admit(record, service_class, 1 << 20)


def from_lane(effect, offset):
    """The record that a diverted request becomes."""
    item = effect.item
    carried = (*item.headers, (headers.ENVELOPE, codecs.encode_envelope(item.envelope)))
    return readmit(Record("forebay.lanes", effect.partition, offset, None, item.value, carried, NOW + 9))


def come(made, *items, now=NOW):
    return [effect for item in items for effect in made.handle(Arrived(item), now)]


def test_a_surplus_is_diverted_as_it_came_and_served_when_it_comes_back():
    made = machine()
    diverted = come(made, *(request(n) for n in range(5)))
    assert [(type(effect), effect.item.work[1], effect.partition) for effect in diverted] == [(Divert, n, 0) for n in (2, 3, 4)]
    assert made.queued == 2
    for n, effect in enumerate(diverted):
        made.handle(Sent(effect.item.work, n), NOW)
    assert not made.takes(0)
    plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0], "slots": 2, "max_context": 4_096}
    made.handle(StatusSeen(EngineStatus(engine="llama", kind="transformer", pool="llama", worker="w", **plain)), NOW)
    assert [effect.item.work[1] for effect in made.handle(Tick(), NOW)] == [0, 1]
    assert made.takes(0)
    back = from_lane(diverted[0], 0)
    assert back.envelope == diverted[0].item.envelope
    assert come(made, back) == []
    (effect,) = made.handle(Tick(), NOW)
    assert isinstance(effect, Forward)
    assert effect.item is back


def test_nothing_is_diverted_while_engines_have_room():
    made = machine(slots=1_000)
    effects = come(made, *(request(n) for n in range(390))) + made.handle(Tick(), NOW)
    assert [(type(effect), effect.item.work[1]) for effect in effects] == [(Forward, n) for n in range(390)]


def test_what_is_refused_never_goes_to_a_lane():
    made = machine()
    come(made, *(request(n) for n in range(3)))
    (effect,) = come(made, request(3, model="nobody"))
    assert isinstance(effect, Finish)


def test_interactive_that_finds_no_lane_is_refused_with_a_time_to_ask_again():
    made = machine(lanes=1)
    come(made, *(request(n, service_class="interactive") for n in range(3)))
    effects = come(made, *(request(10 + n, "b", "interactive") for n in range(3)))
    (effect,) = effects
    assert (effect.status, effect.error.code, effect.error.param) == ("rejected", ErrorCode.CAPACITY_EXCEEDED, "tenant")
    assert effect.error.retry_after_ms > 0


def test_what_was_cancelled_in_a_lane_ends_when_it_is_read_and_holds_up_nobody():
    made = machine()
    diverted = come(made, *(request(n) for n in range(900)))
    for n, effect in enumerate(diverted):
        made.handle(Sent(effect.item.work, n), NOW)
    for work in [request(n).work for n in range(2)]:
        made.handle(Dropped(work), NOW)
    for n, effect in enumerate(diverted):
        assert made.takes(effect.partition), "what is cancelled does not count"
        (ended,) = made.handle(Arrived(from_lane(effect, n), is_cancelled=True), NOW)
        assert (ended.status, ended.error.code) == ("cancelled", ErrorCode.CANCELLED)
    assert made.queued == 0
    made.handle(LaneRead(0, len(diverted)), NOW)
    assert come(made, request(1_000)) == []


@pytest.mark.parametrize("passed", [True, False])
def test_what_waits_long_while_others_pass_moves_with_its_bytes_and_leaves_the_queue(passed):
    made = machine(slots=400, unfinished_max=4)
    stuck = request(0, model="opt")
    value = stuck.value
    come(made, stuck)
    for n in range(1, 2 + HOLD_SPAN * 4 if passed else 50):
        (effect,) = come(made, request(n, "b")) + made.handle(Tick(), NOW)
        made.handle(Sent(effect.item.work, n), NOW)
    effects = made.handle(Tick(), NOW + HOLD_MS)
    if not passed:
        assert effects == []
        return
    (effect,) = effects
    assert isinstance(effect, Divert)
    assert (effect.item.work, effect.item.value) == (stuck.work, value)
    assert made.queued == 0
    made.handle(Sent(effect.item.work, 0), NOW)
    assert come(made, from_lane(effect, 0)) == []
    assert made.queued == 1
