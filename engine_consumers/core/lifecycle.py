r"""Which of the requests in a worker's hands run: one machine, `handle(event) -> effects`.

    taken -> waiting -> running -> ended        (a slot is held only while running)
       \________\__________\-----> dropped      (its partition went to somebody else, or it was ended from outside)

The order among those that wait is by class, then deadline, then as they were read: that is the order in which the
dispatcher wants them, so age says nothing here. Nobody is passed by more than `slots` that were read later; otherwise one
could wait for ever beside a tenant that always has something more urgent. Batch never takes the last slots, so that an
interactive request need not wait for a running batch. A suspect, which is to run alone, waits until nothing else runs;
nothing begins while it waits at the head or runs.
"""

import heapq
from collections import deque
from typing import NamedTuple

from msgspec import Struct

from schemas.messages import ServiceClass

Ticket = int  # names one take-in of a request: the same record, taken again, gets another

INTERACTIVE_RANK, BATCH_RANK = 0, 1
LEFT_SPARE = 64  # so many that left the line are never worth a sweep


class Order(NamedTuple):
    """Who goes first: the lesser."""

    class_rank: int
    deadline_ms: int

    @property
    def is_batch(self) -> bool:
        """Whether it may wait behind interactive requests."""
        return self.class_rank == BATCH_RANK


def order(service_class: ServiceClass, deadline_ms: int) -> Order:
    """Rank a request: interactive before batch, then the earliest deadline."""
    return Order(INTERACTIVE_RANK if service_class == "interactive" else BATCH_RANK, deadline_ms)


class Taken(Struct, frozen=True):
    """A request was read."""

    ticket: Ticket
    order: Order
    alone: bool = False


class Ended(Struct, frozen=True):
    """A run is over, whatever came of it."""

    ticket: Ticket


class Dropped(Struct, frozen=True):
    """A request is not ours to finish any more."""

    ticket: Ticket


class Run(Struct, frozen=True):
    """Start the request on the engine; where `alone`, nothing runs beside it."""

    ticket: Ticket
    alone: bool = False


class Abort(Struct, frozen=True):
    """Stop the request's run; `Ended` follows."""

    ticket: Ticket


class _Waiting(NamedTuple):
    """A request in line; the lesser is served first, and whoever is due before all others."""

    order: Order
    place: int  # as they were read
    ticket: Ticket
    alone: bool
    due: int  # when so many runs have begun


class Lifecycle:
    """Gives slots to requests.

    Args:
        slots: Requests that may run at once.
        reserved: Slots that batch may not take; one is always left to it.
    """

    def __init__(self, slots: int, reserved: int = 0) -> None:
        self._slots, self._batch_slots = slots, max(slots - reserved, 1)
        self._line: list[_Waiting] = []  # a heap
        self._turns: tuple[deque[_Waiting], ...] = deque(), deque()  # by class, as they were read
        self._waits: set[Ticket] = set()  # who stands in line and was not dropped
        self._running: dict[Ticket, bool] = {}  # -> whether it is batch
        self._batch_running = self._begun = self._read = 0
        self._alone: Ticket | None = None

    @property
    def waiting(self) -> int:
        """Requests read and not yet running."""
        return len(self._waits)

    @property
    def running(self) -> int:
        """Requests on the engine."""
        return len(self._running)

    @property
    def reserved(self) -> int:
        """Slots that batch may not take."""
        return self._slots - self._batch_slots

    def handle(self, event: Taken | Ended | Dropped) -> list[Run | Abort]:
        """Take in what happened; give what is to be done."""
        effects: list[Run | Abort] = []
        if isinstance(event, Taken):
            due = self._begun + len(self._waits) + self._slots
            waiting = _Waiting(event.order, self._read, event.ticket, event.alone, due)
            heapq.heappush(self._line, waiting)
            self._turns[event.order.class_rank].append(waiting)
            self._waits.add(event.ticket)
            self._read += 1
        elif isinstance(event, Ended):
            self._batch_running -= self._running.pop(event.ticket, False)
            if self._alone == event.ticket:
                self._alone = None
        elif event.ticket in self._running:
            effects.append(Abort(event.ticket))
        else:
            self._waits.discard(event.ticket)
        while (head := self._head()) is not None and self._may_run(head):
            self._waits.discard(head.ticket)
            self._running[head.ticket] = head.order.is_batch
            self._batch_running += head.order.is_batch
            self._begun += 1
            self._alone = head.ticket if head.alone else None
            effects.append(Run(head.ticket, head.alone))
        return effects

    def _head(self) -> _Waiting | None:
        """Who is next in line; interactive stands before batch, so behind a batch that may not run there is none."""
        due: _Waiting | None = None
        for turns in self._turns:
            while turns and turns[0].ticket not in self._waits:
                turns.popleft()
            first = turns[0] if turns and turns[0].due <= self._begun else None
            if first and (first.alone or self._may_run(first)) and (due is None or first.due < due.due):
                due = first
        if due is not None:
            return due
        if len(self._line) > 2 * len(self._waits) + LEFT_SPARE:  # whoever ran in turn stays until it surfaces
            self._line = [waiting for waiting in self._line if waiting.ticket in self._waits]
            heapq.heapify(self._line)
        while self._line and self._line[0].ticket not in self._waits:
            heapq.heappop(self._line)
        return self._line[0] if self._line else None

    def _may_run(self, head: _Waiting) -> bool:
        if self._alone is not None or len(self._running) >= self._slots:
            return False
        if head.alone:
            return not self._running
        return not head.order.is_batch or self._batch_running < self._batch_slots
