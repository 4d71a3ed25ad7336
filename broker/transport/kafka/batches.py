"""Writes records by the batch: one future for hundreds of records, where `send` makes one coroutine and one future each.

The library's batch interface waits for each batch of a partition to leave before it takes the next; its accumulator
does not, and keeps their order, so batches are handed to that: half of the CPU time per 1-KB record.
"""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.structs import TopicPartition as KafkaPartition

from broker.transport.errors import NoSuchTopic
from broker.transport.kafka.control import Control
from broker.transport.kafka.link import look_at, translate
from broker.transport.partitioner import partition_for
from broker.transport.protocol import Outgoing
from broker.transport.refusals import refuse_too_large

BATCH_BYTES = 512 * 1024  # below the 1 MiB that brokers take by default

METADATA_TRIES = 5

Place = tuple[int, int]


@dataclass
class Batch:
    """Records of one call that go to one partition together."""

    tp: KafkaPartition
    builder: Any  # the library's, untyped
    indexes: list[int] = field(default_factory=list)  # of its records in the call
    acknowledged: "asyncio.Future[Any] | None" = None

    def add(self, record: Outgoing) -> bool:
        """Encode one more record; False where the batch is full, which a first record never finds it."""
        headers = list(record.headers)
        return self.builder.append(timestamp=None, key=record.key, value=record.value, headers=headers) is not None


class BatchWriter:
    """Turns records into batches of one of the library's producers."""

    def __init__(self, producer: AIOKafkaProducer, control: Control, record_bytes_max: int) -> None:
        self._producer, self._control, self._record_bytes_max = producer, control, record_bytes_max

    def route_known(self, record: Outgoing) -> KafkaPartition | None:
        """Choose one record's partition where its topic is known already."""
        topics = self._producer.client.cluster._partitions  # its method copies them
        known = topics.get(record.topic)
        return _route(record, 0, len(known), random.randrange(len(known))) if known else None  # noqa: S311

    async def route(self, record: Outgoing) -> KafkaPartition:
        """Choose one record's partition.

        Raises:
            NoSuchTopic: There is none.
        """
        count = await self._partitions_of(record.topic, 0)
        return _route(record, 0, count, random.randrange(count))  # noqa: S311

    async def prepare(self, records: Sequence[Outgoing]) -> list[Batch]:
        """Choose partitions and encode; nothing is sent yet.

        Raises:
            NoSuchTopic, TooLarge: With the index of the record at fault.
        """
        counts: dict[str, int] = {}
        keyless = random.randrange(1 << 16)  # noqa: S311 - one partition a call: larger batches
        batches: list[Batch] = []
        current: dict[KafkaPartition, Batch] = {}
        for index, record in enumerate(records):
            refuse_too_large(record, index, self._record_bytes_max)
            count = counts.get(record.topic)
            if count is None:
                count = counts[record.topic] = await self._partitions_of(record.topic, index)
            tp = _route(record, index, count, keyless)
            batch = current.get(tp)
            if batch is None or not batch.add(record):
                batch = current[tp] = self.batch(tp)
                batches.append(batch)
                batch.add(record)
            batch.indexes.append(index)
        return batches

    def batch(self, tp: KafkaPartition) -> Batch:
        """Begin a batch."""
        return Batch(tp, self._producer._message_accumulator.create_builder())

    def hand_over(self, batch: Batch) -> "asyncio.Future[Any]":
        """Queue a batch; inside the transaction, where the producer has one.

        Raises:
            KafkaError: The producer has failed.
        """
        accumulator = self._producer._message_accumulator
        if accumulator._exception is not None:
            raise accumulator._exception
        queued = accumulator._append_batch(batch.builder, batch.tp)
        batch.builder.close()
        for future in (queued.future, queued._drain_waiter):
            future.add_done_callback(look_at)
        acknowledged: asyncio.Future[Any] = queued.future
        batch.acknowledged = acknowledged
        return acknowledged

    async def _partitions_of(self, topic: str, index: int) -> int:
        client = self._producer.client
        known = client.cluster.partitions_for_topic(topic)
        if not known:
            if await self._control.partitions(topic) is None:
                message = f"topic {topic} does not exist"
                raise NoSuchTopic(message, index)
            await client.add_topic(topic)  # at once where another send has asked already, and before its answer
            known = client.cluster.partitions_for_topic(topic)
            for _ in range(METADATA_TRIES):
                if known:
                    break
                await client.force_metadata_update()
                known = client.cluster.partitions_for_topic(topic)
        if not known:
            message = f"topic {topic} is not known to the broker yet"
            raise NoSuchTopic(message, index)
        return len(known)


def _route(record: Outgoing, index: int, count: int, keyless: int) -> KafkaPartition:
    partition = record.partition
    if partition is None:
        partition = keyless % count if record.key is None else partition_for(record.key, count)
    elif not 0 <= partition < count:
        message = f"topic {record.topic} has no partition {partition}"
        raise NoSuchTopic(message, index)
    return KafkaPartition(record.topic, partition)


async def acknowledged(batches: Sequence[Batch], count: int) -> list[Place]:
    """Wait for every batch and give each record's partition and offset, in the order of the call.

    Raises:
        TransportError: A batch was not taken.
    """
    waiting = [batch.acknowledged for batch in batches if batch.acknowledged is not None]
    if waiting:
        await asyncio.wait(waiting)
    places: list[Place] = [(0, 0)] * count
    for batch in batches:
        base = base_offset(batch)
        for relative, index in enumerate(batch.indexes):
            places[index] = batch.tp.partition, base + relative
    return places


def base_offset(batch: Batch) -> int:
    """Give the offset of an acknowledged batch's first record.

    Raises:
        TransportError: The batch was not taken.
    """
    if batch.acknowledged is None:
        message = "the batch was not handed over"
        raise RuntimeError(message)
    try:
        return int(batch.acknowledged.result().offset)
    except KafkaError as error:
        raise translate(error, f"writing to {batch.tp.topic}/{batch.tp.partition}", batch.indexes[0]) from error
