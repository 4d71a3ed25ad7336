"""The in-memory consumer."""

import asyncio
import contextvars
from collections.abc import Sequence

from broker.transport.errors import OffsetGone, TransportError
from broker.transport.memory.groups import Group, Member
from broker.transport.memory.process import Process
from broker.transport.protocol import AssignmentListener, Committed, Membership, Record, TopicPartition
from broker.transport.turns import take_in_turn


class MemoryConsumer:
    """Reads from the cluster's logs, as a member of a group or with partitions assigned by hand."""

    def __init__(self, process: Process, group: str | None, listener: AssignmentListener | None = None) -> None:
        self._process, self._cluster = process, process.cluster
        self.group_name, self._listener = group, listener
        self._context = contextvars.copy_context()  # whoever subscribes is called in the same one
        self._member: Member | None = None
        self._generation = -1
        self._has_begun = False  # whoever subscribes holds the consumer before its first assignment comes
        self._early: tuple[Sequence[TopicPartition], Membership] | None = None
        self._topics: Sequence[str] = ()
        self._client_id = ""
        self._assigned: list[TopicPartition] = []
        self._positions: dict[TopicPartition, int] = {}
        self._intake_stopped = False
        self._closed = False
        self._turn = 0
        self._waiter: asyncio.Future[None] | None = None  # of the poll that waits for records

    # -- how it starts ------------------------------------------------------------------------------------------

    def join(self, topics: Sequence[str], client_id: str) -> None:
        """Become a member of the group."""
        self._topics, self._client_id = topics, client_id
        self._intake_stopped = True
        self._member = Member(self._cluster.name(client_id), client_id, topics, self)
        self._group.join(self._member)

    def begin(self) -> None:
        """Our owner holds us: an assignment that came before that may be told."""
        self._has_begun = True
        if self._early is not None:
            asyncio.get_running_loop().call_soon(self._assign, *self._early, context=self._context)

    def take(self, partitions: Sequence[TopicPartition]) -> None:
        """Have partitions assigned by hand."""
        self._assigned = sorted(partitions)

    # -- Consumer -------------------------------------------------------------------------------------------------

    async def poll(
        self, partitions: Sequence[TopicPartition], records_max: int, timeout_ms: int, each_max: int | None = None
    ) -> list[Record]:
        """See the protocol."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        named = list(dict.fromkeys(partitions))
        await self._process.step("before", "poll", self._subject)
        while True:
            self._must_be_open()
            was = dict(self._positions)
            reads = self._cluster.is_up and not self._intake_stopped
            records = self._collect(named, records_max, each_max) if reads else []
            left_s = until - loop.time()
            if records or left_s <= 0:
                return await self._answer(records, was)
            await self._until_written(named, left_s)

    def seek(self, partition: TopicPartition, offset: int) -> bool:
        """See the protocol."""
        if self._closed or partition not in self._assigned:
            return False
        self._positions[partition] = offset
        self._wake()
        return True

    def position(self, partition: TopicPartition) -> int | None:
        """See the protocol."""
        return self._positions.get(partition)

    async def committed(self, partition: TopicPartition) -> Committed | None:
        """See the protocol."""
        group = self.group_name
        if group is None:
            message = "this consumer names no group whose committed positions it could read"
            raise TransportError(message)
        return await self._process.call("committed", _text(partition), lambda: self._cluster.committed.get((group, partition)))

    async def still_member(self) -> bool:
        """See the protocol."""
        member = self._member
        if member is None:
            return True
        return await self._process.call("heartbeat", self._subject, lambda: self._is_current(member))

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """See the protocol."""

        def read() -> dict[TopicPartition, tuple[int, int]]:
            logs = [self._cluster.log(tp) for tp in partitions]
            return {log.tp: (log.first, log.stable) for log in logs}

        return await self._process.call("bounds", ",".join(map(_text, partitions)), read)

    async def close(self) -> None:
        """See the protocol."""
        if self._closed:
            return
        self._closed = True
        self._wake()
        member = self._member
        if member is None or self._process.is_killed:
            return
        try:
            await self._process.call("leave", self._subject, lambda: self._group.leave(member))
        except BaseException:
            self._group.silence(member)  # its session ends by itself
            raise

    # -- what an outbox without transactions needs -------------------------------------------------------------------

    def commit(self, partition: TopicPartition, position: Committed) -> None:
        """Commit a position, as far as the group lets us.

        Raises:
            TransportError: The partition is not ours any more.
        """
        group = self.group_name
        if group is None:
            message = "this consumer names no group to commit to"
            raise TransportError(message)
        if self._member is None:
            allowed = not self._group.members  # the group keeps off whoever is no member while it has any
        else:
            allowed = self._is_current(self._member) and partition in self._assigned
        if not allowed:
            message = f"{_text(partition)} is not ours to commit in group {group} any more"
            raise TransportError(message)
        self._cluster.commit(group, partition, position)

    # -- what the group calls ------------------------------------------------------------------------------------------

    def revoke(self) -> None:
        """A rebalance began."""
        self._intake_stopped = True
        if self._listener is not None:
            self._context.run(self._listener.revoked, tuple(self._assigned))

    def assign(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """The new generation started; we hear of it now, or a little later."""
        notice_ms = self._cluster.notice_ms() if self._cluster.notice_ms is not None else 0
        if notice_ms:
            loop = asyncio.get_running_loop()
            loop.call_later(notice_ms / 1000, self._assign, partitions, membership, context=self._context)
        else:
            self._context.run(self._assign, partitions, membership)

    def _assign(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """Every partition waits for `seek`; a generation that is over already is passed over."""
        if self._group.generation != membership.generation or self._closed:
            return
        if not self._has_begun:
            self._early = partitions, membership
            return
        self._generation = membership.generation
        self._assigned = list(partitions)
        self._positions.clear()
        self._intake_stopped = False
        if self._listener is not None:
            self._listener.assigned(tuple(partitions), membership)

    # -- the fate of its process -----------------------------------------------------------------------------------------

    def fall_silent(self) -> None:
        """Send no more heartbeats."""
        if self._member is not None and self._group.members.get(self._member.name) is self._member:
            self._group.silence(self._member)  # also while it is leaving: nobody may ever hear of that

    def wake_up(self) -> None:
        """Send heartbeats again; whoever was expired meanwhile joins anew."""
        if self._member is None or self._closed or self._group.revive(self._member):
            return
        self.revoke()
        self.join(self._topics, self._client_id)

    # -- inside ---------------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> Group:
        return self._cluster.group(self.group_name or "")

    @property
    def _subject(self) -> str:
        return self.group_name or ",".join(map(_text, self._assigned))

    def _is_current(self, member: Member) -> bool:
        group = self._group
        return group.members.get(member.name) is member and (group.rebalancing or group.generation == self._generation)

    async def _answer(self, records: list[Record], was: dict[TopicPartition, int]) -> list[Record]:
        """Let the answer travel. What was read stays unread where it is lost, or where somebody has sought meanwhile."""
        now = {tp: position for tp, position in self._positions.items() if position != was.get(tp)}
        try:
            await self._process.step("after", "poll", self._subject)
        except BaseException:
            self._positions.update({tp: was[tp] for tp, position in now.items() if self._positions.get(tp) == position})
            raise
        moved = [tp for tp, position in now.items() if self._positions.get(tp) != position]
        return [record for record in records if TopicPartition(record.topic, record.partition) not in moved]

    def _must_be_open(self) -> None:
        self._process.must_live()
        if self._closed:
            message = "the consumer is closed"
            raise TransportError(message)

    def _collect(self, named: list[TopicPartition], records_max: int, each_max: int | None) -> list[Record]:
        ours = [tp for tp in named if tp in self._positions]
        self._turn += 1
        return take_in_turn(ours, self._turn, records_max, self._take, each_max)

    def _take(self, tp: TopicPartition, records_max: int) -> list[Record]:
        log, position = self._cluster.log(tp), self._positions[tp]
        if not log.first <= position <= log.end:
            message = f"{_text(tp)}: position {position} lies outside of {log.first}..{log.end}"
            raise OffsetGone(message)
        records, self._positions[tp] = log.read(position, records_max, self._cluster.config.record_bytes_max)
        return records

    async def _until_written(self, named: list[TopicPartition], limit_s: float) -> None:
        """Wait for a record, a seek or the limit."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        logs = [self._cluster.log(tp) for tp in named if tp in self._assigned]
        for log in logs:
            log.call_when_written(waiter)
        try:
            await asyncio.wait([waiter], timeout=limit_s)
        finally:
            self._waiter = None
            for log in logs:
                log.forget(waiter)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _text(tp: TopicPartition) -> str:
    return f"{tp.topic}/{tp.partition}"
