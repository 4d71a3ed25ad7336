"""The cluster that in-memory transports share: topics, groups, transactions, committed positions, and the hook for faults.

Each process under test has a `MemoryTransport` of its own on one `MemoryCluster`. Everything happens on the loop's
clock and in a fixed order, so that a run can be repeated exactly; nothing here sleeps or starts a thread.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from broker.transport.errors import NoSuchTopic
from broker.transport.memory.groups import Group
from broker.transport.memory.log import PartitionLog
from broker.transport.memory.transactions import Cancel, Transactions
from broker.transport.protocol import Committed, TopicPartition
from schemas.config import KafkaConfig
from schemas.topics import FOREVER

RETENTION = "retention.ms"


class Step(NamedTuple):
    """One moment of one broker operation, as the hook sees it.

    Attributes:
        moment: Whether the operation is about to take effect or just did.
        operation: `poll`, `committed`, `commit`, `heartbeat`, `bounds`, `join`, `leave`, `init`, `produce`, `offsets`,
            `end`, `send`, `check`, `partitions`, `ensure`, `members` or `trim`.
        process: The name of the transport it comes from.
        subject: The topic, partition, group or transactional id concerned, as text.
    """

    moment: Literal["before", "after"]
    operation: str
    process: str
    subject: str


Hook = Callable[[Step], Awaitable[None]]  # may raise, wait, or kill a process


class Topic:
    """A topic's partitions and settings."""

    def __init__(self, name: str, partitions: int, settings: dict[str, str]) -> None:
        self.name, self.settings = name, dict(settings)
        self.logs: list[PartitionLog] = []
        self.grow(partitions)

    def grow(self, partitions: int) -> None:
        """Add partitions up to the number given."""
        self.logs += [PartitionLog(TopicPartition(self.name, n)) for n in range(len(self.logs), partitions)]


class MemoryCluster:
    """The broker's side of everything.

    Args:
        config: The time-outs and bounds; the address in it is only quoted.
        clock: Gives the time of records in seconds; the loop's by default, so that virtual time rules them too.
        rebalance_ms: How long a rebalance takes.
        hook: Called before and after every operation.
        notice_ms: Gives how long a member takes to hear of a new generation; none at all by default.
    """

    def __init__(
        self,
        config: KafkaConfig | None = None,
        *,
        clock: Callable[[], float] | None = None,
        rebalance_ms: int = 20,
        hook: Hook | None = None,
        notice_ms: Callable[[], float] | None = None,
    ) -> None:
        self.config = config or KafkaConfig()
        self.hook, self.notice_ms = hook, notice_ms
        self.topics: dict[str, Topic] = {}
        self.committed: dict[tuple[str, TopicPartition], Committed] = {}
        self.transactions = Transactions(self.later, self.config.transaction_timeout_ms, self.commit)
        self._clock = clock
        self._rebalance_ms = rebalance_ms
        self._groups: dict[str, Group] = {}
        self._names = 0
        self._context = contextvars.Context()  # the broker's timers are nobody else's
        self._up = asyncio.Event()
        self._up.set()

    # -- faults -------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the broker answers."""
        return self._up.is_set()

    def stop(self) -> None:
        """Take the broker down: calls wait until it is back or their deadline passes; nothing is lost."""
        self._up.clear()

    def start(self) -> None:
        """Bring the broker back."""
        self._up.set()

    async def until_up(self) -> None:
        """Wait until the broker answers."""
        await self._up.wait()

    # -- state ---------------------------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time that records get, in milliseconds."""
        return int((self._clock or asyncio.get_running_loop().time)() * 1000)

    def later(self, delay_ms: int, act: Callable[[], None]) -> Cancel:
        """Set a timer of the broker; it is put off while the broker is down. Gives what calls it off."""
        loop = asyncio.get_running_loop()
        handle: asyncio.TimerHandle

        def fire() -> None:
            nonlocal handle
            if self.is_up:
                act()
            else:
                handle = loop.call_later(max(delay_ms, 100) / 1000, fire, context=self._context)

        handle = loop.call_later(delay_ms / 1000, fire, context=self._context)
        return lambda: handle.cancel()  # noqa: PLW0108 - the handle may have been replaced by then

    def name(self, base: str) -> str:
        """Make a name that is used once."""
        self._names += 1
        return f"{base}-{self._names}"

    def add_topic(self, name: str, partitions: int = 1, settings: dict[str, str] | None = None) -> None:
        """Create a topic, or let it grow to so many partitions."""
        topic = self.topics.get(name)
        if topic is None:
            self.topics[name] = Topic(name, partitions, settings or {})
            return
        topic.settings.update(settings or {})
        if partitions > len(topic.logs):
            topic.grow(partitions)
            for group in self._groups.values():
                group.topic_grew(name)

    def logs(self, topic: str, index: int | None = None) -> list[PartitionLog]:
        """Give a topic's partitions.

        Raises:
            NoSuchTopic: With the record's `index` in its call.
        """
        if topic not in self.topics:
            message = f"topic {topic} does not exist"
            raise NoSuchTopic(message, index)
        return self.topics[topic].logs

    def log(self, tp: TopicPartition, index: int | None = None) -> PartitionLog:
        """Give a partition, rid of what its topic's retention has outlived.

        Raises:
            NoSuchTopic: The topic does not exist or has no such partition.
        """
        logs = self.logs(tp.topic, index)
        if not 0 <= tp.partition < len(logs):
            message = f"topic {tp.topic} has no partition {tp.partition}"
            raise NoSuchTopic(message, index)
        log = logs[tp.partition]
        retention_ms = self.topics[tp.topic].settings.get(RETENTION, FOREVER)
        if retention_ms != FOREVER:
            log.expire(self.now_ms() - int(retention_ms))
        return log

    def commit(self, group: str, tp: TopicPartition, position: Committed) -> None:
        """Set a group's committed position."""
        self.committed[group, tp] = position

    def group(self, name: str) -> Group:
        """Give a group, which exists once it is asked for."""
        if name not in self._groups:
            self._groups[name] = Group(
                self.later,
                lambda topic: [log.tp for log in self.topics[topic].logs],
                self._rebalance_ms,
                self.config.rebalance_timeout_ms,
                self.config.session_timeout_ms,
            )
        return self._groups[name]
