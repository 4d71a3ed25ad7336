"""Rows 4 and 7: what a decision costs, against a list scan that decides the same, and how fair it is, against other orders.

Row 4 takes the parts of the dispatcher's machine: requests are put in line, and as many as twelve workers of three kinds
have room for have their turn, are routed and charged. What the machine does beside that is told
by a line of its own. Time is that of the CPU, since others may share it.

Row 7 drives the queues with random arrivals, weights, costs and capacity (`tests/fairness.py`) and measures the
greatest difference that any two tenants with something waiting came to over any stretch of time, in multiples of the
bound of start-time fair queueing. A token of one demand takes four times the engine time of one of the other, which is
what an order by tokens does not see.
"""

import gc
import math
import time
from collections import deque
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from fairness import CLOSE, DRIVES, OTHER, Broken, share_among_tenants

from broker.transport.protocol import TopicPartition
from dispatcher.core import Arrived, Dispatcher, Sent, StatusSeen, Tick
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.shaping import Band
from schemas import EngineStatus, parse_config
from schemas.messages import Envelope

TENANTS, GROWTH = 1_000, (100, 1_000, 10_000, 100_000)
KINDS, WORKERS_EACH, SLOTS = ("transformer", "ssm", "moe"), 4, 100
ROOM = len(KINDS) * WORKERS_EACH * SLOTS
STANDING = 2  # requests of each tenant
ROUNDS_EACH = 10  # of one measurement, the first of which is not counted
PARTITIONS = 1_000  # so that all that stands fits into memory, of whatever number of tenants
ANYBODY = Demand("auto", "auto", "any")
NOW_MS = 1_000_000
RUNS, STEPS = 1_000, 1_000
MS_PER_TOKEN = {OTHER: 4.0}

CONFIG = parse_config(
    {
        "dispatcher": {"runway_factor": 1.0, "hop": {"in_flight_max": 1_000_000}},
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
    """A dispatcher's parts, with so many tenants that all have something waiting, and twelve workers.

    Args:
        tenants: How many.
        scans: Whether the queue is the list scan.
    """

    def __init__(self, tenants: int, *, scans: bool = False) -> None:
        self.tenants, self.n, self.now_ms = tenants, 0, NOW_MS
        self.machine = Dispatcher(CONFIG)
        self.queue = ScanQueue() if scans else self.machine._queue
        self.router, self.fleet = self.machine._router, self.machine._fleet
        self.report()
        self.stand()

    def stand(self) -> None:
        """Put in what stands there all the while."""
        for item in self.items(STANDING * self.tenants):
            self.queue.push(item)

    def items(self, count: int) -> list[Item]:
        found = [self.item(self.n + n) for n in range(count)]
        self.n += count
        return found

    def item(self, n: int) -> Item:
        source = TopicPartition("requests", n % PARTITIONS)
        envelope = Envelope(f"r{n}", f"t{n * 7919 % self.tenants}", "batch", (*source, n), NOW_MS + n)
        item = Item((source, n), envelope, ANYBODY, 100.0 + n % 7 * 50, 64, NEVER_MS, b"", ())
        item.demand, item.output_tokens = self.router.demand(item), 64.0
        return item

    def report(self) -> None:
        """All workers say that nothing is left to do."""
        self.now_ms += 100
        for kind in KINDS:
            for number in range(WORKERS_EACH):
                self.machine.handle(StatusSeen(self.status(kind, number)), self.now_ms)

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

    def round(self) -> float:
        """Microseconds of a decision: the request is put in line, its turn comes, it is routed and charged."""
        queue, fleet, pick, now_ms = self.queue, self.fleet, self.router.pick, self.now_ms
        items, blocked, sent = self.items(ROOM), set(), []
        began = time.process_time()
        for item in items:
            queue.push(item)
        while (head := queue.head(blocked, now_ms)) is not None:
            choice = pick(head, now_ms)
            if choice is None:
                blocked.add((head.service_class, head.demand))
                continue
            queue.serve(head, choice.cost_ms)
            fleet.sending(choice.pool, choice.worker.partition, head.service_class)
            sent.append(choice)
        seconds = time.process_time() - began
        for choice in sent:
            fleet.sent(choice.pool, choice.worker.partition, "batch", 0)
        if len(sent) != ROOM:
            message = f"{len(sent)} decisions where there is room for {ROOM}"
            raise RuntimeError(message)
        self.report()
        return seconds / ROOM * 1e6

    def measure(self) -> float:
        """Microseconds of a decision, the median of some rounds."""
        gc.collect()
        gc.disable()
        try:
            return median([self.round() for _ in range(ROUNDS_EACH)][1:])
        finally:
            gc.enable()


class Machine(Cell):
    """The same by the dispatcher's machine: arrivals, and a tick with all that it keeps beside the decision."""

    def stand(self) -> None:
        self.arrive(STANDING * self.tenants)

    def arrive(self, count: int) -> float:
        """Let requests come in; gives the seconds that took."""
        events, before = [Arrived(item) for item in self.items(count)], self.machine.queued
        began = time.process_time()
        forwarded = sum(len(self.machine.handle(event, self.now_ms)) for event in events)
        seconds = time.process_time() - began
        if forwarded or self.machine.queued != before + count:
            message = f"{self.machine.queued} requests wait where {before + count} should"
            raise RuntimeError(message)
        return seconds

    def round(self) -> float:
        began = time.process_time()
        effects = self.machine.handle(Tick(), self.now_ms)
        seconds = time.process_time() - began
        for effect in effects:
            self.machine.handle(Sent(effect.item.work, 0), self.now_ms)
        seconds += self.arrive(len(effects))
        self.report()
        return seconds / len(effects) * 1e6


def decisions(rounds: int) -> dict[str, list[float]]:
    """Decisions per second, alternating: ours, of the list scan, and by the machine as a whole."""
    cells = {"ours": Cell(TENANTS), "scan": Cell(TENANTS, scans=True), "machine": Machine(TENANTS)}
    found: dict[str, list[float]] = {name: [] for name in cells}
    for n in range(rounds):
        for name in cells if n % 2 else reversed(cells):
            found[name].append(1e6 / cells[name].measure())
    return found


def growth(rounds: int, sizes: tuple[int, ...] = GROWTH) -> dict[int, list[float]]:
    """Microseconds of a decision by the number of tenants, alternating."""
    cells = {size: Cell(size) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for n in range(rounds):
        for size in sizes if n % 2 else reversed(sizes):
            found[size].append(cells[size].measure())
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


def decision_lines(line: Callable, spread: Callable, rounds: int) -> list[dict[str, Any]]:
    """Row 4."""
    found, sizes = decisions(rounds), growth(rounds)
    ratio = round(median(o / s for o, s in zip(found["ours"], found["scan"], strict=True)), 1)
    what = f"decisions/s, {TENANTS} tenants, {len(KINDS) * WORKERS_EACH} workers"
    first, last = min(sizes), max(sizes)
    grown = round(median(b / a for a, b in zip(sizes[first], sizes[last], strict=True)), 2)
    log = round(math.log(last) / math.log(first), 2)
    ours = spread(found["ours"])
    whole = f"{what}, with all that the machine does beside, arrivals too"
    by_size = {f"{size}": round(median(times), 1) for size, times in sizes.items()}
    return [
        line(4, what, ours, spread(found["scan"]), "-", ratio, ">= 100,000/s", ours["median"] >= 100_000),
        line(4, whole, spread(found["machine"]), None, "-", None, "-", None),
        line(4, "microseconds of a decision by tenants", by_size, None, f"log n: {log}x", grown, f"<= {log}x", grown <= log),
    ]


def fairness_lines(line: Callable) -> list[dict[str, Any]]:
    """Row 7."""
    found = gaps()
    ours, others = found.pop("ours"), {name: round(gap, 1) for name, gap in found.items()}
    kept = theorems()
    steps = f"{RUNS * STEPS:,} random steps"
    return [
        line(
            7,
            f"greatest gap of two backlogged tenants, in bounds, {steps}",
            round(ours, 6),
            others,
            1,
            round(ours, 6),
            "<= 1",
            ours <= 1 + CLOSE,
        ),
        line(
            7,
            f"other promises, how much of each was used, {steps} each",
            {name: round(used, 6) for name, used in kept.items()},
            None,
            1,
            None,
            "<= 1",
            max(kept.values()) < math.inf,
        ),
    ]
