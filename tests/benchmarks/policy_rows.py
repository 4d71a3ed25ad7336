"""Rows 4 and 7: what a decision costs, against a list scan that decides the same, and how fair it is, against other orders.

Row 4 runs the dispatcher's own machine: requests arrive, a tick decides as many as twelve workers of three kinds have
room for, and what was decided is taken in as sent, outside of what is timed.

Row 7 drives the queues with random arrivals, weights, costs and capacity (`tests/fairness.py`) and measures the
greatest difference that any two tenants with something waiting came to over any stretch of time, in multiples of the
bound of start-time fair queueing. A token of one demand takes four times the engine time of one of the other, which is
what an order by tokens does not see.
"""

import gc
import time
from collections import deque
from collections.abc import Callable
from random import Random

from fairness import DRIVES, OTHER, Broken, share_among_tenants

from broker.transport.protocol import TopicPartition
from dispatcher.core import Arrived, Dispatcher, Sent, StatusSeen, Tick
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.shaping import Band
from schemas import EngineStatus, parse_config
from schemas.messages import Envelope

TENANTS, GROWTH = 1_000, (100, 1_000, 10_000, 100_000)
KINDS, WORKERS_EACH, SLOTS = ("transformer", "ssm", "moe"), 4, 100
STANDING = 2  # requests of each tenant
ROUNDS_EACH = 10  # ticks of one measurement, the first of which is not counted
SOURCE = TopicPartition("requests", 0)
ANYBODY = Demand("auto", "auto", "any")
NOW_MS = 1_000_000
RUNS, STEPS = 1_000, 1_000
MS_PER_TOKEN = {OTHER: 4.0}

CONFIG = parse_config(
    {
        "dispatcher": {"runway_factor": 1.0},
        "engines": {kind: {"kind": kind, "model": kind, "slots": SLOTS, "interactive_slots": 0} for kind in KINDS},
    }
)


class ScanQueue:
    """The same order kept in plain lists: whoever is next is looked for among all that wait."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Item]] = {}
        self._tags: dict[str, float] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, item: Item) -> None:
        waiting = self._waiting.setdefault(item.tenant, [])
        if not waiting:
            self._tags[item.tenant] = max(self._virtual, self._tags.get(item.tenant, 0.0))
        waiting.append(item)

    def head(self, blocked, _) -> Item | None:
        best = None
        for tenant, waiting in self._waiting.items():
            if waiting and (best is None or self._tags[tenant] < self._tags[best]):
                best = tenant if ("batch", waiting[0].demand) not in blocked else best
        return None if best is None else min(self._waiting[best], key=lambda item: item.deadline_ms)

    def serve(self, item: Item, cost_ms: float) -> Band:
        tenant = item.tenant
        self._virtual = self._tags[tenant]
        self._tags[tenant] += cost_ms
        self._waiting[tenant].remove(item)
        return Band.BORROWING


class Cell:
    """A dispatcher with so many tenants that all have something waiting."""

    def __init__(self, tenants: int, *, scans: bool = False) -> None:
        self.tenants, self.n, self.now_ms = tenants, 0, NOW_MS
        self.machine = Dispatcher(CONFIG)
        if scans:
            self.machine._queue = ScanQueue()
        self.arrive(STANDING * tenants)
        self.arrivals, self.decisions = [], []

    def arrive(self, count: int) -> float:
        """Let requests come in; gives the seconds that took."""
        events = [Arrived(self.item(self.n + n)) for n in range(count)]
        self.n += count
        began = time.perf_counter()
        for event in events:
            self.machine.handle(event, self.now_ms)
        return time.perf_counter() - began

    def item(self, n: int) -> Item:
        envelope = Envelope(f"r{n}", f"t{n * 7919 % self.tenants}", "batch", ("requests", 0, n), NOW_MS + n)
        return Item((SOURCE, n), envelope, ANYBODY, 100.0 + n % 7 * 50, 64, NEVER_MS, b"", (), None, 64.0)

    def round(self) -> tuple[float, float]:
        """Decide what there is room for; microseconds for each, of the decision and of an arrival."""
        self.now_ms += 100
        for kind in KINDS:
            for number in range(WORKERS_EACH):
                self.machine.handle(StatusSeen(self.status(kind, number)), self.now_ms)
        began = time.perf_counter()
        effects = self.machine.handle(Tick(), self.now_ms)
        decided = time.perf_counter() - began
        for effect in effects:
            self.machine.handle(Sent(effect.item.work, 0), self.now_ms)
        return decided / len(effects) * 1e6, self.arrive(len(effects)) / len(effects) * 1e6

    def status(self, kind: str, number: int) -> EngineStatus:
        return EngineStatus(
            engine=kind,
            kind=kind,
            pool=kind,
            worker=f"w{number}",
            epoch=1,
            updated_at_ms=self.now_ms,
            partitions=[number],
            positions={number: 1 << 60},
            slots=SLOTS,
            models=[kind],
        )

    def measure(self) -> tuple[float, float]:
        """Microseconds of a decision, and of one with the arrival of its request; the median of some ticks."""
        gc.collect()
        gc.disable()
        try:
            rounds = [self.round() for _ in range(ROUNDS_EACH)][1:]
        finally:
            gc.enable()
        decided = sorted(one for one, _ in rounds)[len(rounds) // 2]
        return decided, sorted(sum(both) for both in rounds)[len(rounds) // 2]


def decisions(rounds: int) -> dict[str, list[float]]:
    """Decisions per second, alternating: ours, ours with arrivals, and of the list scan."""
    ours, scan = Cell(TENANTS), Cell(TENANTS, scans=True)
    found: dict[str, list[float]] = {"ours": [], "with arrival": [], "scan": []}
    for n in range(rounds):
        for name in ("ours", "scan") if n % 2 else ("scan", "ours"):
            alone, both = (ours if name == "ours" else scan).measure()
            found[name].append(1e6 / alone)
            if name == "ours":
                found["with arrival"].append(1e6 / both)
    return found


def growth(rounds: int, sizes: tuple[int, ...] = GROWTH) -> dict[int, list[float]]:
    """Microseconds of a decision with its arrival, by the number of tenants, alternating."""
    cells = {size: Cell(size) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for n in range(rounds):
        for size in sizes if n % 2 else reversed(sizes):
            found[size].append(cells[size].measure()[1])
    return found


class Fifo:
    """Who came first is served first."""

    def __init__(self, _) -> None:
        self._waiting: deque[Item] = deque()

    def push(self, item: Item) -> None:
        self._waiting.append(item)

    def head(self, _, __) -> Item | None:
        return self._waiting[0] if self._waiting else None

    def serve(self, _, __) -> None:
        self._waiting.popleft()


class RoundRobin:
    """One request of each tenant in turn."""

    def __init__(self, _) -> None:
        self._turns: deque[deque[Item]] = deque()
        self._of: dict[str, deque[Item]] = {}

    def push(self, item: Item) -> None:
        waiting = self._of.setdefault(item.tenant, deque())
        if not waiting:
            self._turns.append(waiting)
        waiting.append(item)

    def head(self, _, __) -> Item | None:
        return self._turns[0][0] if self._turns else None

    def serve(self, _, __) -> None:
        waiting = self._turns.popleft()
        waiting.popleft()
        if waiting:
            self._turns.append(waiting)


class TokenCounter:
    """The least virtual counter of tokens goes first (Sheng et al., Fairness in Serving Large Language Models, 2024)."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        self._counters = dict.fromkeys(weights, 0.0)
        self._waiting: dict[str, deque[Item]] = {name: deque() for name in weights}
        self._left = ""  # who was the last to have nothing waiting

    def push(self, item: Item) -> None:
        tenant = item.tenant
        if not self._waiting[tenant]:
            others = [self._counters[name] for name, waiting in self._waiting.items() if waiting]
            if others:
                self._counters[tenant] = max(self._counters[tenant], min(others))
            elif self._left:
                self._counters[tenant] = max(self._counters[tenant], self._counters[self._left])
        self._waiting[tenant].append(item)

    def head(self, _, __) -> Item | None:
        waiting = [name for name, waiting in self._waiting.items() if waiting]
        return self._waiting[min(waiting, key=self._counters.__getitem__)][0] if waiting else None

    def serve(self, item: Item, cost_ms: float) -> None:
        self._waiting[item.tenant].popleft()
        self._counters[item.tenant] += cost_ms / MS_PER_TOKEN.get(item.demand, 1.0) / self._weights[item.tenant]
        if not self._waiting[item.tenant]:
            self._left = item.tenant


ORDERS: dict[str, Callable] = {"FIFO": Fifo, "round robin": RoundRobin, "VTC": TokenCounter}


def gaps(runs: int = RUNS, steps: int = STEPS) -> dict[str, float]:
    """The greatest gap of each order, in multiples of the bound, ours first."""
    found = {"ours": max(_used("share_among_tenants", seed, steps) for seed in range(runs))}
    for name, order in ORDERS.items():
        found[name] = max(share_among_tenants(Random(seed), steps, order) for seed in range(runs))
    return found


def theorems(runs: int = RUNS, steps: int = STEPS) -> dict[str, float]:
    """Of every other promise, the greatest share that was used."""
    others = [name for name in DRIVES if name != "share_among_tenants"]
    return {name: max(_used(name, seed, steps) for seed in range(runs)) for name in others}


def _used(name: str, seed: int, steps: int) -> float:
    try:
        return DRIVES[name](Random(seed), steps)
    except Broken as error:
        print(f"seed {seed} of {name}: {error}")  # noqa: T201 - that is what is sought
        return float("inf")
