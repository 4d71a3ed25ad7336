"""The connection beside the data: topics, offsets and groups, in requests that never wait behind a long poll.

A broker answers one connection's requests in turn, so a heartbeat sent on a consumer's own connection would wait for
its fetch or its join. One client per transport, shared by all consumers and outboxes.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    IllegalGenerationError,
    KafkaError,
    NoError,
    NotCoordinatorError,
    RebalanceInProgressError,
    UnknownMemberIdError,
    for_code,
)
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest, LeaveGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest

from broker.transport.errors import NoSuchTopic, TransportError
from broker.transport.kafka.link import bootstrap, client_settings, deadline, let_go
from broker.transport.protocol import Committed, Membership, TopicPartition
from schemas.config import KafkaConfig

RETRY_S = 0.05
ANSWER_MS = 5_000  # within which a group has to say whether it knows a member
LEAVE_MS = 1_000
NO_MEMBER = Membership("", -1)

_READ_COMMITTED = 1
_LATEST, _EARLIEST = -1, -2
_RETENTION_OF_BROKER = -1
_MOVED = (NotCoordinatorError, CoordinatorNotAvailableError, CoordinatorLoadInProgressError)


class Control:
    """Asks the cluster about topics, offsets and groups."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._client: AIOKafkaClient | None = None
        self._starting = asyncio.Lock()
        self._coordinators: dict[str, int] = {}

    async def client(self) -> AIOKafkaClient:
        """Give the client, connected.

        Raises:
            Unreachable: With the address and what to do.
        """
        async with self._starting:
            if self._client is None:
                client = AIOKafkaClient(**client_settings(self._config), client_id="forebay-control", retry_backoff_ms=100)
                try:
                    await bootstrap(client, self._config)
                except BaseException:
                    await client.close()
                    raise
                self._client = client
            return self._client

    async def partitions(self, topic: str) -> int | None:
        """Count a topic's partitions, or give None; never creates it, whatever the broker's settings."""
        client = await self.client()
        async with deadline(self._config.request_timeout_ms, f"looking for topic {topic}"):
            while True:
                try:
                    response = await client.send(
                        client.get_random_node(), MetadataRequest([topic], allow_auto_topic_creation=False)
                    )
                except KafkaError as error:
                    await self._after(client, error)
                    continue
                for code, name, _, partitions in response.topics:
                    if name == topic and for_code(code) is NoError:
                        return len(partitions)
                return None

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Give first offset and last stable offset of each partition."""
        client = await self.client()
        async with deadline(self._config.request_timeout_ms, "reading the bounds of partitions"):
            while True:
                try:
                    first, end = await asyncio.gather(
                        self._offsets(client, partitions, _EARLIEST), self._offsets(client, partitions, _LATEST)
                    )
                except KafkaError as error:
                    await self._after(client, error)
                    continue
                return {tp: (first[tp], end[tp]) for tp in partitions}

    async def fetch_committed(self, group: str, tp: TopicPartition) -> Committed | None:
        """Read a group's committed position."""
        request = OffsetFetchRequest(group, [(tp.topic, [tp.partition])])
        what = f"reading what group {group} committed of {tp.topic}/{tp.partition}"
        response = await self._ask_group(group, request, _fetch_codes, self._config.request_timeout_ms, what)
        _must_be_well(response.error_code, what)
        ((_, ((_, offset, metadata, code),)),) = response.topics
        _must_be_well(code, what)
        return None if offset < 0 else Committed(offset, metadata or "")

    async def commit(self, group: str, tp: TopicPartition, position: Committed, membership: Membership) -> bool:
        """Commit a position, as a member or (`NO_MEMBER`) into a group that has none.

        Returns:
            False while the group is between two generations; ask again then.

        Raises:
            TransportError: The group does not take it, or did not answer.
        """
        request = OffsetCommitRequest(
            group,
            membership.generation,
            membership.member,
            _RETENTION_OF_BROKER,
            [(tp.topic, [(tp.partition, position.offset, position.metadata)])],
        )
        what = f"committing {tp.topic}/{tp.partition} for group {group}"
        response = await self._ask_group(group, request, _commit_codes, self._config.request_timeout_ms, what)
        ((_, ((_, code),)),) = response.topics
        if for_code(code) is RebalanceInProgressError:
            return False
        _must_be_well(code, what)
        return True

    async def knows(self, group: str, membership: Membership) -> bool:
        """Ask a group, with a heartbeat, whether it knows a member and its generation."""
        request = HeartbeatRequest(group, membership.generation, membership.member)
        what = f"asking group {group} about our membership"
        response = await self._ask_group(group, request, lambda r: (r.error_code,), ANSWER_MS, what)
        error = for_code(response.error_code)
        if error in (IllegalGenerationError, UnknownMemberIdError):
            return False
        if error is not RebalanceInProgressError:  # it knows us, and another generation is on its way
            _must_be_well(response.error_code, what)
        return True

    async def leave(self, group: str, membership: Membership) -> None:
        """Take a member out of its group, also while its own connection waits in a join."""
        request = LeaveGroupRequest(group, membership.member)
        await self._ask_group(group, request, lambda r: (r.error_code,), LEAVE_MS, f"leaving group {group}")

    async def close(self) -> None:
        """Let go."""
        client, self._client = self._client, None
        if client is not None:
            await let_go("control", client.close, client, lambda: ())

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _ask_group(
        self,
        group: str,
        request: Any,  # noqa: ANN401 - the library's messages have no types
        codes: Callable[[Any], Iterable[int]],
        limit_ms: float,
        what: str,
    ) -> Any:  # noqa: ANN401 - the library's messages have no types
        """Send a request to the group's coordinator, wherever it is now."""
        client = await self.client()
        async with deadline(limit_ms, what):
            while True:
                try:
                    node = self._coordinators.get(group)
                    if node is None:
                        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
                        self._coordinators[group] = node
                    response = await client.send(node, request, group=ConnectionGroup.COORDINATION)
                except KafkaError as error:
                    self._coordinators.pop(group, None)
                    await self._after(client, error)
                    continue
                if not any(for_code(code) in _MOVED for code in codes(response)):
                    return response
                self._coordinators.pop(group, None)
                await asyncio.sleep(RETRY_S)

    async def _offsets(
        self, client: AIOKafkaClient, partitions: Sequence[TopicPartition], which: int
    ) -> dict[TopicPartition, int]:
        by_node: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for tp in partitions:
            leader = client.cluster.leader_for_partition(tp)
            if leader is None:
                if await self.partitions(tp.topic) is None:
                    message = f"topic {tp.topic} does not exist"
                    raise NoSuchTopic(message)
                await client.add_topic(tp.topic)
                leader = client.cluster.leader_for_partition(tp)
            if leader is None or leader == -1:
                await client.force_metadata_update()
                message = f"{tp.topic}/{tp.partition} has no leader"
                raise CoordinatorNotAvailableError(message)
            by_node.setdefault(leader, {}).setdefault(tp.topic, []).append((tp.partition, which))
        result: dict[TopicPartition, int] = {}
        for node, topics in by_node.items():
            response = await client.send(node, OffsetRequest(-1, _READ_COMMITTED, list(topics.items())))
            for topic, found in response.topics:
                for partition, code, timestamp, offset in found:
                    tp = TopicPartition(topic, partition)
                    _must_be_led(code, tp)
                    # A broker that gives the end a time (Tansu) means its last batch, not what lies behind it.
                    is_end = which == _EARLIEST or timestamp < 0
                    result[tp] = offset if is_end else await self._stable(client, node, tp, offset)
        return result

    async def _stable(self, client: AIOKafkaClient, node: int, tp: TopicPartition, near: int) -> int:
        """Read the last stable offset from what comes with a fetch."""
        size = self._config.record_bytes_max
        fetch = FetchRequest(1, 1, size, _READ_COMMITTED, [(tp.topic, [(tp.partition, near, size)])])
        response = await client.send(node, fetch)
        ((_, ((_, code, _, stable, *_),)),) = response.topics
        _must_be_led(code, tp)
        return int(stable)

    async def _after(self, client: AIOKafkaClient, error: KafkaError) -> None:
        """Go on after an error that may pass, with fresh metadata."""
        if not error.retriable:
            raise error
        await client.force_metadata_update()
        await asyncio.sleep(RETRY_S)


def _must_be_led(code: int, tp: TopicPartition) -> None:
    """Raise the library's error, which may pass with fresh metadata."""
    error = for_code(code)
    if error is not NoError:
        told = f"{tp.topic}/{tp.partition}"
        raise error(told)


def _must_be_well(code: int, what: str) -> None:
    error = for_code(code)
    if error is not NoError:
        message = f"{what}: {error.__name__}: {error.description}"
        raise TransportError(message)


def _fetch_codes(response: Any) -> Iterable[int]:  # noqa: ANN401
    return (response.error_code, *(code for _, partitions in response.topics for _, _, _, code in partitions))


def _commit_codes(response: Any) -> Iterable[int]:  # noqa: ANN401
    return (code for _, partitions in response.topics for _, code in partitions)
