"""Slots under random arrivals, ends and drops: bounds hold, no slot idles that somebody may take, everybody gets one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_consumers.core.lifecycle import Abort, Dropped, Ended, Lifecycle, Run, Taken, order


class Model:
    """What runs and what waits, told from outside."""

    def __init__(self, slots, reserved):
        self.machine = Lifecycle(slots, reserved)
        self.slots, self.batch_slots = slots, slots - self.machine.reserved
        self.waiting, self.running, self.ran = {}, {}, []
        self.alone, self.places = {}, {}  # ticket -> how many had begun when it was read

    def tell(self, event):
        for effect in self.machine.handle(event):
            if isinstance(effect, Run):
                self.running[effect.ticket] = self.waiting.pop(effect.ticket)
                self.ran.append(effect.ticket)
                assert effect.alone == self.alone[effect.ticket]
            else:
                assert effect == Abort(event.ticket)
        self.check()

    def take(self, ticket, service_class, alone, deadline):
        self.places[ticket] = len(self.ran)
        self.waiting[ticket], self.alone[ticket] = service_class, alone
        self.tell(Taken(ticket, order(service_class, deadline), alone))

    def end(self, ticket):
        del self.running[ticket]
        self.tell(Ended(ticket))

    def drop(self, ticket):
        self.waiting.pop(ticket, None)
        self.tell(Dropped(ticket))

    def count(self, held, service_class):
        return sum(one == service_class for one in held.values())

    def check(self):
        assert (self.machine.running, self.machine.waiting) == (len(self.running), len(self.waiting))
        assert len(self.running) <= self.slots
        assert self.count(self.running, "batch") <= self.batch_slots
        if any(self.alone[ticket] for ticket in self.running):
            assert len(self.running) == 1
            return
        if len(self.running) == self.slots:
            return
        if any(self.alone[ticket] for ticket in self.waiting):
            assert self.running, "a suspect may run where nothing else does"
        else:
            assert "interactive" not in self.waiting.values(), "a slot is free, and an interactive request waits"
            is_free = self.count(self.running, "batch") < self.batch_slots
            assert not (is_free and self.waiting), "a slot that batch may take is free, and batch waits"

    def passed(self, ticket):
        """How many that were read later began before it."""
        return sum(other > ticket for other in self.ran[self.places[ticket] : self.ran.index(ticket)])


CLASSES = st.sampled_from(["interactive", "batch"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), CLASSES, st.sampled_from([False] * 6 + [True]), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9), st.none(), st.none()),
        st.tuples(st.just("drop"), st.integers(0, 9), st.none(), st.none()),
    ),
    max_size=120,
)


@given(st.integers(1, 9), st.integers(0, 10), STEPS)
def test_batch_leaves_the_last_slots_and_none_idles_that_somebody_may_take(slots, reserved, steps):
    model, dropped = Model(slots, reserved), set()
    assert 1 <= model.batch_slots <= slots
    for ticket, (what, which, alone, deadline) in enumerate(steps):
        if what == "take":
            model.take(ticket, which, alone, deadline)
        elif what == "end" and model.running:
            model.end(sorted(model.running)[which % len(model.running)])
        elif what == "drop" and model.waiting:
            gone = sorted(model.waiting)[which % len(model.waiting)]
            dropped.add(gone)
            model.drop(gone)
    while model.running:
        model.end(min(model.running))
    taken = {n for n, (what, *_) in enumerate(steps) if what == "take"}
    assert sorted(model.ran) == sorted(taken - dropped), "each that was not dropped runs once"
    if reserved == 0:
        assert all(model.passed(ticket) <= slots + len(dropped) for ticket in model.ran)


@pytest.mark.parametrize(("slots", "reserved", "kept"), [(1, 0, 0), (1, 1, 0), (4, 1, 1), (4, 9, 3)])
def test_one_slot_is_always_left_to_batch(slots, reserved, kept):
    machine = Lifecycle(slots, reserved)
    assert machine.reserved == kept
    for ticket in range(slots):
        machine.handle(Taken(ticket, order("batch", 0)))
    assert machine.running == slots - kept
    assert len(machine.handle(Taken(99, order("interactive", 0)))) == min(kept, 1)
