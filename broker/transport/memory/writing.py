"""The in-memory outboxes and producer."""

import asyncio
from collections.abc import Awaitable, Sequence

from broker.transport.errors import TransportError
from broker.transport.memory.consumer import MemoryConsumer
from broker.transport.memory.log import PartitionLog
from broker.transport.memory.process import Process
from broker.transport.partitioner import partition_for
from broker.transport.protocol import Committed, Outgoing, TopicPartition
from broker.transport.refusals import refuse_long_metadata, refuse_too_large

Place = tuple[int, int]


class _Router:
    """Chooses partitions; records without a key go round."""

    def __init__(self, process: Process) -> None:
        self._cluster = process.cluster
        self._turn = 0

    def route(self, record: Outgoing, index: int) -> PartitionLog:
        """Refuse the record or find where it belongs."""
        refuse_too_large(record, index, self._cluster.config.record_bytes_max)
        count = len(self._cluster.logs(record.topic, index))
        partition = record.partition
        if partition is None and record.key is not None:
            partition = partition_for(record.key, count)
        elif partition is None:
            self._turn += 1
            partition = self._turn % count
        return self._cluster.log(TopicPartition(record.topic, partition), index)


class MemoryOutbox:
    """Writes in transactions, or, without a transactional id, plainly and then the position."""

    def __init__(
        self, process: Process, group: str, source: TopicPartition, consumer: MemoryConsumer, *, transactional: bool
    ) -> None:
        self._process, self._cluster = process, process.cluster
        self._group, self._source, self._consumer = group, source, consumer
        self._id = f"{group}.{source.topic}.{source.partition}"
        self._transactional = transactional
        self._router = _Router(process)
        self._epoch: int | None = None

    async def open(self) -> None:
        """See the protocol."""
        if self._transactional:
            self._epoch = await self._process.call("init", self._id, lambda: self._cluster.transactions.init(self._id))
        else:
            self._epoch = 0

    async def commit(self, records: Sequence[Outgoing], position: Committed) -> list[Place]:
        """See the protocol."""
        epoch = self._epoch
        if epoch is None:
            message = f"the outbox {self._id} is not open: open a new one"
            raise TransportError(message)
        refuse_long_metadata(position)
        routed: dict[PartitionLog, list[int]] = {}
        for index, record in enumerate(records):
            routed.setdefault(self._router.route(record, index), []).append(index)
        config = self._cluster.config
        limit_s = (config.request_timeout_ms + config.transaction_timeout_ms) / 1000
        self._epoch = None  # unless all goes well, the outcome is unknown
        try:
            async with asyncio.timeout(limit_s):
                places = await self._write(epoch, records, routed)
                await (self._end(epoch, position) if self._transactional else self._commit(position))
        except TimeoutError:
            message = f"the commit of {self._id} did not end within {limit_s:g} s"
            raise TransportError(message) from None
        self._epoch = epoch
        return places

    async def close(self) -> None:
        """See the protocol."""
        self._epoch = None

    async def _write(self, epoch: int, records: Sequence[Outgoing], routed: dict[PartitionLog, list[int]]) -> list[Place]:
        places: list[Place] = [(0, 0)] * len(records)
        for log, indexes in routed.items():
            batch = [records[index] for index in indexes]

            def write(log: PartitionLog = log, batch: list[Outgoing] = batch) -> list[int]:
                now_ms = self._cluster.now_ms()
                if self._transactional:
                    return self._cluster.transactions.append(self._id, epoch, log, batch, now_ms)
                return [log.append(record, now_ms, None) for record in batch]

            offsets = await self._process.call("produce", f"{log.tp.topic}/{log.tp.partition}", write)
            for index, offset in zip(indexes, offsets, strict=True):
                places[index] = log.tp.partition, offset
        return places

    async def _end(self, epoch: int, position: Committed) -> None:
        transactions = self._cluster.transactions
        await self._process.call(
            "offsets", self._id, lambda: transactions.add_offset(self._id, epoch, self._group, self._source, position)
        )
        await self._process.call("end", self._id, lambda: transactions.commit(self._id, epoch))

    async def _commit(self, position: Committed) -> None:
        await self._process.call("commit", self._id, lambda: self._consumer.commit(self._source, position))


class MemoryProducer:
    """Writes at once."""

    def __init__(self, process: Process) -> None:
        self._process, self._cluster = process, process.cluster
        self._router = _Router(process)
        self._closed = False

    async def send(self, record: Outgoing) -> Awaitable[Place]:
        """See the protocol."""
        if self._closed:
            message = "the producer is closed"
            raise TransportError(message)
        log = self._router.route(record, 0)
        subject = f"{log.tp.topic}/{log.tp.partition}"
        offset = await self._process.call("send", subject, lambda: log.append(record, self._cluster.now_ms(), None))
        acknowledged: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        acknowledged.set_result((log.tp.partition, offset))
        return acknowledged

    async def close(self) -> None:
        """See the protocol."""
        self._closed = True
