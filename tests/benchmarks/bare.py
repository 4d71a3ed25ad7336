"""The baseline: the same transactions with nothing in between, in plain aiokafka, tuned as well as ours."""

import asyncio
import time

import aiokafka.producer.sender
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import OffsetAndMetadata

BACKOFF_MS = 5
BATCH_BYTES = 1 << 20
aiokafka.producer.sender.BACKOFF_OVERRIDE = 0.003  # as in ours


class BareLoop:
    """Consume, produce, commit offsets; exactly once or at least once."""

    def __init__(self, bootstrap: str, source: str, target: str, group: str, partitions: int, *, exactly_once: bool) -> None:
        self._bootstrap, self._target, self._group, self._exactly_once = bootstrap, target, group, exactly_once
        self._tps = [TopicPartition(source, n) for n in range(partitions)]
        self._producers: dict[TopicPartition, AIOKafkaProducer] = {}
        self.done = 0

    async def start(self, offset: int | None = 0) -> None:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=self._group,
            enable_auto_commit=False,
            isolation_level="read_committed",
            max_partition_fetch_bytes=8 << 20,
        )
        await self._consumer.start()
        self._consumer.assign(self._tps)
        if offset is None:
            await self._consumer.seek_to_end(*self._tps)
        else:
            await self._consumer.seek_to_beginning(*self._tps)
        shared = None
        for tp in self._tps:
            if self._exactly_once:
                made = self._producer(transactional_id=f"{self._group}.{tp.partition}", retry_backoff_ms=BACKOFF_MS)
                await made.start()
            else:
                if shared is None:
                    shared = self._producer(enable_idempotence=True)
                    await shared.start()
                made = shared
            self._producers[tp] = made

    def _producer(self, **settings) -> AIOKafkaProducer:
        return AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            acks="all",
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
            max_request_size=8 << 20,
            **settings,
        )

    async def run(self, count: int, records_max: int = 2_000) -> float:
        """Move `count` records; gives the seconds it took after the first batch."""
        began, first = None, 0
        while self.done < count:
            batches = await self._consumer.getmany(timeout_ms=1_000, max_records=records_max)
            await asyncio.gather(*(self._move(tp, records) for tp, records in batches.items()))
            if began is None and batches:
                began, first = time.perf_counter(), self.done
        return (time.perf_counter() - began) * count / (count - first) if began else 0.0

    async def _move(self, tp, records) -> None:
        producer, position = self._producers[tp], {tp: OffsetAndMetadata(records[-1].offset + 1, "")}
        if self._exactly_once:
            await producer.begin_transaction()
        sent = [await producer.send(self._target, r.value, key=r.key, partition=r.offset % len(self._tps)) for r in records]
        await asyncio.gather(*sent)
        if self._exactly_once:
            await producer.send_offsets_to_transaction(position, self._group)
            await producer.commit_transaction()
        else:
            await self._consumer.commit(position)
        self.done += len(records)

    async def close(self) -> None:
        await self._consumer.stop()
        for producer in dict.fromkeys(self._producers.values()):
            await producer.stop()
