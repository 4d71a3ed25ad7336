r"""Which of the requests in a worker's hands run: one machine, `handle(event) -> effects`.

    taken -> waiting -> running -> ended        (a slot is held only while running)
       \________\__________\-----> dropped      (its partition went to somebody else, or it was ended from outside)

A suspect, which is to run alone, waits until nothing else runs; nothing begins while it waits at the head or runs.
The order among those that wait is by class, then deadline, then age; it is also the priority passed to the engine.
"""

import heapq
from typing import NamedTuple

from msgspec import Struct

from schemas.messages import ServiceClass

Ticket = int  # names one take-in of a request: the same record, taken again, gets another


class Order(NamedTuple):
    """Who goes first: the lesser."""

    class_rank: int
    deadline_ms: int
    received_at_ms: int


def order(service_class: ServiceClass, deadline_ms: int, received_at_ms: int) -> Order:
    """Rank a request: interactive before batch, then the earliest deadline, then the oldest."""
    return Order(0 if service_class == "interactive" else 1, deadline_ms, received_at_ms)


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


class Lifecycle:
    """Gives slots to requests.

    Args:
        slots: Requests that may run at once.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: list[tuple[Order, Ticket]] = []
        self._waits: dict[Ticket, bool] = {}  # -> whether it is to run alone
        self._running: set[Ticket] = set()
        self._alone: Ticket | None = None

    @property
    def waiting(self) -> int:
        """Requests read and not yet running."""
        return len(self._waits)

    @property
    def running(self) -> int:
        """Requests on the engine."""
        return len(self._running)

    def handle(self, event: Taken | Ended | Dropped) -> list[Run | Abort]:
        """Take in what happened; give what is to be done."""
        effects: list[Run | Abort] = []
        if isinstance(event, Taken):
            heapq.heappush(self._waiting, (event.order, event.ticket))
            self._waits[event.ticket] = event.alone
        elif isinstance(event, Ended):
            self._running.discard(event.ticket)
            if self._alone == event.ticket:
                self._alone = None
        elif event.ticket in self._running:
            effects.append(Abort(event.ticket))
        else:
            self._waits.pop(event.ticket, None)
        while self._waiting and len(self._running) < self._slots and self._alone is None:
            ticket = self._waiting[0][1]
            alone = self._waits.get(ticket)
            if alone and self._running:
                break
            heapq.heappop(self._waiting)
            if alone is not None:  # else it was dropped
                del self._waits[ticket]
                self._running.add(ticket)
                self._alone = ticket if alone else None
                effects.append(Run(ticket, alone))
        return effects
