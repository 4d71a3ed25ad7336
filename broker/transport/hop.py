"""One hop: consume records, work on them out of order, write their output and finish their offsets in one step.

Both sides of the engine topics stand on this: the dispatcher (request -> engine topic) and the worker (engine topic
-> results). The handler starts work and later calls `finish`; everything about Kafka is here and in `part.py`.

Who owns what: `Hop` owns the consumer and decides what is read; each `Part` owns one input partition, its outbox, its
ledger and its recovery, in one task of its own. A record's work ends exactly once: by `finish`, or by `drop` when the
partition went to somebody else or the record turns out to be finished.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from broker.transport.errors import OffsetGone, TransportError
from broker.transport.handler import Handler, Work
from broker.transport.ledger import NOBODY, tag
from broker.transport.part import Part
from broker.transport.protocol import Admin, Consumer, Membership, Outgoing, TopicPartition, Transport
from schemas.config import HopConfig

log = logging.getLogger("forebay.hop")

POLL_MS = 20
IDLE_POLL_MS = 100  # where every partition is asked for, nothing but a record can make a difference
PAUSE_S = 0.05


class Hop:
    """Runs a handler over partitions, by subscription or assigned by hand.

    Args:
        transport: Where consumers and outboxes come from.
        group: Whose committed positions are kept, and the first part of each transactional id.
        handler: What is done with the records.
        config: Bounds.
        still_owner: Asked after a failed commit, for partitions assigned by hand; a group is asked itself.
    """

    def __init__(
        self,
        transport: Transport,
        group: str,
        handler: Handler,
        config: HopConfig,
        *,
        still_owner: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self.transport, self.group, self.handler, self.config = transport, group, handler, config
        self._still_owner = still_owner
        self._parts: dict[TopicPartition, Part] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._consumer: Consumer | None = None
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._by_hand = False
        self._drain_s = 0.0
        self._admin: Admin | None = None
        self.owner = NOBODY
        self.held_bytes = 0  # of records in hand; what is read ahead of a partition is bounded by itself
        self.failure: Exception | None = None

    # -- what the service calls ---------------------------------------------------------------------------------

    async def subscribe(self, topic: str, client_id: str) -> None:
        """Join the group on a topic; its assignments come by themselves.

        Args:
            topic: What to read.
            client_id: Never used before: by it others tell whether this process is still there.
        """
        self.owner = tag(client_id)
        self._consumer = await self.transport.subscribe([topic], self.group, self, client_id)

    async def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Take the given partitions, and no others, by hand."""
        self._by_hand = True
        if self._consumer is not None:
            await self._consumer.close()
        self._consumer = await self.transport.assign(partitions, self.group)
        self.assigned(partitions, Membership("", 0))

    def finish(self, work: Work, outputs: Sequence[Outgoing]) -> None:
        """End a record's work; outputs and offset become durable together. Without effect on work that was dropped."""
        part = self._parts.get(work[0])
        if part is not None:
            part.finish(work[1], outputs)

    def note(self, work: Work, note: int) -> None:
        """Write a note beside a record in work; `Handler.noted` is called once it is durable."""
        part = self._parts.get(work[0])
        if part is not None:
            part.note(work[1], note)

    def stop(self, drain_ms: int = 0) -> None:
        """Take nothing in any more, let work finish for `drain_ms`, commit, drop the rest and leave; `run` then returns."""
        self._drain_s = drain_ms / 1000
        self._stopping.set()
        self._freed.set()

    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be taken in of each partition that is in hand."""
        return {tp: part.admitted for tp, part in self._parts.items() if part.is_open}

    def idle_position(self, partition: TopicPartition) -> int | None:
        """Below it everything is finished for good, or nobody gets it; None while anything of the partition is in hand."""
        part = self._parts.get(partition)
        return part.read_to if part is not None and part.is_open and not part.used else None

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions in hand, sorted."""
        return sorted(self._parts)

    @property
    def used(self) -> int:
        """Records in hand: read ahead, running, and finished but not yet committed."""
        return sum(part.used for part in self._parts.values())

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            OffsetGone: A committed offset is not there any more; going on would hide a loss.
        """
        try:
            while not self._stopping.is_set():
                await self._turn_once()
                if self.failure is not None:
                    raise self.failure
            await self._drain()
        finally:
            await self._let_go()

    # -- the consumer's listener ---------------------------------------------------------------------------------

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Go on working: only intake waits until the new assignment is known."""
        log.info("partitions_revoked group=%s partitions=%s", self.group, _short(partitions))

    def assigned(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """Let go of what went elsewhere, take over what is new, keep what came straight back."""
        names, generation = _short(partitions), membership.generation
        log.info("partitions_assigned group=%s generation=%d partitions=%s", self.group, generation, names)
        for tp in [tp for tp in self._parts if tp not in set(partitions)]:
            self._release(self._parts.pop(tp))
        for tp in partitions:
            part = self._parts.get(tp)
            if part is None:
                self._parts[tp] = part = Part(self, tp)
            part.assigned(membership)
        self._freed.set()
        self.handler.moved()

    # -- what the parts call ------------------------------------------------------------------------------------------

    @property
    def consumer(self) -> Consumer:
        """The consumer; parts exist only once it does."""
        if self._consumer is None:
            message = "the hop has no consumer yet"
            raise RuntimeError(message)
        return self._consumer

    async def still_owner(self) -> bool:
        """Ask whoever knows whether our partitions are still ours."""
        if self._by_hand:
            return self._still_owner is None or await self._still_owner()
        return await self.consumer.still_member()

    async def is_alive(self, owner: int) -> bool:
        """Whether a member of the group has this tag; also where nobody can tell."""
        try:
            self._admin = self._admin or await self.transport.admin()
            members = await self._admin.members(self.group)
        except (TransportError, TimeoutError, OSError) as error:
            log.warning("members_unknown group=%s error=%s", self.group, error)
            return True
        return owner in map(tag, members)

    def freed(self) -> None:
        """A record was let go, so there may be room."""
        self._freed.set()

    def fail(self, error: Exception) -> None:
        """Stop with an alarm: going on would lose records."""
        self.failure = error
        self._freed.set()

    # -- the loop ----------------------------------------------------------------------------------------------------------------

    async def _turn_once(self) -> None:
        room = min(
            self.handler.room(),
            self.config.in_flight_max - sum(part.in_work for part in self._parts.values()),
            self.config.in_flight_max if self.held_bytes < self.config.in_flight_bytes_max else 0,
        )
        ready = [tp for tp, part in self._parts.items() if part.wants_records and (room > 0 or part.is_catching_up)]
        catching_up = room <= 0 and bool(ready)
        is_idle = len(ready) == len(self._parts)
        self._freed.clear()
        try:
            wait_ms = IDLE_POLL_MS if is_idle else POLL_MS
            records = await self.consumer.poll(ready, max(room, 1), wait_ms, self.config.unfinished_max)
        except OffsetGone as error:
            await self._look_again(error)
            return
        except TransportError as error:
            log.warning("poll_failed group=%s error=%s", self.group, error)
            await asyncio.sleep(PAUSE_S)
            return
        for record in records:
            part = self._parts.get(TopicPartition(record.topic, record.partition))
            if part is not None:
                part.offer(record)
        for tp in ready:
            if tp in self._parts:
                self._parts[tp].read_to = self.consumer.position(tp)
        self.pump()
        if not records and room <= 0 and not catching_up and not self._stopping.is_set():
            await self._wait_for_room()

    async def _look_again(self, error: OffsetGone) -> None:
        """A position lies outside of its partition: records are lost, or somebody else finished them and they are deleted."""
        try:
            bounds = await self.consumer.bounds(list(self._parts))
        except TransportError as reason:
            log.warning("bounds_unknown group=%s error=%s", self.group, reason)
            await asyncio.sleep(PAUSE_S)
            return
        log.warning("position_gone group=%s error=%s", self.group, error)
        for tp, (first, end) in bounds.items():
            part, position = self._parts.get(tp), self.consumer.position(tp)
            if part is None or position is None:
                continue
            if position < first:
                part.doubt()
            elif position > end:  # the log was cut: nobody's work explains that
                self.fail(error)

    def pump(self) -> None:
        """Admit what was read ahead, as far as the ledgers' bounds go, until nothing moves."""
        moved = True
        while moved:
            moved = False
            for part in list(self._parts.values()):
                moved = part.admit() or moved
            self.handler.flush()

    async def _drain(self) -> None:
        """Keep the membership while running work finishes."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._drain_s
        while loop.time() < until and any(part.is_busy for part in self._parts.values()):
            await self.consumer.poll([], 1, POLL_MS)

    async def _wait_for_room(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._freed.wait()

    def _release(self, part: Part) -> None:
        part.lose()
        task = asyncio.ensure_future(part.ended())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _let_go(self) -> None:
        for part in self._parts.values():
            part.lose()
        await asyncio.gather(*(part.ended() for part in self._parts.values()), *self._closing)
        self._parts.clear()
        if self._consumer is not None:
            await self._consumer.close()
        if self._admin is not None:
            await self._admin.close()


def _short(partitions: Sequence[TopicPartition]) -> str:
    return ",".join(f"{tp.topic}/{tp.partition}" for tp in sorted(partitions)) or "none"
