"""Turns at a shared device: shares in proportion to weights inside the known bound, nobody starves, the dead are passed over."""

import random
from dataclasses import dataclass, field
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from engine_consumers.core.slices import Table
from schemas.config import Share

SLICE_NS = 10_000_000
STEPS = 400
NAMES = "abcde"

weights = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 10.0]), min_size=2)
longest_ns = st.sampled_from([2_000_000, 15_000_000, 40_000_000])
seeds = st.integers(0, 2**32)


def joined(weights: dict[str, float], share_of: Share = "time") -> Table:
    """A device's table with so many seats."""
    table = Table()
    for name, weight in weights.items():
        table.join(name, weight, share_of)
    return table


@dataclass
class Device:
    """Engines that make steps on one device, one after another."""

    weights: dict[str, float]
    longest_ns: int
    dice: random.Random
    share_of: Share = "time"
    now_ns: int = 0
    used_ns: dict[str, int] = field(default_factory=dict)
    held: tuple[str | None, int] = (None, 0)

    def __post_init__(self) -> None:
        self.table = joined(self.weights, self.share_of)
        self.tokens = dict.fromkeys(self.weights, 0)
        self.unbooked = 0
        self.most = dict.fromkeys(self.weights, 0)  # tokens in one slice

    def ask(self, name: str) -> None:
        self.table.ask(name, self.now_ns)

    def step(self) -> None:
        """Whoever holds the device makes a step."""
        name = self.table.holder
        assert name is not None
        if self.held[0] != name:
            self.now_ns += self.dice.randint(0, self.longest_ns)  # until it has woken up nobody uses the device
            self.ask(name)
            self.held = name, self.now_ns
        length_ns = self.dice.randint(1, self.longest_ns)
        self.now_ns += length_ns
        self.used_ns[name] = self.used_ns.get(name, 0) + length_ns
        tokens = self.dice.randint(0, 64)
        self.tokens[name] += tokens
        self.unbooked += tokens
        self.most[name] = max(self.most[name], self.unbooked)
        if self.now_ns - self.held[1] >= SLICE_NS:
            self.table.boundary(name, self.now_ns, self.unbooked)
            self.unbooked = 0
            self.held = (name, self.now_ns) if self.table.holder == name else (None, 0)

    def rest(self, name: str) -> None:
        if self.table.holder == name:
            self.table.rest(name, self.now_ns, self.unbooked)
            self.unbooked = 0
        else:
            self.table.rest(name, self.now_ns)

    def apart(self, one: str, other: str, since: dict[str, int]) -> float:
        """By how much two differ in what they used since then, each by its weight, as a share of what is allowed."""
        used = {name: (self.used_ns.get(name, 0) - since.get(name, 0)) / self.weights[name] for name in (one, other)}
        turn_ns = SLICE_NS + self.longest_ns
        return abs(used[one] - used[other]) / (turn_ns / self.weights[one] + turn_ns / self.weights[other])


@given(weights, longest_ns, seeds)
def test_those_that_always_want_it_share_it_by_weight(weights, longest_ns, seed):
    device = Device(weights, longest_ns, random.Random(seed))
    for name in weights:
        device.ask(name)
    for _ in range(STEPS):
        device.step()
        assert all(device.apart(*pair, {}) <= 1 for pair in combinations(weights, 2))


@given(weights, longest_ns, seeds)
def test_tokens_are_shared_by_weight_whatever_time_they_take(weights, longest_ns, seed):
    device = Device(weights, longest_ns, random.Random(seed), "tokens")
    for name in weights:
        device.ask(name)
    for _ in range(STEPS):
        device.step()
        for pair in combinations(weights, 2):
            used = [device.tokens[name] / weights[name] for name in pair]
            assert abs(used[0] - used[1]) <= sum(device.most[name] / weights[name] for name in pair) + 1e-6
    seats = device.table.seats
    assert sum(seat.used_tokens for seat in seats.values()) == sum(device.tokens.values()) - device.unbooked


@given(weights, longest_ns, seeds)
def test_idleness_saves_nothing_up_and_costs_nobody_else(weights, longest_ns, seed):
    """From any moment on two that both go on wanting it share it by weight, whatever each did before."""
    device = Device(weights, longest_ns, random.Random(seed))
    both_since: dict[tuple[str, str], dict[str, int]] = {}
    wanting: set[str] = set()
    for _ in range(STEPS):
        if device.dice.random() < 0.05:
            name = device.dice.choice(sorted(weights))
            if name in wanting:
                wanting.remove(name)
                both_since = {pair: since for pair, since in both_since.items() if name not in pair}
                device.rest(name)
            else:
                both_since |= {(name, other): dict(device.used_ns) for other in wanting}
                wanting.add(name)
                device.ask(name)
        assert (device.table.holder in wanting) if wanting else device.table.holder is None
        if wanting:
            device.step()
        assert all(device.apart(*pair, since) <= 1 for pair, since in both_since.items())


@given(weights, longest_ns, seeds)
def test_the_bound_is_that_of_the_turns_and_not_of_the_time_before(weights, longest_ns, seed):
    """One that ran alone for long owes nothing for it, and one that slept is owed nothing."""
    device = Device(weights, longest_ns, random.Random(seed))
    late, *others = sorted(weights)
    device.ask(others[0])
    for _ in range(STEPS):
        device.step()
    since = dict(device.used_ns)
    for name in (late, *others[1:]):
        device.ask(name)
    for _ in range(STEPS):
        device.step()
        assert all(device.apart(*pair, since) <= 1 for pair in combinations(weights, 2))


@given(weights, st.sets(st.sampled_from(NAMES)))
def test_the_dead_are_passed_over(weights, dead):
    table = joined(weights)
    for name in weights:
        table.ask(name, 0)
    first = table.holder
    table.rest(first, 1)
    table.pass_over_dead(lambda name: name not in dead, 2)
    alive = weights.keys() - dead - {first}
    assert table.holder in alive if alive else table.holder is None


def test_one_that_lost_its_turn_changes_nothing_by_ending_it():
    table = joined({"a": 1.0, "b": 1.0})
    assert table.ask("a", 0)
    assert not table.ask("b", 5)
    table.rest("a", 10)  # it was stopped
    assert table.holder == "b"
    table.boundary("a", 20)
    assert (table.holder, table.seats["a"].used_ns, table.seats["b"].used_ns) == ("b", 10, 0)
    assert table.ask("b", 25)  # it has woken up
    table.boundary("b", 28)
    assert table.seats["b"].used_ns == 3
    table.leave("b", 30)
    assert (table.holder, list(table.seats)) == (None, ["a"])
    assert table.ask("a", 40)
