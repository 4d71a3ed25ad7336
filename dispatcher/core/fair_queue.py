"""Start-time fair queueing over class -> tenant, with one line per demand (Goyal, Vin, Cheng 1996).

Each tenant of a class has a finish tag F. A request's start tag is S = max(v, F); serving it sets v = S and
F = S + cost / weight; the least S goes first, and ties go by name. Fair also when capacity varies; an idle tenant
saves nothing up. The same rule, one level up, shares between the classes.

Requests of a demand that no engine can take now must not stand before others, so each demand has a line (a heap of
the tenants waiting in it), while tags are shared by all. A tag in a heap is a lower bound, mended when it surfaces.
"""

import heapq
from collections.abc import Callable, Collection

from dispatcher.core.item import Demand, Item


class _Line:
    """The tenants of one class that wait in one demand."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, str]] = []  # lower bound of the start tag, tenant; each waiting tenant once
        self.waiting: dict[str, list[tuple[int, int, int, Item]]] = {}


class _Class:
    """The lines of one class, and the tags of its tenants."""

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.start = self.finish = 0.0  # the class's own tags
        self.virtual = 0.0
        self.count = 0
        self.tags: dict[str, float] = {}  # tenant -> finish tag
        self.lines: dict[Demand, _Line] = {}

    def forget_tags(self) -> None:
        """Nobody of the class waits: nothing is owed."""
        self.tags.clear()
        self.virtual = 0.0

    def top(self, blocked: Collection[Demand]) -> tuple[float, str, _Line] | None:
        """Find the tenant with the least start tag in the lines that are not blocked."""
        best: tuple[float, str, _Line] | None = None
        for demand, line in self.lines.items():
            if blocked and demand in blocked:
                continue
            tag, tenant = self._settle(line)
            if best is None or (tag, tenant) < best[:2]:
                best = tag, tenant, line
        return best

    def _settle(self, line: _Line) -> tuple[float, str]:
        while True:
            tag, tenant = line.heap[0]
            true = self.tags.get(tenant, 0.0)
            if tag >= true:
                return tag, tenant
            heapq.heapreplace(line.heap, (true, tenant))


class FairQueue:
    """Holds what was read and not yet dispatched.

    Args:
        class_weight: The share of a class.
        tenant_weight: The share of a tenant inside a class.
    """

    def __init__(self, class_weight: Callable[[str], float], tenant_weight: Callable[[str], float]) -> None:
        self._class_weight, self._tenant_weight = class_weight, tenant_weight
        self._classes: dict[str, _Class] = {}
        self._virtual = 0.0
        self._pushed = 0

    def __len__(self) -> int:
        """Requests waiting."""
        return sum(c.count for c in self._classes.values())

    def push(self, item: Item) -> None:
        """Put a request in line: inside its tenant by deadline, then by age."""
        name, tenant = item.service_class, item.tenant
        group = self._classes.get(name)
        if group is None:
            group = self._classes[name] = _Class(name, self._class_weight(name))
        if not group.count:
            group.start = max(self._virtual, group.finish)
        line = group.lines.get(item.demand)
        if line is None:
            line = group.lines[item.demand] = _Line()
        waiting = line.waiting.get(tenant)
        if waiting is None:
            waiting = line.waiting[tenant] = []
            heapq.heappush(line.heap, (max(group.virtual, group.tags.get(tenant, 0.0)), tenant))
        self._pushed += 1
        heapq.heappush(waiting, (item.deadline_ms, item.envelope.received_at_ms, self._pushed, item))
        group.count += 1

    def head(self, blocked: Collection[Demand] = ()) -> Item | None:
        """Give the request to be served next among the demands that are not blocked; it stays in line."""
        best: _Class | None = None
        found: tuple[float, str, _Line] | None = None
        for group in self._classes.values():
            if not group.count or (best is not None and (best.start, best.name) < (group.start, group.name)):
                continue
            top = group.top(blocked)
            if top is not None:
                best, found = group, top
        return None if found is None else found[2].waiting[found[1]][0][3]

    def serve(self, item: Item) -> None:
        """Take the head out, and charge its class and tenant."""
        group = self._classes[item.service_class]
        line = group.lines[item.demand]
        start = line.heap[0][0]
        group.virtual = max(group.virtual, start)
        group.tags[item.tenant] = start + item.cost / self._tenant_weight(item.tenant)
        self._virtual = max(self._virtual, group.start)
        group.start = group.finish = group.start + item.cost / group.weight
        self._take(group, line, item)

    def discard(self, item: Item) -> None:
        """Take the head out without charging: it ended, or is not ours any more."""
        group = self._classes[item.service_class]
        self._take(group, group.lines[item.demand], item)

    def sweep(self) -> None:
        """Take out whatever was dropped, wherever it stands, without charging."""
        for group in self._classes.values():
            for demand, line in list(group.lines.items()):
                for tenant, waiting in list(line.waiting.items()):
                    kept = [entry for entry in waiting if not entry[3].dropped]
                    group.count -= len(waiting) - len(kept)
                    heapq.heapify(kept)
                    line.waiting[tenant] = kept
                    if not kept:
                        del line.waiting[tenant]
                line.heap = [entry for entry in line.heap if entry[1] in line.waiting]
                heapq.heapify(line.heap)
                if not line.waiting:
                    del group.lines[demand]
            if not group.count:
                group.forget_tags()

    def _take(self, group: _Class, line: _Line, item: Item) -> None:
        tenant = item.tenant
        waiting = line.waiting[tenant]
        if line.heap[0][1] != tenant or waiting[0][3] is not item:
            message = "only the head of the queue can be taken out"
            raise AssertionError(message)
        heapq.heappop(waiting)
        group.count -= 1
        if waiting:
            heapq.heapreplace(line.heap, (max(line.heap[0][0], group.tags.get(tenant, 0.0)), tenant))
            return
        heapq.heappop(line.heap)
        del line.waiting[tenant]
        if not line.waiting:
            del group.lines[item.demand]
        if not group.count:
            group.forget_tags()
