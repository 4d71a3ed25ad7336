"""What holds of lanes whatever comes: a model of the partitions, of what is under way, and of terms that end in a crash.

Records of three tenants in two classes lie in two request partitions and one of retries; a lane is a log whose
transactions leave markers. Everything ends late, in any order, and a divert may be durable without anybody knowing where.
"""

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.transport.protocol import TopicPartition
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.lanes import SPARE, Lanes, Refusal
from schemas.config import HopConfig
from schemas.messages import Envelope
from schemas.policy import LanesConfig

SOURCES = [TopicPartition("requests", 0), TopicPartition("requests", 1), TopicPartition("retries", 0)]
OWNERS = [(service_class, tenant) for service_class in ("batch", "interactive") for tenant in "abc"]
LARGE = 40


class Log:
    """One partition: at each offset a record (owner, bytes, number, where it came from first), or None for a marker."""

    def __init__(self):
        self.entries, self.finished, self.position = [], set(), 0

    @property
    def end(self):
        return len(self.entries)

    def unfinished(self):
        return [n for n, entry in enumerate(self.entries) if entry is not None and n not in self.finished]

    def skip(self):
        """Pass over what nobody gets."""
        while self.position < self.end and (self.entries[self.position] is None or self.position in self.finished):
            self.position += 1


class World:
    def __init__(self, lanes, records_max, unfinished_max, *, marks, config=None):
        self.config = config or LanesConfig(records_max=records_max, bytes_max=100)
        self.hop = HopConfig(unfinished_max=unfinished_max, in_flight_max=60, in_flight_bytes_max=2_000)
        self.marks, self.now_ms, self.made = marks, 0, 0
        self.logs = {tp: Log() for tp in SOURCES}
        self.lane_logs = {TopicPartition("lanes", n): Log() for n in range(lanes)}
        self.everything = {**self.logs, **self.lane_logs}
        self.ended, self.refused, self.order = set(), 0, {}
        self.moved = set()  # held back for too long, and put behind what was diverted meanwhile
        self.begin()

    # -- terms ---------------------------------------------------------------------------------------------------------

    def begin(self):
        """A new term: whatever is not finished is read again."""
        self.lanes = Lanes(self.config, self.hop, "lanes")
        self.hand, self.ending, self.diverts = {}, {}, {}
        self.order, self.is_shared = {}, False
        for log in self.everything.values():
            log.position = 0
        for tp, log in self.lane_logs.items():
            left = log.unfinished()
            owner = log.entries[left[0]][0] if left else None
            self.lanes.seen(tp.partition, owner, log.end, left[0] if left else log.end)
            log.position = left[0] if left else log.end
        self.has_inherited = any(log.unfinished() for log in self.everything.values())

    # -- what happens ---------------------------------------------------------------------------------------------------

    def produce(self, owner, source, size):
        self.made += 1
        self.logs[source].entries.append((owner, size, self.made, source))

    def read(self, tp, *, cancelled=False):
        """Take in the next record of a partition, where it may come; whether one did."""
        self.tell_idle()
        log = self.everything[tp]
        log.skip()
        in_hand = sum(work[0] == tp for work in self.hand)
        if log.position >= log.end or in_hand >= self.hop.unfinished_max:
            return False
        if tp in self.lane_logs and not self.lanes.takes(tp.partition):
            return False
        offset, log.position = log.position, log.position + 1
        owner, size, number, source = log.entries[offset]
        item = item_of(owner, tp, offset, size)
        self.lanes.came(item)
        if cancelled:
            self.ending[item.work] = number
            return True
        free, had, homes = self.has_free_lane(owner), self.in_memory(owner), self.lanes.owners()
        waiting = self.lanes.count(*owner)
        place = self.lanes.place(item, self.now_ms)
        if place is None:
            self.hand[item.work] = item, number
            self.check_order(owner, source, number)
        elif place is Refusal.NO_LANE:
            assert owner[0] == "interactive"
            assert tp.topic == "requests", "what was accepted once is not refused later"
            assert not free, "a lane was free"
            assert had, "who has nothing in hand is not refused"
            self.refused += 1
            self.ending[item.work] = number
        else:
            assert tp not in self.lane_logs, "what comes from a lane does not go to one"
            is_full = in_hand >= self.hop.unfinished_max - self.hop.unfinished_max // SPARE
            assert had or waiting or is_full or self.has_inherited, "who has nothing anywhere gets in"
            is_new = owner not in homes.get(place, ())
            assert not (waiting and is_new), "it has a lane"
            self.divert(item, number, place, free=free and is_new)
        return True

    def divert(self, item, number, place, *, free=False):
        owner = item.envelope.service_class, item.envelope.tenant
        others = {self.lane_logs[lane_of(place)].entries[n][0] for n in self.lane_logs[lane_of(place)].unfinished()}
        others |= {o for _, _, lane, o in self.diverts.values() if lane == place}
        assert all(other[0] == owner[0] for other in others), "classes do not mix"
        if free and not self.has_inherited:
            assert others <= {owner}, "it shares a lane although one was free"
        self.is_shared |= not others <= {owner}
        self.diverts[item.work] = item, number, place, owner

    def dispatch(self, n):
        if self.hand:
            work = sorted(self.hand)[n % len(self.hand)]
            item, number = self.hand.pop(work)
            self.lanes.left(item)
            self.ending[work] = number

    def commit_end(self, n):
        if self.ending:
            work = sorted(self.ending)[n % len(self.ending)]
            number = self.ending.pop(work)
            assert number not in self.ended, "ended twice"
            self.ended.add(number)
            self.everything[work[0]].finished.add(work[1])
            self.lanes.sent(work, 0)

    def commit_divert(self, n, *, is_lost=False):
        if not self.diverts:
            return
        sources = sorted({work[0] for work in self.diverts})
        work = min(work for work in self.diverts if work[0] == sources[n % len(sources)])  # a partition commits in order
        item, number, place, owner = self.diverts.pop(work)
        log = self.lane_logs[lane_of(place)]
        log.entries.append((owner, len(item.value), number, self.everything[work[0]].entries[work[1]][3]))
        offset = log.end - 1
        if self.marks:
            log.entries.append(None)
        self.everything[work[0]].finished.add(work[1])
        self.lanes.sent(work, None if is_lost else offset)

    def wait(self, by_ms):
        self.now_ms += by_ms
        for item, lane in self.lanes.held_back(self.now_ms):
            _, number = self.hand.pop(item.work)
            self.lanes.left(item)
            self.divert(item, number, lane)
            self.moved.add(number)

    def tell_idle(self):
        for tp, log in self.lane_logs.items():
            log.skip()
            if not any(work[0] == tp for work in (*self.hand, *self.ending, *self.diverts)):
                self.lanes.read(tp.partition, log.position)

    # -- what holds ---------------------------------------------------------------------------------------------------

    def in_memory(self, owner):
        return [item for item, _ in self.hand.values() if owner == (item.envelope.service_class, item.envelope.tenant)]

    def has_free_lane(self, owner):
        """Whether nothing at all is in some lane, and the owner's class may take one more."""
        empty = [
            tp
            for tp, log in self.lane_logs.items()
            if not log.unfinished() and all(lane != tp.partition for _, _, lane, _ in self.diverts.values())
        ]
        count = len(self.lane_logs)
        most = count - count // 4 if owner[0] == "batch" else max(1, count - 1)
        used = sum(any(log.entries[n][0][0] == owner[0] for n in log.unfinished()) for log in self.lane_logs.values())
        used += sum(any(lane == tp.partition and o[0] == owner[0] for _, _, lane, o in self.diverts.values()) for tp in empty)
        under_way = {lane for _, _, lane, o in self.diverts.values() if o[0] == owner[0]} - {tp.partition for tp in empty}
        used += sum(not self.lane_logs[lane_of(lane)].unfinished() for lane in under_way)
        return bool(empty) and used < most

    def check_order(self, owner, source, number):
        """An owner's fresh requests of one partition come to memory in their order, also by way of a lane."""
        if source.topic != "retries" and number not in self.moved:
            assert number > self.order.get((owner, source), 0) or self.has_inherited
            self.order[owner, source] = number

    def check(self):
        counted = dict.fromkeys(OWNERS, 0)
        homes = [owner for owners in self.lanes.owners().values() for owner in owners]
        assert len(homes) == len(set(homes)), "an owner has two lanes"
        for tp, log in self.lane_logs.items():
            sizes = [len(item.value) for work, (item, _) in self.hand.items() if work[0] == tp]
            assert len(sizes) <= self.config.records_max
            assert sum(sizes) < self.config.bytes_max + LARGE
            for n in log.unfinished():
                if n >= log.position:
                    counted[log.entries[n][0]] += 1
        for *_, owner in self.diverts.values():
            counted[owner] += 1
        for owner in OWNERS:
            held = self.in_memory(owner)
            if len(self.lane_logs) > 1 and not self.has_inherited:
                topics = {"requests"} if self.is_shared else {"requests", "lanes"}  # one that is shared has a bound of its own
                fresh = [item for item in held if item.work[0].topic in topics]
                assert len(fresh) <= self.config.records_max
                assert sum(len(item.value) for item in fresh) < self.config.bytes_max + LARGE
                if owner[0] == "batch" and not self.is_shared:
                    assert len(held) <= 2 * self.config.records_max
            known = self.lanes.count(*owner)
            assert known == counted[owner] if not self.has_inherited else known <= counted[owner]

    def settle(self):
        """Let all that is in hand come to its end."""
        while self.diverts:
            self.commit_divert(0)
        while self.hand:
            self.dispatch(0)
        while self.ending:
            self.commit_end(0)
        self.tell_idle()

    def drain(self):
        """Let everything come to its end: nothing is stuck, and every lane is free in the end."""
        for _ in range(20 * (self.made + 1)):
            for tp in self.everything:
                self.read(tp)
            self.settle()
            if len(self.ended) == self.made:
                break
        assert self.ended == set(range(1, self.made + 1))
        assert self.lanes.owners() == {}
        assert all(self.lanes.count(*owner) == 0 for owner in OWNERS)


def lane_of(number):
    return TopicPartition("lanes", number)


def item_of(owner, tp, offset, size):
    origin = (*tp, offset) if tp.topic == "requests" else ("requests", 9, offset)
    envelope = Envelope(f"{tp}{offset}", owner[1], owner[0], origin, 0)
    return Item((tp, offset), envelope, Demand("m", "auto", "any"), 1.0, 1, NEVER_MS, b"x" * size, ())


STEPS = {
    "produce": 6,
    "burst": 3,
    "read": 8,
    "read_all": 2,
    "cancelled": 1,
    "dispatch": 8,
    "commit_end": 8,
    "commit_divert": 8,
    "lose_divert": 1,
    "settle": 1,
    "wait": 1,
    "crash": 0.2,
}
bounds = {
    "lanes": st.sampled_from((1, 2, 4, 5, 8)),
    "records_max": st.sampled_from((1, 2, 4)),
    "unfinished_max": st.sampled_from((1, 3, 10, 17)),
    "marks": st.booleans(),
}


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), crashes=st.booleans(), **bounds)
@example(seed=3585, crashes=False, lanes=5, records_max=4, unfinished_max=3, marks=False)  # one moves behind its followers
def test_whatever_comes_bounds_hold_owners_are_apart_and_every_lane_is_free_in_the_end(seed, crashes, **given_bounds):
    world, dice = World(**given_bounds), random.Random(seed)
    names = [name for name in STEPS if crashes or name != "crash"]
    for name in dice.choices(names, [STEPS[name] for name in names], k=300):
        step(world, name, dice)
        world.check()
    world.drain()


def step(world, name, dice):
    partitions, n = list(world.everything), dice.randrange(1_000)
    if name in {"produce", "burst"}:
        owner, source, size = dice.choice(OWNERS), dice.choice(SOURCES), dice.choice((1, LARGE))
        for _ in range(1 if name == "produce" else dice.randint(1, 15)):
            world.produce(owner, source, size)
    elif name in {"read", "cancelled"}:
        world.read(partitions[n % len(partitions)], cancelled=name == "cancelled")
    elif name == "read_all":
        while [tp for tp in partitions if world.read(tp)]:
            pass
    elif name == "settle":
        world.settle()
    elif name == "lose_divert":
        world.commit_divert(n, is_lost=True)
    elif name == "wait":
        world.wait(dice.randrange(90_000))
    elif name == "crash":
        world.begin()
    else:
        getattr(world, name)(n)
