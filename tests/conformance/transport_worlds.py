"""The clusters on which the transport's cases run: the in-memory one under virtual time, Apache Kafka and Tansu in earnest."""

import asyncio
import itertools
import os
import time
from collections.abc import Awaitable, Callable

from aiokafka.errors import KafkaError
from virtual_loop import run_virtual

from broker.transport import TopicPartition, Transport, TransportError
from broker.transport.kafka import KafkaTransport
from broker.transport.kafka.consumer import KafkaConsumer
from broker.transport.kafka.link import kill
from broker.transport.kafka.outbox import TransactionalOutbox
from broker.transport.memory import MemoryCluster, MemoryTransport
from schemas.config import KafkaConfig
from schemas.topics import TopicSpec

CASE_S = 90
WAIT_S = 30
_NUMBERS = itertools.count()


class Listener:
    """Remembers what it was told."""

    def __init__(self):
        self.partitions: list[TopicPartition] = []
        self.memberships = []
        self.revocations = []

    def revoked(self, partitions):
        self.revocations.append(list(partitions))

    def assigned(self, partitions, membership):
        self.partitions = list(partitions)
        self.memberships.append(membership)


class World:
    """One cluster; every process of ours on it has a transport of its own."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self.processes: list[Transport] = []

    def run(self, case: Callable[["World"], Awaitable[None]]) -> None:
        """Run a case, bounded, and leave nothing open."""

        async def bounded() -> None:
            try:
                async with asyncio.timeout(CASE_S):
                    await case(self)
            finally:
                for process in self.processes:
                    await process.close()
                await asyncio.sleep(0)

        self._run(bounded())

    def unique(self, base: str) -> str:
        return f"{base}-{os.getpid()}-{time.monotonic_ns()}-{next(_NUMBERS)}"

    async def topic(self, partitions: int = 1) -> str:
        name = self.unique("topic")
        admin = await self.process().admin()
        await admin.ensure([TopicSpec(name, partitions, {})], 1, 1)
        return name

    async def member(self, topic: str, group: str, process: Transport | None = None):
        """A consumer that has its first assignment, and its listener."""
        listener = Listener()
        consumer = await (process or self.process()).subscribe([topic], group, listener, "test")
        await self.until(lambda: listener.memberships, consumer)
        return consumer, listener

    async def until(self, true: Callable[[], object], *consumers) -> None:
        """Poll the consumers, asking for nothing, until something is so."""
        until = asyncio.get_running_loop().time() + WAIT_S
        while not true():
            assert asyncio.get_running_loop().time() < until, "it did not come to pass"
            await asyncio.gather(*(consumer.poll([], 1, 20) for consumer in consumers))

    # What differs -------------------------------------------------------------------------------------------------

    def _run(self, main) -> None:
        asyncio.run(main)

    def process(self) -> Transport:
        raise NotImplementedError

    async def kill(self, process: Transport) -> None:
        """End a process without a word to the cluster."""
        raise NotImplementedError

    async def freeze(self, process: Transport) -> None:
        """Stop a process's heartbeats until it has lost its sessions."""
        raise NotImplementedError

    def break_commit(self, outbox) -> None:
        """Let the outbox's next commit fail after its records were written and before the end."""
        raise NotImplementedError

    def nowhere(self) -> Transport:
        """A transport to an address where nobody answers, with a connect time-out of one second."""
        raise NotImplementedError


class MemoryWorld(World):
    """In one process, under virtual time."""

    def __init__(self, config: KafkaConfig) -> None:
        super().__init__(config)
        self.cluster = MemoryCluster(config)

    def _run(self, main) -> None:
        run_virtual(main)

    def process(self) -> MemoryTransport:
        self.processes.append(MemoryTransport(self.cluster))
        return self.processes[-1]

    async def kill(self, process) -> None:
        process.kill()

    async def freeze(self, process) -> None:
        process.freeze()
        await asyncio.sleep(self.config.session_timeout_ms / 1000 + 1)

    def break_commit(self, _) -> None:
        async def hook(step) -> None:
            if (step.moment, step.operation) == ("before", "offsets"):
                self.cluster.hook = None
                message = "broken by the test"
                raise TransportError(message)

        self.cluster.hook = hook

    def nowhere(self) -> MemoryTransport:
        cluster = MemoryCluster(KafkaConfig(bootstrap="127.0.0.1:1", connect_timeout_ms=1_000))
        cluster.stop()
        return MemoryTransport(cluster)


class KafkaWorld(World):
    """A broker at an address."""

    def process(self) -> KafkaTransport:
        self.processes.append(KafkaTransport(self.config))
        return self.processes[-1]

    async def kill(self, process) -> None:
        for opened in process._opened:
            if isinstance(opened, KafkaConsumer) and opened._inner is not None:
                await self._silence(opened)
                inner = opened._inner
                inner._closed = opened._closed = True
                await inner._fetcher.close()
                await inner._client.close()
            elif isinstance(opened, TransactionalOutbox) and opened._producer is not None:
                producer, opened._producer = opened._producer, None
                await kill(producer._sender.sender_task)
                producer._closed = True
                await producer.client.close()
        process._opened.clear()

    async def freeze(self, process) -> None:
        for opened in process._opened:
            if isinstance(opened, KafkaConsumer):
                await self._silence(opened)
        await asyncio.sleep(self.config.session_timeout_ms / 1000 + 1)

    async def _silence(self, consumer) -> None:
        coordinator = consumer._inner._coordinator
        for task in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task"):
            await kill(getattr(coordinator, task, None))

    def break_commit(self, outbox) -> None:
        async def fail(*_) -> None:
            message = "broken by the test"
            raise KafkaError(message)

        outbox._producer.send_offsets_to_transaction = fail

    def nowhere(self) -> KafkaTransport:
        self.processes.append(KafkaTransport(KafkaConfig(bootstrap="127.0.0.1:1", connect_timeout_ms=1_000)))
        return self.processes[-1]


def make_world(adapter: str, address: Callable[[str], str]) -> World:
    """Make the world of one adapter.

    Args:
        adapter: `memory`, `kafka` or `tansu`, and `-at-least-once` behind it for no transactions.
        address: Gives the address of a broker by the name of its fixture.
    """
    kind, _, plain = adapter.partition("-")
    delivery = "at_least_once" if plain or kind == "tansu" else "exactly_once"
    if kind == "memory":
        return MemoryWorld(KafkaConfig(delivery=delivery))
    return KafkaWorld(KafkaConfig(bootstrap=address(kind), delivery=delivery))
