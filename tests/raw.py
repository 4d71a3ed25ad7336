"""What goes into Kafka and what lies there, by a plain client: for tests that must not believe our own."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.structs import ConsumerRecord

COMMITTED, UNCOMMITTED = "read_committed", "read_uncommitted"
READ_S = 30.0
AGAIN_S = 0.5


def request(ident: str, **fields: Any) -> dict[str, Any]:
    """A request as a producer without our client would write it."""
    return {"id": ident, "prompt": f"About {ident}.", "max_output_tokens": 16, **fields}


async def produce(bootstrap: str, topic: str, requests: Iterable[dict[str, Any]], **settings: Any) -> None:
    """Write requests; all are acknowledged when it returns."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, **settings)
    await producer.start()
    try:
        sent = [await producer.send(topic, json.dumps(one).encode(), key=one["id"].encode()) for one in requests]
        await asyncio.gather(*sent)
    finally:
        await producer.stop()


async def read_all(bootstrap: str, topic: str, isolation: str = COMMITTED, limit_s: float = READ_S) -> list[ConsumerRecord]:
    """Read a topic from its beginning to its very end, as it is now.

    Raises:
        TimeoutError: The end cannot be reached: a transaction is open, or the broker does not answer.
    """
    consumer, whole = _consumer(bootstrap, isolation), _consumer(bootstrap, UNCOMMITTED)
    await consumer.start()
    await whole.start()
    try:
        async with asyncio.timeout(limit_s):
            tps = await _assigned(consumer, topic)
            await consumer.seek_to_beginning(*tps)
            ends = await whole.end_offsets(tps)  # one that reads committed records is told where an open transaction begins
            found: list[ConsumerRecord] = []
            while True:
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    found += records
                if all([await consumer.position(tp) >= end for tp, end in ends.items()]):
                    return found
    except TimeoutError:
        message = f"{topic} cannot be read to its end within {limit_s:.0f} s: a transaction is open, or the broker is away"
        raise TimeoutError(message) from None
    finally:
        await consumer.stop()
        await whole.stop()


def tally(results: Iterable[dict[str, Any]]) -> Counter[str]:
    """How many terminal results each request has."""
    return Counter(one["request_id"] for one in results)


class Watch:
    """Reads a topic as it grows and notes when each key could first be read. It outlives the broker.

    Attributes:
        seen: Key (a request's id) -> time.monotonic() of its first record. It grows: another thread copies it.
    """

    def __init__(self, bootstrap: str, topic: str, isolation: str = COMMITTED) -> None:
        self._bootstrap, self._topic, self._isolation = bootstrap, topic, isolation
        self._positions: dict[TopicPartition, int] = {}
        self.seen: dict[str, float] = {}

    async def run(self) -> None:
        """Read until cancelled, with a new consumer whenever one fails."""
        pause = asyncio.Event()  # never set: only its time runs out
        while True:
            with contextlib.suppress(KafkaError, OSError):
                await self._read()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pause.wait(), AGAIN_S)

    async def _read(self) -> None:
        consumer = _consumer(self._bootstrap, self._isolation)
        await consumer.start()
        try:
            for tp in await _assigned(consumer, self._topic):
                consumer.seek(tp, self._positions.get(tp, 0))
            while True:
                for tp, records in (await consumer.getmany(timeout_ms=200)).items():
                    now = time.monotonic()
                    for record in records:
                        self.seen.setdefault(record.key.decode(), now)
                    self._positions[tp] = records[-1].offset + 1
        finally:
            await consumer.stop()


def _consumer(bootstrap: str, isolation: str) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level=isolation,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # where finished records were trimmed meanwhile
        max_partition_fetch_bytes=8 << 20,
        fetch_max_wait_ms=50,
    )


async def _assigned(consumer: AIOKafkaConsumer, topic: str) -> list[TopicPartition]:
    """Assign all partitions of a topic."""
    found = consumer.partitions_for_topic(topic)
    while not found:
        await consumer._client.set_topics([topic])
        await consumer._client.force_metadata_update()
        found = consumer.partitions_for_topic(topic)
    tps = [TopicPartition(topic, number) for number in sorted(found)]
    consumer.assign(tps)
    return tps
