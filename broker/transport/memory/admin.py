"""The in-memory admin client."""

import asyncio
from collections.abc import Mapping, Sequence

from broker.transport.errors import TransportError
from broker.transport.members import by_client
from broker.transport.memory.process import Process
from broker.transport.protocol import TopicPartition
from broker.transport.topic_plan import Existing, TopicPlan, plan_topic
from schemas.topics import TopicSpec


class MemoryAdmin:
    """Looks after the cluster's topics."""

    def __init__(self, process: Process) -> None:
        self._process, self._cluster = process, process.cluster

    async def partitions(self, topic: str) -> int | None:
        """See the protocol."""

        def count() -> int | None:
            found = self._cluster.topics.get(topic)
            return None if found is None else len(found.logs)

        return await self._process.call("partitions", topic, count)

    async def ensure(self, topics: Sequence[TopicSpec], replication: int, min_insync: int) -> list[str]:
        """See the protocol."""
        lines: list[str] = []

        def mend() -> None:
            for spec in topics:
                found = self._cluster.topics.get(spec.name)
                existing = None if found is None else Existing(len(found.logs), found.settings)
                plan = plan_topic(spec, existing, replication, min_insync)
                self._cluster.add_topic(spec.name, plan.partitions or 0, dict(plan.settings))
                lines.extend(plan.lines)

        await self._process.call("ensure", ",".join(spec.name for spec in topics), mend)
        return lines

    async def compare(self, topics: Sequence[TopicSpec], min_insync: int) -> list[TopicPlan]:
        """See the protocol."""

        def look() -> list[TopicPlan]:
            found = [self._cluster.topics.get(spec.name) for spec in topics]
            existing = [None if one is None else Existing(len(one.logs), one.settings) for one in found]
            return [plan_topic(spec, one, 1, min_insync) for spec, one in zip(topics, existing, strict=True)]

        return await self._process.call("compare", ",".join(spec.name for spec in topics), look)

    async def members(self, group: str) -> dict[str, tuple[TopicPartition, ...]]:
        """See the protocol."""
        found = self._cluster.group(group)

        def read() -> dict[str, tuple[TopicPartition, ...]]:
            return by_client((member.client_id, member.partitions) for member in found.members.values())

        limit_s = self._cluster.config.request_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit_s):
                await found.settled.wait()
        except TimeoutError:
            message = f"group {group} was rebalancing for {limit_s:g} s"
            raise TransportError(message) from None
        return await self._process.call("members", group, read)

    async def trim(self, before: Mapping[TopicPartition, int]) -> None:
        """See the protocol."""

        def cut() -> None:
            for tp, offset in before.items():
                log = self._cluster.log(tp)
                log.trim(min(offset, log.stable))

        await self._process.call("trim", ",".join(f"{tp.topic}/{tp.partition}" for tp in before), cut)

    async def close(self) -> None:
        """See the protocol."""
