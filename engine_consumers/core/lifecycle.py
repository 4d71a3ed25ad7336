r"""Which of the requests in a worker's hands run: one machine, `handle(event) -> effects`.

    taken -> waiting -> running -> ended        (a slot is held only while running)
       \________\__________\-----> dropped      (its partition went to somebody else)

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


class Ended(Struct, frozen=True):
    """A run is over, whatever came of it."""

    ticket: Ticket


class Dropped(Struct, frozen=True):
    """A request is not ours to finish any more."""

    ticket: Ticket


class Run(Struct, frozen=True):
    """Start the request on the engine."""

    ticket: Ticket


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
        self._waits: set[Ticket] = set()
        self._running: set[Ticket] = set()

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
            self._waits.add(event.ticket)
        elif isinstance(event, Ended):
            self._running.discard(event.ticket)
        elif event.ticket in self._running:
            effects.append(Abort(event.ticket))
        else:
            self._waits.discard(event.ticket)
        while self._waiting and len(self._running) < self._slots:
            ticket = heapq.heappop(self._waiting)[1]
            if ticket in self._waits:
                self._waits.discard(ticket)
                self._running.add(ticket)
                effects.append(Run(ticket))
        return effects
