"""Fair queueing over class -> tenant, in engine time; what stands inside a class is told in `turns.py`.

The same rule shares between the classes: each has a key K, the least K goes first and interactive at a tie, and
serving a request sets V = max(V, K) and K += cost / weight. A class that comes to wait begins at max(K, V - h), where
h is interactive's head start over its weight, and 0 for batch. So interactive runs ahead of its share by the head start
and no further, and has it again only by having waited less than its share: while both wait, batch gets

    W_b / w_b >= W_i / w_i - (head start + l_i) / w_i - l_b / w_b

over any stretch of time. A class that nobody can take from holds up nobody, and catches up on no more than h.

The cost is predicted when a request is served and corrected when the truth is known, which moves tags and keys: then the
bounds hold for true work but for twice what is not corrected yet. With rates (`shaping.py`) a tenant stands in one of
the two orders of its class or waits for its time; only those that have rates are ever looked at again for that.
"""

import heapq
import math
from collections.abc import Collection

from dispatcher.core.item import Item
from dispatcher.core.shaping import Band, Shaper
from dispatcher.core.turns import TAG_MAX, BlockKey, Line, Turns, Waiting, served_until
from schemas.messages import ServiceClass
from schemas.policy import ClassConfig

_SMOOTHING = 0.02  # of the mean cost, which estimates only
_SPARE = 64


class _Class:
    """The key of a class, and its tenants."""

    __slots__ = ("base", "head_start", "key", "turns", "was_blocked", "weight")

    def __init__(self, name: str, weight: float, head_start: float, shaper: Shaper) -> None:
        self.weight, self.head_start = weight, head_start
        self.key = self.base = -head_start
        self.was_blocked = False
        self.turns = Turns(name, shaper)


class _Wakes:
    """When tenants have to be looked at again, the soonest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._times: dict[str, float] = {}

    def put(self, name: str, at_ms: float) -> None:
        """Look at a tenant at that time, and not when was said before; never: inf."""
        if at_ms == math.inf:
            self._times.pop(name, None)
        elif self._times.get(name) != at_ms:
            self._times[name] = at_ms
            heapq.heappush(self._heap, (at_ms, name))
            if len(self._heap) > 2 * len(self._times) + _SPARE:
                self._heap = [(time, one) for one, time in self._times.items()]
                heapq.heapify(self._heap)

    def first_ms(self) -> float:
        """The soonest time; inf where there is none."""
        while self._heap:
            at_ms, name = self._heap[0]
            if self._times.get(name) == at_ms:
                return at_ms
            heapq.heappop(self._heap)
        return math.inf

    def pop(self) -> str:
        """Take out the soonest."""
        name = heapq.heappop(self._heap)[1]
        del self._times[name]
        return name

    def names(self) -> set[str]:
        """Whose times are known."""
        return set(self._times)


class FairQueue:
    """Holds what was read and not yet dispatched.

    Args:
        classes: Shares of the classes.
        shaper: Weights, and who may be served now.
    """

    def __init__(self, classes: ClassConfig, shaper: Shaper) -> None:
        self._shaper, self._has_cell = shaper, shaper.has_cell
        self._lag = classes.interactive_head_start_ms / classes.interactive_weight  # in the measure of keys
        self._interactive = _Class("interactive", classes.interactive_weight, self._lag, shaper)
        self._batch = _Class("batch", classes.batch_weight, 0.0, shaper)
        self._classes = {"interactive": self._interactive, "batch": self._batch}
        self._virtual = 0.0
        self._pushed = 0
        self._now_ms = -math.inf
        self._stale: set[str] = set()  # tenants with rates whose standing is to be read again
        self._waiting, self._rising = _Wakes(), _Wakes()  # when a tenant may be served; when one that borrows has its guarantee
        self._head: tuple[_Class, Line, Waiting] | None = None
        self._cost_ms = 0.0  # of late, on average

    def __len__(self) -> int:
        """Requests waiting."""
        return self._interactive.turns.count + self._batch.turns.count

    def push(self, item: Item) -> None:
        """Put a request in line: inside its tenant by deadline, then by age."""
        envelope = item.envelope
        group = self._classes[envelope.service_class]
        turns = group.turns
        if not turns.count:
            group.key = group.base = max(group.key, self._virtual - group.head_start)
            group.was_blocked = False
            other = self._batch if group is self._interactive else self._interactive
            other.base = max(other.base, min(other.key, self._virtual))  # what it gets back takes it no further before this one
        tenant = turns.tenant(envelope.tenant)
        self._pushed += 1
        turns.add(tenant, (item.deadline_ms, envelope.received_at_ms, self._pushed, item))
        if tenant.is_rated and tenant.count == 1:
            self._stale.add(tenant.name)

    def head(self, blocked: Collection[BlockKey], now_ms: float) -> Item | None:
        """Give the request to be served next; it stays in line.

        Args:
            blocked: Class and demand of requests that nobody can take now.
            now_ms: Unix time.
        """
        if self._stale or now_ms != self._now_ms:
            self._catch_up(now_ms)
        lends = self._shaper.lends(now_ms) if self._has_cell else True
        first, second = self._interactive, self._batch
        if first.was_blocked:
            self._unblock(first, blocked, lends=lends)
        if second.was_blocked:
            self._unblock(second, blocked, lends=lends)
        if second.key < first.key:
            first, second = second, first
        for group in (first, second):
            if group.turns.count:
                found = group.turns.top(blocked, lends=lends)
                if found is not None:
                    line, waiting = found
                    self._head = group, line, waiting
                    return waiting.requests[0][3]
                group.was_blocked = True
        return None

    def serve(self, item: Item, cost_ms: float) -> Band:
        """Take the head out, and charge its class and tenant.

        Args:
            item: What `head` gave.
            cost_ms: Engine time that it is expected to take.

        Returns:
            The band it was served in: its tokens, and what is corrected later, are charged there.
        """
        group, line, waiting = self._found(item)
        tenant = waiting.tenant
        if group.key > self._virtual:  # noqa: PLR1730 - `max` takes its time
            self._virtual = group.key
        group.key += cost_ms / group.weight
        self._cost_ms += (cost_ms - self._cost_ms) * _SMOOTHING
        group.turns.take(line, waiting, cost_ms)
        if tenant.is_rated:
            self._stale.add(tenant.name)
        if not group.turns.count:
            self._rest()
        return tenant.band

    def discard(self, item: Item) -> None:
        """Take the head out without charging: it ended, or is not ours any more."""
        group, line, waiting = self._found(item)
        group.turns.take(line, waiting, None)
        self._rest()

    def correct(self, service_class: ServiceClass, tenant: str, cost_ms: float, band: Band) -> None:
        """Charge what a request cost beyond what was charged, or give back (below zero) what it did not.

        An idle tenant gets nothing back that it could save up, and owes what it took.

        Args:
            service_class: Its class.
            tenant: Whose it was.
            cost_ms: The difference in engine time.
            band: In which it was served.
        """
        group = self._classes[service_class]
        group.key += cost_ms / group.weight
        if group.turns.count:
            group.key = max(group.key, group.base - self._lag)
        group.turns.correct(tenant, cost_ms, band)
        if tenant in self._shaper.rated:
            self._stale.add(tenant)

    def sweep(self) -> None:
        """Take out whatever was dropped, wherever it stands, without charging."""
        for group in self._classes.values():
            group.turns.sweep()
        self._rest()

    def count(self, service_class: ServiceClass, tenant: str) -> int:
        """Requests of a tenant that stand here; those dropped count until they surface or are swept."""
        found = self._classes[service_class].turns.tenants.get(tenant)
        return 0 if found is None else found.count

    def ahead(self, item: Item) -> int:
        """Estimate how many requests of all tenants are served before one: exact inside its tenant, by tags beyond."""
        group = self._classes[item.service_class]
        cost_ms = max(self._cost_ms, 1e-9)
        before = group.turns.ahead(item, cost_ms)
        key = group.key + before * cost_ms / group.weight
        for other in self._classes.values():
            if other is not group:
                before += min(other.turns.ready, served_until(other.key, key, other.weight / cost_ms))
        return before

    def next_ready_ms(self, now_ms: float) -> float:
        """When time alone will have made another request ready, or its tenant's guarantee where nothing is lent; never: inf."""
        self._catch_up(now_ms)
        if not len(self):
            return math.inf
        ready_ms = self._waiting.first_ms()
        if self._has_cell and not self._shaper.lends(now_ms):
            ready_ms = min(ready_ms, self._rising.first_ms(), self._shaper.lends_at_ms(now_ms))
        return ready_ms

    def steered(self) -> None:
        """Read the settings again, after the shaper has."""
        for group in self._classes.values():
            self._stale.update(group.turns.steered())

    def _catch_up(self, now_ms: float) -> None:
        """Read again how those stand who were served or corrected, or whose time has come."""
        stale = self._stale
        for wakes in (self._waiting, self._rising):
            if now_ms < self._now_ms:  # on another clock nobody knows how long
                stale |= wakes.names()
            while wakes.first_ms() <= now_ms:
                stale.add(wakes.pop())
        self._now_ms = now_ms
        for name in stale:
            band, better_ms = self._shaper.standing(name, now_ms)
            waits = False
            for group in self._classes.values():
                waits |= group.turns.stands(name, band)
            self._waiting.put(name, better_ms if waits and band is Band.WAITING else math.inf)
            self._rising.put(name, better_ms if waits and band is Band.BORROWING else math.inf)
        stale.clear()

    def _unblock(self, group: _Class, blocked: Collection[BlockKey], *, lends: bool) -> None:
        """Bring a class that could not be served to where it may catch up from, if it can be served now."""
        if group.turns.top(blocked, lends=lends) is not None:
            group.was_blocked = False
            group.key = max(group.key, self._virtual - self._lag)

    def _rest(self) -> None:
        """Nothing is owed by anybody while nobody waits."""
        if not len(self):
            latest = max(self._virtual, self._interactive.key, self._batch.key)
            self._virtual = 0.0 if latest > TAG_MAX else latest
            for group in self._classes.values():
                group.key = self._virtual - group.head_start

    def _found(self, item: Item) -> tuple[_Class, Line, Waiting]:
        head = self._head
        if head is None or not head[2].requests or head[2].requests[0][3] is not item:
            message = "only the head of the queue can be taken out"
            raise AssertionError(message)
        return head
