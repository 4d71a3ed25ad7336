"""Consumer groups: members, generations, eager rebalances, sticky assignment.

A rebalance begins when a member joins, leaves or expires, or when a topic grows. Every member's partitions are revoked
at once; a moment later the next generation starts with a whole new assignment. Members that do not answer (killed or
frozen processes) hold it up until the rebalance time-out and are left out then.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from broker.transport.memory.transactions import Cancel, Later
from broker.transport.protocol import Membership, TopicPartition


class MemberCalls(Protocol):
    """What a group calls on a member's consumer."""

    def revoke(self) -> None:
        """A rebalance began."""

    def assign(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """The new generation started."""


class Member:
    """One consumer in a group."""

    def __init__(self, name: str, client_id: str, topics: Sequence[str], calls: MemberCalls) -> None:
        self.name, self.client_id, self.topics, self.calls = name, client_id, frozenset(topics), calls
        self.partitions: list[TopicPartition] = []
        self.answers = True
        self.cancel_expiry: Cancel | None = None


class Group:
    """One consumer group.

    Args:
        later: Sets a timer.
        partitions: Gives the partitions of a topic.
        rebalance_ms: How long a rebalance takes when everybody answers.
        rebalance_timeout_ms: How long it waits for those who do not.
        session_timeout_ms: After which a silent member is expired.
    """

    def __init__(
        self,
        later: Later,
        partitions: Callable[[str], Iterable[TopicPartition]],
        rebalance_ms: int,
        rebalance_timeout_ms: int,
        session_timeout_ms: int,
    ) -> None:
        self._later, self._partitions = later, partitions
        self._rebalance_ms, self._rebalance_timeout_ms = rebalance_ms, rebalance_timeout_ms
        self._session_timeout_ms = session_timeout_ms
        self.members: dict[str, Member] = {}
        self.generation = 0
        self.settled = asyncio.Event()
        self.settled.set()

    @property
    def rebalancing(self) -> bool:
        """Whether the next generation has not started yet."""
        return not self.settled.is_set()

    def join(self, member: Member) -> None:
        """Take in a member."""
        self.members[member.name] = member
        self._begin()

    def leave(self, member: Member) -> None:
        """Let a member go at once."""
        if member.cancel_expiry is not None:
            member.cancel_expiry()
        if self.members.pop(member.name, None) is not None:
            self._begin()

    def silence(self, member: Member) -> None:
        """The member's process answers no more: it is expired unless it comes back in time."""
        if member.answers:
            member.answers = False
            member.cancel_expiry = self._later(self._session_timeout_ms, lambda: self.leave(member))

    def revive(self, member: Member) -> bool:
        """The member's process answers again; False where it was expired meanwhile."""
        member.answers = True
        if member.cancel_expiry is not None:
            member.cancel_expiry()
        known = member.name in self.members
        if known and self.rebalancing:
            member.calls.revoke()
        return known

    def topic_grew(self, topic: str) -> None:
        """A topic has more partitions now."""
        if any(topic in member.topics for member in self.members.values()):
            self._begin()

    def _begin(self) -> None:
        if self.rebalancing:
            return  # whoever came or went meanwhile is seen at its end
        self.settled.clear()
        for member in list(self.members.values()):
            if member.answers and member.partitions:
                member.calls.revoke()
        self._later(self._rebalance_ms, lambda: self._complete(waited=False))

    def _complete(self, *, waited: bool) -> None:
        if not waited and not all(member.answers for member in self.members.values()):
            self._later(max(self._rebalance_timeout_ms - self._rebalance_ms, 0), lambda: self._complete(waited=True))
            return
        for member in [m for m in self.members.values() if not m.answers]:
            del self.members[member.name]
        self.settled.set()
        self.generation += 1
        topics = {topic for member in self.members.values() for topic in member.topics}
        everything = sorted(tp for topic in topics for tp in self._partitions(topic))
        before = {m.name: m.partitions for m in self.members.values()}
        after = assign_sticky(everything, {m.name: m.topics for m in self.members.values()}, before)
        for member in list(self.members.values()):
            member.partitions = after[member.name]
        for member in list(self.members.values()):
            member.calls.assign(member.partitions, Membership(member.name, self.generation))


def assign_sticky(
    partitions: Sequence[TopicPartition],
    topics: Mapping[str, frozenset[str]],
    before: Mapping[str, Sequence[TopicPartition]],
) -> dict[str, list[TopicPartition]]:
    """Spread partitions evenly over members, moving as few as possible and each member's highest first.

    Args:
        partitions: All of them, sorted.
        topics: Member -> topics it reads, in the order of joining.
        before: Member -> what it had.
    """
    existing = set(partitions)
    result: dict[str, list[TopicPartition]] = {
        name: sorted(tp for tp in before.get(name, ()) if tp in existing and tp.topic in topics[name]) for name in topics
    }
    kept = {tp for held in result.values() for tp in held}
    for tp in partitions:
        takers = [name for name in topics if tp.topic in topics[name]]
        if tp not in kept and takers:
            result[min(takers, key=lambda name: len(result[name]))].append(tp)
    moved = True
    while moved:
        moved = False
        for giver in sorted(topics, key=lambda name: -len(result[name])):
            for tp in sorted(result[giver], reverse=True):
                takers = [name for name in topics if tp.topic in topics[name] and len(result[name]) + 1 < len(result[giver])]
                if takers:
                    result[giver].remove(tp)
                    result[min(takers, key=lambda name: len(result[name]))].append(tp)
                    moved = True
                    break
    return {name: sorted(held) for name, held in result.items()}
