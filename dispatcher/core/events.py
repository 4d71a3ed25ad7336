"""What happens to the dispatcher, and what it wants done."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from dispatcher.core.item import Item, Work
from schemas.messages import EngineStatus, ErrorInfo, Placement, ServiceClass, Status
from schemas.policy import PoolSettings, TenantConfig


class Arrived(Struct, frozen=True):
    """A request was read and found sound.

    Attributes:
        is_cancelled: It is to be ended at once.
    """

    item: Item
    is_cancelled: bool = False


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


class Steered(Struct, frozen=True):
    """Settings were changed while it runs: those given stand instead of the configuration's.

    Attributes:
        tenants: Tenant -> its whole setting; all that differ.
        pools: Pool -> its whole setting; all that differ.
    """

    tenants: Mapping[str, TenantConfig]
    pools: Mapping[str, PoolSettings]


class LaneSeen(Struct, frozen=True):
    """What lay in a lane when the term began: whose its first unfinished record is.

    Attributes:
        partition: The lane.
        owner: Class and tenant; None where nothing unfinished lies there.
        end: The offset behind its last record.
        position: That of its first unfinished record.
    """

    partition: int
    owner: tuple[ServiceClass, str] | None
    end: int
    position: int = 0


class LaneRead(Struct, frozen=True):
    """How far a lane is done, at a moment when nothing of it is in hand: below is finished for good, or nobody gets it."""

    partition: int
    position: int


class Tick(Struct, frozen=True):
    """Time passed, or a batch of arrivals is over: decide."""


class Forward(Struct, frozen=True):
    """Write the request to a pool's partition, which finishes its record here."""

    item: Item
    pool: str
    worker: str
    partition: int
    placement: Placement | None = None


class Divert(Struct, frozen=True):
    """Write the request to a lane, which finishes its record here; it comes back from there."""

    item: Item
    partition: int


class Finish(Struct, frozen=True):
    """End the request with a terminal result."""

    item: Item
    status: Status
    error: ErrorInfo


Event = Arrived | StatusSeen | Sent | Dropped | Cancelled | Steered | LaneSeen | LaneRead | Tick
Effect = Forward | Divert | Finish
