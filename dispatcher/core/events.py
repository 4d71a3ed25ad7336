"""What happens to the dispatcher, and what it wants done."""

from collections.abc import Callable

from msgspec import Struct

from dispatcher.core.item import Item, Work
from schemas.messages import EngineStatus, ErrorInfo, Status


class Arrived(Struct, frozen=True):
    """A request was read and found sound."""

    item: Item


class StatusSeen(Struct, frozen=True):
    """A worker's snapshot came in."""

    status: EngineStatus


class Sent(Struct, frozen=True):
    """A forwarded record is durable; the offset is None where the broker's answer was lost."""

    work: Work
    offset: int | None


class Dropped(Struct, frozen=True):
    """A record in hand is not ours any more."""

    work: Work


class Cancelled(Struct, frozen=True):
    """Requests were cancelled; whatever is being sent already is left to who gets it.

    Attributes:
        covers: Whether a request is one of them.
    """

    covers: Callable[[Item], bool]


class Tick(Struct, frozen=True):
    """Time passed, or a batch of arrivals is over: decide."""


class Forward(Struct, frozen=True):
    """Write the request to a pool's partition, which finishes its record here."""

    item: Item
    pool: str
    worker: str
    partition: int


class Finish(Struct, frozen=True):
    """End the request with a terminal result."""

    item: Item
    status: Status
    error: ErrorInfo


Event = Arrived | StatusSeen | Sent | Dropped | Cancelled | Tick
Effect = Forward | Finish
