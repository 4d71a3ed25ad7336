r"""Lanes: where a tenant's requests wait that are more than memory shall hold, each lane a partition of its own on Kafka.

    a request of an owner (class and tenant):
        read -> held in memory, up to the owner's bound
             \-> diverted, its record durable in the owner's lane -> read there once the owner has room -> held
    a lane:
        free -> belongs to one owner (or, once there are no free ones, is shared) -> empty, and so free again

While anything of an owner is unread in its lane, later requests of it follow there, so that it stays in order; retries
are older than what lies there and do not. Beside the owner's bound there are those of each input partition's ledger and
of the hop as a whole. As these are neared, no owner may hold more than a fair share, and then nobody a second request, so
that who has none in hand gets in. The last places of a ledger stay free: a partition is always read on.

Batch may take all lanes but a quarter, and interactive all but one. Where an owner over its bound finds none left, batch
shares the shortest one of batch, and interactive is refused.

A lane is empty when all that was sent there is finished for good and nothing is on its way there. One machine decides
both, so a lane that is given to another owner holds nothing of the one before. After a takeover a lane belongs to the
owner of its first unfinished record, and how many lie there is not known before they are read.
"""

from enum import Enum

from msgspec import Struct

from broker.transport.protocol import TopicPartition
from dispatcher.core.item import Item, Work
from schemas.config import HopConfig
from schemas.messages import ServiceClass
from schemas.policy import LanesConfig

Owner = tuple[ServiceClass, str]

SPARE = 16  # one of so many places in a ledger stays free
HOLD_SPAN = 25  # times a ledger's records: fewer are read again in no time, so what holds them back may stay
LOOKS = 16  # at what is held back, within the time after which it moves


class Refusal(Enum):
    """Why a request can wait nowhere."""

    NO_LANE = "its tenant has as many requests waiting as memory holds, and every lane is taken"


class _Amount:
    """Records and their bytes."""

    __slots__ = ("records", "size")

    def __init__(self) -> None:
        self.records = self.size = 0

    def add(self, size: int) -> None:
        self.records += 1
        self.size += size

    def take(self, size: int) -> None:
        self.records -= 1
        self.size -= size


class _Stay(Struct):
    """An owner's requests in a lane.

    Attributes:
        count: Sent there in this term, or on their way, and not read yet.
        inherited: More may lie there from before.
    """

    count: int = 0
    inherited: bool = False


class _Lane:
    """One partition of the lanes' topic."""

    def __init__(self, number: int, end: int, position: int) -> None:
        self.number = number
        self.service_class: ServiceClass | None = None  # of whoever has requests there; None: the lane is free
        self.stays: dict[Owner, _Stay] = {}
        self.under_way = 0
        self.lost = False  # the offset of something sent there is not known
        self.inherited_end = self.end = end
        self.position = position
        self.held = _Amount()  # in memory, read here

    @property
    def length(self) -> int:
        """About how many requests lie there."""
        return max(self.end - self.position, 0) + self.under_way

    @property
    def sole(self) -> Owner | None:
        """The owner it belongs to alone."""
        return next(iter(self.stays)) if len(self.stays) == 1 else None

    def awaits(self, owner: Owner) -> bool:
        """Whether anything of the owner may be unread there."""
        stay = self.stays.get(owner)
        return stay is not None and (stay.count > 0 or (stay.inherited and self.position < self.inherited_end))


class _Source:
    """The requests in memory that came from one input partition."""

    def __init__(self, position: int) -> None:
        self.items: dict[int, tuple[Item, int, int]] = {}  # offset -> with its bytes and since when; in order of offsets
        self.owners: dict[Owner, int] = {}
        self.position = position  # the next offset that was not read yet


class Lanes:
    """Decides what is held in memory and what waits in which lane.

    There are no lanes before they were `seen`, and while there are none everything is held.

    Args:
        config: An owner's bounds.
        hop: The bounds of everything together.
        topic: The lanes' topic.
    """

    def __init__(self, config: LanesConfig, hop: HopConfig, topic: str) -> None:
        self._config, self._hop, self._topic = config, hop, topic
        self._lanes: dict[int, _Lane] = {}
        self._homes: dict[Owner, _Lane] = {}
        self._mine: dict[Owner, _Amount] = {}  # in memory; nobody is named who has nothing there
        self._sources: dict[TopicPartition, _Source] = {}
        self._total = _Amount()
        self._under_way: dict[Work, tuple[_Lane, Owner]] = {}
        self._looked_ms = 0

    # -- what is asked ------------------------------------------------------------------------------------------------

    def count(self, service_class: ServiceClass, tenant: str) -> int:
        """Requests of a tenant that wait in a lane: all of this term, and not those of earlier ones."""
        owner = service_class, tenant
        home = self._homes.get(owner)
        return 0 if home is None else home.stays[owner].count

    def owners(self) -> dict[int, list[Owner]]:
        """Who has requests in which lane; a lane that is named without an owner has only what is not known whose it is."""
        return {lane.number: list(lane.stays) for lane in self._lanes.values() if lane.service_class is not None}

    def takes(self, partition: int) -> bool:
        """Whether the next record of a lane may come to memory."""
        lane = self._lanes.get(partition)
        if lane is None or self._is_full(lane.held, 1):
            return False
        sole = lane.sole
        mine = lane.held if sole is None else self._mine.get(sole)
        return mine is None or not (self._is_full(mine, 1) or self._is_crowded(mine, 0))

    def has_excess(self, item: Item) -> bool:
        """Whether a request that was read goes to a lane as things stand; it may be held once others are dispatched."""
        owner, size, source = _owner(item), len(item.value), self._sources.get(item.work[0])
        if source is not None and self._fills(source, owner):
            return True
        mine = self._mine.get(owner)
        return mine is not None and (self._is_full(mine, _patience(item), size) or self._is_crowded(mine, size))

    # -- what happens ---------------------------------------------------------------------------------------------------

    def seen(self, partition: int, owner: Owner | None, end: int, position: int) -> None:
        """A lane is there; known are its end, and whose the first unfinished record is, if any, and where."""
        if partition in self._lanes:
            return  # from then on it is known better here
        lane = self._lanes[partition] = _Lane(partition, end, end if owner is None else position)
        if owner is None:
            return
        lane.service_class = owner[0]
        if owner not in self._homes:  # else it was one of several there: the lane is nobody's until it is empty
            lane.stays[owner] = _Stay(inherited=True)
            self._homes[owner] = lane

    def came(self, item: Item) -> None:
        """A record was read: what came from a lane does not wait there any more, whatever becomes of it."""
        tp, offset = item.work
        source = self._sources.get(tp)
        if source is not None:
            source.position = max(source.position, offset + 1)
        lane = self._lanes.get(tp.partition) if tp.topic == self._topic else None
        if lane is None:
            return
        lane.position = max(lane.position, offset + 1)
        owner = _owner(item)
        stay = lane.stays.get(owner)
        if stay is not None and stay.count and offset >= lane.inherited_end:
            stay.count -= 1
        self._let_leave(lane, owner)

    def place(self, item: Item, now_ms: int) -> int | Refusal | None:
        """Say where a request is to wait: in memory (None), where it then is in hand, or in a lane, to which it is on its way.

        Args:
            item: As it was read, after `came`.
            now_ms: Unix time.
        """
        if item.work[0].topic != self._topic:
            owner = _owner(item)
            home = self._homes.get(owner)
            if home is not None and not _is_retry(item) and home.awaits(owner):
                return self._divert(item.work, owner, home)
            if self.has_excess(item):
                lane, mine = self._lane_of(owner), self._mine.get(owner)
                is_over = mine is not None and self._is_full(mine, 1, len(item.value))
                if lane is None and self._lanes and is_over and owner[0] == "interactive" and not _is_retry(item):
                    return Refusal.NO_LANE
                lane = self._shortest(owner) if lane is None else lane
                if lane is not None:
                    return self._divert(item.work, owner, lane)
        self._hold(item, now_ms)
        return None

    def left(self, item: Item) -> None:
        """A request left memory: it was dispatched, ended, dropped or diverted."""
        tp, offset = item.work
        source, owner = self._sources[tp], _owner(item)
        size = source.items.pop(offset)[1]
        source.owners[owner] -= 1
        if not source.owners[owner]:
            del source.owners[owner]
        mine = self._mine[owner]
        mine.take(size)
        if not mine.records:
            del self._mine[owner]
        self._total.take(size)
        if tp.topic == self._topic and tp.partition in self._lanes:
            self._lanes[tp.partition].held.take(size)

    def sent(self, work: Work, offset: int | None) -> None:
        """Something that was on its way is durable; passed over where it did not go to a lane."""
        lane, _ = self._under_way.pop(work, (None, None))
        if lane is None:
            return
        lane.under_way -= 1
        if offset is None:
            lane.lost = True
        else:
            lane.end = max(lane.end, offset + 1)

    def read(self, partition: int, position: int) -> None:
        """Below that position everything of a lane is finished for good, or nobody gets it, and nothing of it is in hand."""
        lane = self._lanes.get(partition)
        if lane is None:
            return
        lane.position = max(lane.position, position)
        unread = lane.lost and any(stay.count for stay in lane.stays.values())
        if not (lane.under_way or lane.held.records or lane.position < lane.end or unread):
            for owner in lane.stays:
                del self._homes[owner]
            lane.stays.clear()
            lane.service_class, lane.lost = None, False

    def held_back(self, now_ms: int) -> list[tuple[Item, int]]:
        """Give requests that keep a partition's position back for too long, each with the lane to which it is on its way.

        The caller takes them out of hand.
        """
        if 0 <= now_ms - self._looked_ms < self._config.hold_ms // LOOKS:
            return []
        self._looked_ms = now_ms
        found = []
        for source in self._sources.values():
            for offset, (item, _, since_ms) in source.items.items():
                is_long = now_ms - since_ms >= self._config.hold_ms
                if not is_long or source.position - offset <= HOLD_SPAN * self._hop.unfinished_max:
                    break
                owner = _owner(item)
                lane = self._lane_of(owner) or self._shortest(owner)
                if lane is None:
                    break
                found.append((item, self._divert(item.work, owner, lane)))
        return found

    # -- bounds ---------------------------------------------------------------------------------------------------------

    def _is_full(self, mine: _Amount, times: int, size: int = 0) -> bool:
        """Whether an owner that has something may hold no more."""
        config = self._config
        records, held = mine.records, mine.size + size
        return records > 0 and (records >= times * config.records_max or held >= times * config.bytes_max)

    def _fills(self, source: _Source, owner: Owner) -> bool:
        """Whether one more request of the owner is more than its share of a partition's ledger, or one of the last."""
        most, total = self._hop.unfinished_max, len(source.items)
        spare = most // SPARE
        if spare and total >= most - spare:
            return True
        return _exceeds(source.owners.get(owner, 0), 1, total, most, len(source.owners))

    def _is_crowded(self, mine: _Amount, size: int) -> bool:
        hop, total, owners = self._hop, self._total, len(self._mine)
        return _exceeds(mine.records, 1, total.records, hop.in_flight_max, owners) or _exceeds(
            mine.size, size, total.size, hop.in_flight_bytes_max, owners
        )

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _hold(self, item: Item, now_ms: int) -> None:
        (tp, offset), owner, size = item.work, _owner(item), len(item.value)
        source = self._sources.get(tp)
        if source is None:
            source = self._sources[tp] = _Source(offset + 1)
        source.items[offset] = item, size, now_ms
        source.owners[owner] = source.owners.get(owner, 0) + 1
        mine = self._mine.get(owner)
        if mine is None:
            mine = self._mine[owner] = _Amount()
        mine.add(size)
        self._total.add(size)
        if tp.topic == self._topic and tp.partition in self._lanes:
            self._lanes[tp.partition].held.add(size)

    def _divert(self, work: Work, owner: Owner, lane: _Lane) -> int:
        if owner not in self._homes:
            self._homes[owner] = lane
            lane.service_class = owner[0]
            lane.stays[owner] = _Stay()
            for other in [o for o in lane.stays if o != owner]:
                self._let_leave(lane, other)
        lane.stays[owner].count += 1
        lane.under_way += 1
        self._under_way[work] = lane, owner
        return lane.number

    def _let_leave(self, lane: _Lane, owner: Owner) -> None:
        """Whoever has nothing unread in a lane that others need as well has no more to do with it."""
        if len(lane.stays) > 1 and owner in lane.stays and not lane.awaits(owner):
            del lane.stays[owner], self._homes[owner]

    def _lane_of(self, owner: Owner) -> _Lane | None:
        """The owner's lane, or a free one that its class may take."""
        home = self._homes.get(owner)
        if home is not None:
            return home
        lanes = self._lanes.values()
        most = len(lanes) - len(lanes) // 4 if owner[0] == "batch" else max(1, len(lanes) - 1)
        if sum(lane.service_class == owner[0] for lane in lanes) >= most:
            return None
        return min((lane for lane in lanes if lane.service_class is None), key=lambda lane: lane.number, default=None)

    def _shortest(self, owner: Owner) -> _Lane | None:
        """The shortest lane of the owner's class."""
        same = (lane for lane in self._lanes.values() if lane.service_class == owner[0])
        return min(same, key=lambda lane: (lane.length, lane.number), default=None)


def _owner(item: Item) -> Owner:
    return item.envelope.service_class, item.envelope.tenant


def _is_retry(item: Item) -> bool:
    """Whether it lies elsewhere than where the client produced it."""
    return not item.is_new


def _patience(item: Item) -> int:
    """A retry waits since long and would be the last in its lane, so its owner may hold twice as much for its sake."""
    return 2 if _is_retry(item) else 1


def _exceeds(own: int, more: int, total: int, most: int, owners: int) -> bool:
    """Whether an owner takes too much of a bound: from half of it on more than a fair share, from three quarters on a second."""
    if 2 * total < most:
        return False
    limit = 3 * most // 4
    return own > 0 and (total >= limit or (own + more) * max(owners, 1) > limit)
