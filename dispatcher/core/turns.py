"""Whose turn it is inside one class: start-time fair queueing over tenants (Goyal, Vin, Cheng 1996).

A tenant has a start tag S. Serving it sets v = max(v, S) and S += cost / weight; the least S goes first, and ties go by
name. A tenant that comes to wait begins at max(v, S): being idle saves nothing up. So between two that wait all the time

    |W_i / w_i - W_j / w_j| <= l_i / w_i + l_j / w_j    (W: what each got, w: weight, l: its largest request)

over any stretch of time, however much is served then. There are two such orders: one of the tenants under their
guarantee, and one of those that borrow, which has its turn when nobody is in the first. Each has its own tags and v, so
what is served under guarantees moves nobody's share of what is left.

Requests of a demand that no engine can take now must not stand before others, so each demand has a line (a heap of the
tenants waiting in it for either order), while tags are shared by all lines. An entry in a heap whose tag has grown
since is mended when it surfaces; one that was replaced is passed over then. Whoever stood in a line that was blocked
catches up on no more than its credit, and whoever was charged too much on no more than brings it to whoever came last.
"""

import heapq
import math
from collections.abc import Collection, Iterable

from dispatcher.core.item import Demand, Item
from dispatcher.core.shaping import Band, Shaper

BlockKey = tuple[str, Demand]  # a service class, and a demand that nobody can take of it now
IDLE_MAX = 65_536  # tenants that do not wait, but are ahead of their share; the oldest beyond are forgiven that
TAG_MAX = 2.0**40  # from here on tags begin anew when nobody waits, before they lose precision
SPARE = 1_024  # so many that can be forgotten are never worth a look
_GUARANTEED, _BORROWING, _WAITING = Band.GUARANTEED, Band.BORROWING, Band.WAITING


class Tenant:
    """One tenant of a class: its tags in both orders."""

    __slots__ = ("band", "count", "credit", "is_rated", "name", "tags", "weight")

    def __init__(self, name: str, shaper: Shaper) -> None:
        self.name, self.count = name, 0
        self.band = _BORROWING
        self.tags = [0.0, 0.0]  # by band
        self.set(shaper)

    def set(self, shaper: Shaper) -> None:
        """Read what the settings say of it."""
        self.weight, self.is_rated = shaper.weight(self.name), self.name in shaper.rated
        self.credit = shaper.credit_ms(self.name) / self.weight  # in the measure of tags

    def begin(self, band: Band, tag: float) -> None:
        """Come to wait in an order, at this tag or a later one that is still owed."""
        if self.tags[band] < tag:  # noqa: PLR1730 - `max` takes its time
            self.tags[band] = tag


class Waiting:
    """A tenant's requests of one demand, the nearest deadline first."""

    __slots__ = ("entry", "requests", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.requests: list[tuple[int, int, int, Item]] = []
        self.entry: Entry | None = None  # the one that counts, of those in the heaps

    def __lt__(self, other: "Waiting") -> bool:
        """Two entries of one name and tag: one is out of date, so either may go first."""
        return False


Entry = tuple[float, str, Waiting]  # lower bound of the start tag, tenant


class Line:
    """The tenants that wait in one demand."""

    __slots__ = ("floor", "heaps", "key", "waiting", "was_blocked")

    def __init__(self, key: BlockKey) -> None:
        self.key, self.was_blocked, self.floor = key, False, -1.0
        self.waiting: dict[str, Waiting] = {}
        self.heaps: tuple[list[Entry], list[Entry]] = ([], [])  # by band

    def enter(self, waiting: Waiting, band: Band) -> None:
        """Put a tenant's requests where its band and tag say; what stood there is out of date."""
        tenant, heap = waiting.tenant, self.heaps[band]
        waiting.entry = (tenant.tags[band], tenant.name, waiting)
        heapq.heappush(heap, waiting.entry)
        if len(heap) > 2 * len(self.waiting) + SPARE:
            heap[:] = [entry for entry in heap if entry[2].entry is entry]
            heapq.heapify(heap)

    def first(self, band: Band) -> Entry | None:
        """Find the entry with the least start tag of an order."""
        heap = self.heaps[band]
        while heap:
            entry = heap[0]
            waiting = entry[2]
            if waiting.entry is not entry:
                heapq.heappop(heap)
                continue
            tenant = waiting.tenant
            tags = tenant.tags
            if tags[band] < self.floor - tenant.credit and band is _BORROWING:
                tags[band] = self.floor - tenant.credit
            if entry[0] >= tags[band]:
                return entry
            waiting.entry = (tags[band], tenant.name, waiting)
            heapq.heapreplace(heap, waiting.entry)
        return None


class Turns:
    """The tenants of one class.

    Args:
        name: Of the class.
        shaper: Knows the tenants' weights.
    """

    def __init__(self, name: str, shaper: Shaper) -> None:
        self.name, self._shaper, self._rated = name, shaper, shaper.rated
        self.count = 0
        self.virtual = [0.0, 0.0]  # v, by band
        self.lines: dict[Demand, Line] = {}
        self.tenants: dict[str, Tenant] = {}  # who waits, and who has been served lately
        self._last = [0.0, 0.0]  # the greatest tag, by band
        self._newest = [0.0, 0.0]  # what v was when somebody came to wait last
        self._look_at = SPARE

    def tenant(self, name: str) -> Tenant:
        """Give a tenant, known or new."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= self._look_at:
                self._forget()
            found = self.tenants[name] = Tenant(name, self._shaper)
        return found

    def add(self, tenant: Tenant, entry: tuple[int, int, int, Item]) -> None:
        """Put a request in line; the tenant's band is known."""
        demand = entry[3].demand
        line = self.lines.get(demand)
        if line is None:
            line = self.lines[demand] = Line((self.name, demand))
        if not tenant.count:
            tenant.begin(_GUARANTEED, self.virtual[_GUARANTEED])
            tenant.begin(_BORROWING, self.virtual[_BORROWING])
            self._newest = self.virtual.copy()
        waiting = line.waiting.get(tenant.name)
        if waiting is None:
            waiting = line.waiting[tenant.name] = Waiting(tenant)
            if tenant.band is not _WAITING:
                line.enter(waiting, tenant.band)
        heapq.heappush(waiting.requests, entry)
        tenant.count += 1
        self.count += 1

    def top(self, blocked: Collection[BlockKey], *, lends: bool) -> tuple[Line, Waiting] | None:
        """Find whose turn it is in the lines that are not blocked.

        Args:
            blocked: Lines to pass over.
            lends: Whether anybody may borrow.
        """
        lines: Iterable[Line] = self._open(blocked) if blocked else self.lines.values()
        if self._rated:
            found = self._least(lines, _GUARANTEED)
            if found is not None:
                return found
        return self._least(lines, _BORROWING) if lends else None

    def take(self, line: Line, waiting: Waiting, cost_ms: float | None) -> None:
        """Take out the first of a tenant's requests; without a cost nothing is charged."""
        tenant, band = waiting.tenant, waiting.tenant.band
        if cost_ms is not None:
            tag = tenant.tags[band]
            if tag > self.virtual[band]:  # noqa: PLR1730 - `max` takes its time
                self.virtual[band] = tag
            tag = tenant.tags[band] = tag + cost_ms / tenant.weight
            if tag > self._last[band]:  # noqa: PLR1730 - `max` takes its time
                self._last[band] = tag
        heapq.heappop(waiting.requests)
        tenant.count -= 1
        self.count -= 1
        if not waiting.requests:
            self._leave(line, waiting)
        elif cost_ms is not None:
            heap = line.heaps[band]
            entry, waiting.entry = waiting.entry, (tenant.tags[band], tenant.name, waiting)
            if heap[0] is entry:
                heapq.heapreplace(heap, waiting.entry)
            else:
                heapq.heappush(heap, waiting.entry)

    def correct(self, name: str, cost_ms: float, band: Band) -> None:
        """Move a tenant's tag by what a request cost beyond what was charged, or less (below zero).

        Nothing takes it before whoever came to wait last, itself included: being idle saves nothing up, and a charge that was
        far too high has raised v for newcomers, who shall not wait until it is caught up.
        """
        tenant = self.tenants.get(name)
        if tenant is None:
            return  # long idle: nothing is owed
        tag = tenant.tags[band] + cost_ms / tenant.weight
        if tenant.count:
            tag = max(tag, min(self._newest[band], tenant.tags[band]))
        is_sooner, tenant.tags[band] = tag < tenant.tags[band], tag
        self._last[band] = max(self._last[band], tag)
        if is_sooner and tenant.count and tenant.band == band:
            for line in self.lines.values():
                waiting = line.waiting.get(name)
                if waiting is not None:
                    line.enter(waiting, band)

    def sweep(self) -> None:
        """Take out whatever was dropped, wherever it stands, without charging."""
        for line in list(self.lines.values()):
            for waiting in list(line.waiting.values()):
                kept = [entry for entry in waiting.requests if not entry[3].dropped]
                gone = len(waiting.requests) - len(kept)
                if gone:
                    self.count -= gone
                    waiting.tenant.count -= gone
                    heapq.heapify(kept)
                    waiting.requests = kept
                    if not kept:
                        self._leave(line, waiting)

    def stands(self, name: str, band: Band) -> bool:
        """Take in how a tenant stands; says whether it waits here."""
        tenant = self.tenants.get(name)
        if tenant is None:
            return False
        if tenant.count:
            self._move(tenant, band)
        else:
            tenant.band = band
        return tenant.count > 0

    def steered(self) -> list[str]:
        """Read the settings of all tenants again; gives those whose standing is to be read again too."""
        found = []
        for tenant in self.tenants.values():
            tenant.set(self._shaper)
            if tenant.is_rated or tenant.band is not _BORROWING:
                found.append(tenant.name)
        return found

    @property
    def ready(self) -> int:
        """Requests that do not wait for a tenant's time."""
        return sum(one.count for one in self.tenants.values() if one.band is not _WAITING)

    def ahead(self, item: Item, cost_ms: float) -> int:
        """Estimate how many requests of the class are served before one, at such a cost each."""
        mine = self.tenants.get(item.tenant)
        if mine is None:
            return 0
        stand = [entry for line in self.lines.values() if mine.name in line.waiting for entry in line.waiting[mine.name].requests]
        own = next((entry for entry in stand if entry[3] is item), None)
        before = mine.count if own is None else sum(entry < own for entry in stand)
        band = _GUARANTEED if mine.band is _GUARANTEED else _BORROWING
        tag = mine.tags[band] + before * cost_ms / mine.weight
        for other in self.tenants.values():
            if other.count and other is not mine and other.band is not _WAITING:
                count = served_until(other.tags[band], tag, other.weight / cost_ms)
                if other.band < band:
                    count = max(count, 1)
                before += 0 if other.band > band else min(other.count, count)
        return before

    def _move(self, tenant: Tenant, band: Band) -> None:
        """Move a tenant that waits to the order of its band, or out of both."""
        before = tenant.band
        if band is before:
            return
        tenant.band = band
        if band is _BORROWING and before is _GUARANTEED:  # it waited for its share of what is borrowed all the while
            tenant.tags[band] = max(tenant.tags[band], self.virtual[band] - tenant.credit)
        elif band is not _WAITING:
            tenant.begin(band, self.virtual[band])
        for line in self.lines.values():
            waiting = line.waiting.get(tenant.name)
            if waiting is not None:
                waiting.entry = None
                if band is not _WAITING:
                    line.enter(waiting, band)

    def _open(self, blocked: Collection[BlockKey]) -> list[Line]:
        found = []
        for line in self.lines.values():
            if line.key in blocked:
                line.was_blocked = True
            else:
                found.append(line)
        return found

    def _least(self, lines: Iterable[Line], band: Band) -> tuple[Line, Waiting] | None:
        best: Entry | None = None
        best_line: Line | None = None
        for line in lines:
            if line.was_blocked:
                line.was_blocked, line.floor = False, self.virtual[_BORROWING]
            heap = line.heaps[band]
            if heap:
                entry: Entry | None = heap[0]
                waiting = heap[0][2]
                tag = waiting.tenant.tags[band]
                if waiting.entry is not entry or heap[0][0] < tag or tag < line.floor:
                    entry = line.first(band)
                if entry is not None and (best is None or _goes_before(entry, best)):
                    best, best_line = entry, line
        return None if best is None or best_line is None else (best_line, best[2])

    def _leave(self, line: Line, waiting: Waiting) -> None:
        """Nothing of a tenant is left in a line; its entry is passed over once it surfaces."""
        waiting.entry = None
        del line.waiting[waiting.tenant.name]
        if not line.waiting:
            del self.lines[line.key[1]]
        if not self.count:  # nobody waits: nothing is owed
            self.virtual = self._last.copy()
            if max(self.virtual) > TAG_MAX:
                self.virtual, self._last, self._newest = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
                self.tenants.clear()

    def _forget(self) -> None:
        """Let go of tenants that do not wait and owe nothing, and of the oldest that owe where these are too many."""
        owing = []
        for tenant in list(self.tenants.values()):
            if tenant.count:
                continue
            if tenant.tags[0] > self.virtual[0] or tenant.tags[1] > self.virtual[1]:
                owing.append(tenant.name)
            else:
                del self.tenants[tenant.name]
        for name in owing[:-IDLE_MAX]:
            del self.tenants[name]
        self._look_at = 2 * len(self.tenants) + SPARE


def _goes_before(one: Entry, other: Entry) -> bool:
    if one[0] != other[0]:
        return one[0] < other[0]
    if one[1] != other[1]:
        return one[1] < other[1]
    return one[2].requests[0] < other[2].requests[0]  # one tenant in two lines


def served_until(start: float, end: float, per_tag: float) -> int:
    """Requests whose tags lie from `start` up to `end`, at so many for each unit."""
    return 0 if start > end else math.floor(min((end - start) * per_tag, 1e15)) + 1
