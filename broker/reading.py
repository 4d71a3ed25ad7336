"""Reading partitions by hand, on and on or up to their ends: connections are made anew, positions are kept."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import NoReturn

from broker.transport.errors import NoSuchTopic, OffsetGone, TransportError
from broker.transport.protocol import Consumer, Record, TopicPartition, Transport

log = logging.getLogger("forebay.client")

BACKOFF_S = 0.2
BACKOFF_S_MAX = 5.0
RECORDS_MAX = 2_000
QUIET_MS = 750  # partitions that give nothing for so long, twice, on a cluster that answers, have nothing more
QUIET_ROUNDS = 2
PATIENCE_S = 30.0


class PartitionReader:
    """Some partitions, each read from a position of its own.

    Args:
        transport: Where they are.
        positions: Partition -> the next offset to read.
        patience_s: How long the cluster may be away before `poll` raises; None to go on trying.
    """

    def __init__(self, transport: Transport, positions: Mapping[TopicPartition, int], patience_s: float | None = None) -> None:
        self._transport, self._patience_s = transport, patience_s
        self.positions = dict(positions)
        self._consumer: Consumer | None = None
        self._failing_since: float | None = None
        self._backoff_s = BACKOFF_S

    async def open(self) -> None:
        """Connect.

        Raises:
            NoSuchTopic, TransportError: A topic is missing, or the cluster did not answer.
        """
        await self._consumer_now()

    async def poll(self, partitions: Sequence[TopicPartition], timeout_ms: int) -> list[Record]:
        """Read what is at hand of some of the partitions, or wait up to `timeout_ms` for a first record.

        While the cluster is away it gives nothing, no sooner than after a pause.

        Raises:
            TransportError: The cluster has been away for longer than `patience_s`.
        """
        try:
            consumer = await self._consumer_now()
            records = await consumer.poll(partitions, RECORDS_MAX, timeout_ms)
        except OffsetGone as error:
            log.warning("records_gone error=%s", error)
            await self._skip_what_is_gone()
            return []
        except TransportError as error:
            await self._pause(error)
            return []
        self._failing_since, self._backoff_s = None, BACKOFF_S
        for record in records:
            self.positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
        return records

    def move(self, partition: TopicPartition, offset: int) -> None:
        """Read a partition from another offset on."""
        self.positions[partition] = offset
        if self._consumer is not None:
            self._consumer.seek(partition, offset)

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """First offset and end of partitions.

        Raises:
            TransportError: The cluster did not answer.
        """
        return await (await self._consumer_now()).bounds(partitions)

    async def close(self) -> None:
        """Let go."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    async def _consumer_now(self) -> Consumer:
        if self._consumer is None:
            consumer = await self._transport.assign(list(self.positions))
            for partition, offset in self.positions.items():
                consumer.seek(partition, offset)
            self._consumer = consumer
        return self._consumer

    async def _pause(self, error: TransportError) -> None:
        now = asyncio.get_running_loop().time()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("read_failed error=%s", error)
        if self._patience_s is not None and now - self._failing_since >= self._patience_s:
            _give_up(error)
        await self._let_go()
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_S_MAX)

    async def _skip_what_is_gone(self) -> None:
        """Go on at the first record that is still there, where retention took what came next."""
        try:
            for partition, (first, end) in (await self.bounds(list(self.positions))).items():
                if not first <= self.positions[partition] <= end:
                    self.move(partition, first)
        except TransportError as error:
            await self._pause(error)

    async def _let_go(self) -> None:
        try:
            await self.close()
        except TransportError as error:
            log.debug("close_failed error=%s", error)


class BoundedReader:
    """Reads what lies below given ends, which may be markers of transactions that no reader ever gets.

    Args:
        reader: Stands where reading begins, and should have `PATIENCE_S`; whoever made it closes it.
        ends: Partition -> the first offset that is not wanted.
    """

    def __init__(self, reader: PartitionReader, ends: Mapping[TopicPartition, int]) -> None:
        self._reader = reader
        self.ends = dict(ends)
        self._quiet_rounds = 0

    @property
    def behind(self) -> list[TopicPartition]:
        """The partitions that may have more to give."""
        return [tp for tp, end in self.ends.items() if self._reader.positions[tp] < end]

    async def poll(self, partitions: Sequence[TopicPartition]) -> list[Record]:
        """Read what is at hand of some of those that are `behind`; nothing where it takes longer.

        Partitions that give nothing twice in a row are taken to be at their ends, if the cluster answers at once: while
        it is away they are quiet too.

        Raises:
            TransportError: The cluster is away for too long: what is missing is not known.
        """
        records = await self._reader.poll(partitions, QUIET_MS)
        if not records:
            await self._settle(partitions)
            return []
        self._quiet_rounds = 0
        return [r for r in records if r.offset < self.ends[TopicPartition(r.topic, r.partition)]]

    async def _settle(self, quiet: Sequence[TopicPartition]) -> None:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._reader.bounds(quiet)
        self._quiet_rounds = self._quiet_rounds + 1 if loop.time() - asked < QUIET_MS / 1000 else 0
        if self._quiet_rounds >= QUIET_ROUNDS:
            self._quiet_rounds = 0
            for tp in quiet:
                self.ends[tp] = self._reader.positions[tp]


def _give_up(error: TransportError) -> NoReturn:
    raise error


async def partitions_of(transport: Transport, topic: str) -> list[TopicPartition]:
    """List the partitions of a topic.

    Raises:
        NoSuchTopic: With what to do about it.
        Unreachable: With the address and what to do about it.
    """
    admin = await transport.admin()
    try:
        count = await admin.partitions(topic)
    finally:
        await admin.close()
    if count is None:
        message = f"topic {topic} does not exist: make it with `forebay topics ensure`"
        raise NoSuchTopic(message)
    return [TopicPartition(topic, n) for n in range(count)]
