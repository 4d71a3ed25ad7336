"""Lanes by themselves: who waits where, one rule at a time."""

import itertools

import pytest

from broker.transport.protocol import TopicPartition
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.lanes import HOLD_SPAN, Lanes, Refusal
from schemas.config import HopConfig
from schemas.messages import Envelope
from schemas.policy import LanesConfig

REQUESTS, RETRIES = TopicPartition("requests", 0), TopicPartition("retries", 0)
A, B, C = ("batch", "a"), ("batch", "b"), ("batch", "c")
ASKS, OTHER = ("interactive", "a"), ("interactive", "b")


class World:
    """Lanes, and how requests come to them and go."""

    def __init__(self, lanes=4, records_max=2, **hop):
        self.lanes = Lanes(LanesConfig(records_max=records_max, bytes_max=1_000), HopConfig(**hop), "lanes")
        for n in range(lanes):
            self.lanes.seen(n, None, 0, 0)
        self.offsets = itertools.count()

    def item(self, owner, tp=REQUESTS, size=1, offset=None):
        offset = next(self.offsets) if offset is None else offset
        origin = (*tp, offset) if tp.topic == "requests" else ("requests", 7, offset)
        envelope = Envelope("r", owner[1], owner[0], origin, 0)
        return Item((tp, offset), envelope, Demand("m", "auto", "any"), 1.0, 1, NEVER_MS, b"x" * size, ())

    def come(self, owner, tp=REQUESTS, size=1, now_ms=0, offset=None):
        """A record is read; gives it and where it is to wait."""
        item = self.item(owner, tp, size, offset)
        self.lanes.came(item)
        return item, self.lanes.place(item, now_ms)

    def places(self, owner, count, tp=REQUESTS, size=1):
        return [self.come(owner, tp, size)[1] for _ in range(count)]

    def divert(self, owner, lane, offset):
        """A request of the owner lies in a lane, at that offset."""
        item, place = self.come(owner)
        assert place == lane
        self.lanes.sent(item.work, offset)

    def back(self, owner, lane, offset):
        """It is read there."""
        assert self.lanes.takes(lane)
        item, place = self.come(owner, TopicPartition("lanes", lane), offset=offset)
        assert place is None
        return item

    def fill(self, owner):
        """The owner has as much in hand as it may."""
        found = [self.come(owner) for _ in range(2)]
        assert [place for _, place in found] == [None, None]
        return [item for item, _ in found]


def test_a_surplus_waits_in_a_lane_and_what_comes_later_follows_until_all_of_it_was_read():
    world = World()
    held = world.fill(A)
    for offset in range(3):
        world.divert(A, 0, offset)
    assert world.lanes.count(*A) == 3
    assert not world.lanes.takes(0), "its owner has as much in hand as it may"
    for item in held:
        world.lanes.left(item)
    world.divert(A, 0, 3)  # it would have room, and goes behind the others
    back = [world.back(A, 0, 0), world.back(A, 0, 1)]
    assert not world.lanes.takes(0)
    for item in back:
        world.lanes.left(item)
    back = [world.back(A, 0, 2), world.back(A, 0, 3)]
    assert world.lanes.count(*A) == 0
    world.lanes.left(back[0])
    assert world.come(A)[1] is None, "nothing of it is in its lane any more"
    assert world.lanes.owners() == {0: [A]}, "but not all of it has ended"
    world.lanes.left(back[1])
    world.lanes.read(0, 4)
    assert world.lanes.owners() == {}


def test_others_get_in_however_much_one_tenant_sends():
    world = World()
    assert world.places(A, 1_000)[2:] == [0] * 998
    assert world.places(B, 3) == [None, None, 1]
    assert world.places(OTHER, 3) == [None, None, 2]
    assert world.come(ASKS)[1] is None, "a tenant's classes are apart"


def test_a_lane_is_not_free_while_something_is_on_its_way_there():
    world = World()
    world.fill(A)
    first, place = world.come(A)
    world.lanes.sent(first.work, 0)
    second, _ = world.come(A)
    back = world.item(A, TopicPartition("lanes", place), offset=0)
    world.lanes.came(back)  # cancelled: it ends at once
    world.lanes.read(place, 1)
    assert world.lanes.owners() == {place: [A]}
    world.fill(B)
    assert world.come(B)[1] != place
    world.lanes.sent(second.work, 5)
    world.lanes.read(place, 5)
    assert world.lanes.owners()[place] == [A], "it lies at the very position that is read next"
    world.lanes.came(world.item(A, TopicPartition("lanes", place), offset=5))
    world.lanes.read(place, 6)
    assert place not in world.lanes.owners()


def test_a_lane_whose_end_nobody_knows_is_free_only_once_as_much_was_read_as_was_sent():
    world = World()
    world.fill(A)
    item, place = world.come(A)
    world.lanes.sent(item.work, None)
    world.lanes.read(place, 0)
    assert world.lanes.owners() == {place: [A]}
    world.lanes.came(world.item(A, TopicPartition("lanes", place), offset=0))
    world.lanes.read(place, 1)
    assert world.lanes.owners() == {}


def test_retries_do_not_go_behind_what_is_younger_but_for_a_surplus():
    world = World()
    world.fill(A)
    world.divert(A, 0, 0)
    assert world.places(A, 4, RETRIES) == [None, None, 0, 0], "twice as many are held for their sake"


def test_batch_leaves_a_quarter_of_the_lanes_and_then_shares_the_shortest():
    world = World(lanes=4)
    for tenant in "abc":
        world.fill(("batch", tenant))
    assert [world.places(("batch", tenant), 3 - n) for n, tenant in enumerate("abc")] == [[0, 0, 0], [1, 1], [2]]
    world.fill(("batch", "d"))
    assert world.come(("batch", "d"))[1] == 2
    assert world.lanes.owners()[2] == [C, ("batch", "d")]
    world.fill(ASKS)
    assert world.come(ASKS)[1] == 3


def test_interactive_leaves_one_lane_and_is_then_refused_but_for_what_was_accepted_before():
    world = World(lanes=2)
    world.fill(ASKS)
    assert world.come(ASKS)[1] == 0
    world.fill(OTHER)
    assert world.come(OTHER)[1] is Refusal.NO_LANE
    assert world.places(OTHER, 3, RETRIES) == [None, None, 0], "a retry shares instead"
    world.fill(A)
    assert world.come(A)[1] == 1
    assert World(lanes=0).places(A, 9) == World(lanes=0).places(ASKS, 9) == [None] * 9, "where there are no lanes"


def test_who_has_nothing_left_in_a_lane_that_is_shared_may_get_one_of_its_own():
    world = World(lanes=1)
    held = world.fill(A) + world.fill(B)
    world.divert(A, 0, 0)
    world.divert(B, 0, 1)
    assert world.lanes.owners() == {0: [A, B]}
    for item in held:
        world.lanes.left(item)
    world.lanes.left(world.back(A, 0, 0))
    assert world.lanes.owners() == {0: [B]}
    world.lanes.left(world.back(B, 0, 1))
    assert world.lanes.owners() == {0: [B]}, "it is B's alone now, until it is empty"


def test_who_shares_the_lane_of_one_that_has_nothing_unread_there_has_it_alone():
    world = World(lanes=1)
    held = world.fill(A)
    world.divert(A, 0, 0)
    for item in held:
        world.lanes.left(item)
    world.back(A, 0, 0)
    world.fill(B)
    world.divert(B, 0, 1)
    assert world.lanes.owners() == {0: [B]}


def test_near_the_bound_of_a_partitions_ledger_only_newcomers_are_held():
    world = World(records_max=100, unfinished_max=40)
    assert [place for place in world.places(A, 40) if place is not None] == [0] * 10
    tenants = [("batch", f"t{n}") for n in range(8)]
    assert [world.places(owner, 2)[0] for owner in tenants] == [None] * 8
    assert len(world.lanes.owners()) == 3
    assert world.come(tenants[0], TopicPartition("requests", 1))[1] == 1, "it has a lane already"
    other = ("batch", "elsewhere")
    assert [world.come(other, TopicPartition("requests", 1))[1] for _ in range(5)] == [None] * 5
    assert world.come(other)[1] == 2, "the last places stay free, so that the partition is read on"
    assert world.come(B)[1] == 1, "or goes to the shortest lane of its class"


def test_from_half_of_a_partitions_ledger_on_nobody_takes_more_than_a_fair_share():
    world = World(records_max=100, unfinished_max=40)
    assert world.places(A, 20) == [None] * 20
    assert world.places(B, 16) == [None] * 10 + [0] * 6
    assert world.places(C, 2) == [None, 1]


def test_bytes_are_shared_before_the_hop_stops():
    world = World(records_max=100, in_flight_bytes_max=1_000)
    assert world.places(A, 10, size=100) == [None] * 7 + [0] * 3
    assert world.places(B, 2, size=100) == [None, 1], "who has none in hand gets in"
    assert world.places(C, 2, size=1) == [None, 2]
    assert not world.lanes.takes(0)


def test_a_record_larger_than_a_tenants_bound_is_held_where_it_is_the_only_one():
    world = World()
    assert world.places(A, 2, size=5_000) == [None, 0]


@pytest.mark.parametrize(("waited_ms", "passed", "moves"), [(60_000, 1_000, True), (59_999, 1_000, False), (60_000, 98, False)])
def test_what_keeps_a_partitions_position_back_moves_to_a_lane(waited_ms, passed, moves):
    assert HOLD_SPAN * 4 == 100
    world = World(unfinished_max=4)
    stuck, _ = world.come(A, now_ms=1)
    for _ in range(passed):
        item, _ = world.come(B, now_ms=waited_ms)
        world.lanes.left(item)
    late, _ = world.come(C, now_ms=waited_ms)
    assert world.lanes.held_back(1 + waited_ms) == ([(stuck, 0)] if moves else [])
    assert world.lanes.held_back(1 + waited_ms) == [], "told once"
    assert world.lanes.owners() == ({0: [A]} if moves else {})
    assert late.value


def test_after_a_takeover_a_lane_belongs_to_the_owner_of_its_first_unfinished_record():
    world = World(lanes=0)
    world.lanes.seen(0, A, 10, 4)
    world.lanes.seen(1, None, 7, 7)
    assert world.lanes.owners() == {0: [A]}
    world.divert(A, 0, 10)
    assert world.lanes.count(*A) == 1, "at least"
    world.fill(B)
    world.divert(B, 1, 8)
    for offset in range(4, 10):
        world.lanes.left(world.back(A, 0, offset))
    assert world.lanes.count(*A) == 1
    world.divert(A, 0, 12)
    world.lanes.left(world.back(A, 0, 10))
    world.lanes.left(world.back(A, 0, 12))
    assert world.lanes.count(*A) == 0
    world.lanes.read(0, 14)
    assert world.lanes.owners() == {1: [B]}


def test_after_a_takeover_others_may_lie_in_a_lane_and_a_tenant_in_two():
    world = World(lanes=0)
    world.lanes.seen(0, A, 10, 4)
    world.lanes.seen(1, A, 10, 8)
    assert world.lanes.owners() == {0: [A], 1: []}
    world.back(B, 0, 4)
    world.back(B, 0, 5)
    assert not world.lanes.takes(0), "what comes from a lane is bounded, whoever's it is"
    world.fill(OTHER)
    assert world.come(OTHER)[1] is Refusal.NO_LANE, "the second is not free before it is empty"
    world.lanes.read(1, 10)
    assert world.come(OTHER)[1] == 1


def test_a_lane_is_looked_at_once():
    world = World(lanes=1)
    world.fill(A)
    world.divert(A, 0, 0)
    world.lanes.seen(0, None, 0, 0)
    assert world.lanes.owners() == {0: [A]}
