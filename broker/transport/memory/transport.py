"""The in-memory transport: one process's way to a `MemoryCluster`."""

from collections.abc import Sequence

from broker.transport.memory.admin import MemoryAdmin
from broker.transport.memory.cluster import MemoryCluster
from broker.transport.memory.consumer import MemoryConsumer
from broker.transport.memory.process import Process
from broker.transport.memory.writing import MemoryOutbox, MemoryProducer
from broker.transport.protocol import AssignmentListener, Consumer, TopicPartition
from broker.transport.unreachable import unreachable


class MemoryTransport:
    """What one process of ours sees of the cluster.

    Args:
        cluster: Shared by all processes.
        name: The process's name, for the hook.
        transactional: Whether commits are atomic; what the cluster's config says by default.
    """

    def __init__(self, cluster: MemoryCluster, name: str | None = None, *, transactional: bool | None = None) -> None:
        self.cluster = cluster
        self._process = Process(cluster, name or cluster.name("process"))
        self.transactional = cluster.config.delivery == "exactly_once" if transactional is None else transactional
        self._consumers: list[MemoryConsumer] = []

    async def subscribe(self, topics: Sequence[str], group: str, listener: AssignmentListener, client_id: str) -> MemoryConsumer:
        """See the protocol."""
        consumer = MemoryConsumer(self._process, group, listener)

        def join() -> None:
            for topic in topics:
                self.cluster.logs(topic)
            consumer.join(topics, client_id)

        self._consumers.append(consumer)
        try:
            await self._process.call("join", group, join)
        except BaseException:
            consumer.fall_silent()  # it may have joined all the same: its session ends by itself
            self._consumers.remove(consumer)
            raise
        consumer.begin()
        return consumer

    async def assign(self, partitions: Sequence[TopicPartition], group: str | None = None) -> MemoryConsumer:
        """See the protocol."""
        consumer = MemoryConsumer(self._process, group)
        for tp in partitions:
            self.cluster.log(tp)
        consumer.take(partitions)
        self._consumers.append(consumer)
        return consumer

    def outbox(self, group: str, source: TopicPartition, consumer: Consumer) -> MemoryOutbox:
        """See the protocol."""
        if not isinstance(consumer, MemoryConsumer):
            message = f"the consumer {consumer!r} is of another transport"
            raise TypeError(message)
        return MemoryOutbox(self._process, group, source, consumer, transactional=self.transactional)

    async def producer(self) -> MemoryProducer:
        """See the protocol."""
        await self.check()
        return MemoryProducer(self._process)

    async def admin(self) -> MemoryAdmin:
        """See the protocol."""
        await self.check()
        return MemoryAdmin(self._process)

    async def check(self) -> None:
        """See the protocol."""
        config = self.cluster.config
        if not self.cluster.is_up:
            await self._process.step("before", "check", config.bootstrap)
            raise unreachable(config)
        await self._process.call("check", config.bootstrap, lambda: None, config.connect_timeout_ms)

    async def close(self) -> None:
        """See the protocol."""
        for consumer in self._consumers:
            await consumer.close()
        self._consumers.clear()

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process as `kill -9` does: nothing is left, settled or closed, and every call of it fails."""
        self._process.is_killed = True
        self.freeze()

    def freeze(self) -> None:
        """Stop the process's heartbeats, as a long pause does; what is called nevertheless goes on."""
        for consumer in self._consumers:
            consumer.fall_silent()

    def thaw(self) -> None:
        """Let heartbeats go on; consumers whose sessions expired join anew."""
        for consumer in self._consumers:
            consumer.wake_up()
