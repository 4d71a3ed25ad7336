"""Where a request is, as Kafka tells: its result, or the one unfinished record that it is.

Kafka has no index. Results are looked through from the newest back, and unfinished records from the oldest on, both within
bounds; what was not looked at is said.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping

from msgspec import Struct, structs

from broker.transport.ledger import Ledger
from broker.transport.partitioner import partition_for
from broker.transport.protocol import Consumer, Record, TopicPartition, Transport
from schemas import codecs, headers, ids
from schemas.config import Config
from schemas.errors import InvalidMessage
from schemas.messages import DEFAULT_TENANT, InferenceResult
from schemas.questions import Stage, Where
from schemas.topics import Topics

RESULTS_MAX = 20_000  # looked through at most, over all partitions
UNFINISHED_MAX = 50_000
BYTES_MAX = 256 * 2**20
LOOK_S = 15.0
CHUNK = 1_000
POLL_MS = 250


class Looked(Struct):
    """What a look came to.

    Attributes:
        found: Where the requests of that id are.
        left_out: What was not looked at, one line each.
    """

    found: list[Where]
    left_out: list[str]


class _Budget:
    """How much may still be read."""

    def __init__(self, records: int) -> None:
        self._records, self._bytes = records, BYTES_MAX
        self._until = asyncio.get_running_loop().time() + LOOK_S

    @property
    def is_spent(self) -> bool:
        """Whether to stop."""
        return self._records <= 0 or self._bytes <= 0 or asyncio.get_running_loop().time() > self._until

    def spend(self, record: Record) -> None:
        """One more was read."""
        self._records -= 1
        self._bytes -= len(record.value or b"")


async def find_results(transport: Transport, topics: Topics, request_id: str, tenant: str | None) -> Looked:
    """Look for the results of an id, newest first; where it is found in a partition nothing older is looked at there.

    Raises:
        TransportError: Kafka could not be read.
    """
    count = await _partitions(transport, topics.results)
    if not count:
        return Looked([], [f"there is no topic {topics.results}"])
    key = request_id.encode()
    likely = partition_for(key, count)
    tps = [TopicPartition(topics.results, n) for n in sorted(range(count), key=lambda n: (n != likely, n))]
    looked, budget = Looked([], []), _Budget(RESULTS_MAX)
    consumer = await transport.assign(tps)
    try:
        bounds = await consumer.bounds(tps)
        at = {tp: bounds[tp][1] for tp in tps}  # whatever lies from here on was looked at
        while waiting := [tp for tp in tps if at[tp] > bounds[tp][0]]:
            if budget.is_spent:
                break
            for tp in waiting:
                start = max(at[tp] - CHUNK, bounds[tp][0])
                found = [record async for record in _read(consumer, tp, start, at[tp], budget) if record.key == key]
                at[tp] = start
                new = [one for record in reversed(found) if (one := _ended(record, tenant)) is not None]
                looked.found += new
                if new:
                    at[tp] = bounds[tp][0]
        looked.left_out += [
            f"results older than offset {offset} of {tp.topic}/{tp.partition}"
            for tp, offset in at.items()
            if offset > bounds[tp][0]
        ]
    finally:
        await consumer.close()
    return looked


async def find_unfinished(transport: Transport, config: Config, request_id: str, tenant: str | None) -> Looked:
    """Look for the unfinished records of an id, on every topic on which a request may wait.

    Raises:
        TransportError: Kafka could not be read.
    """
    topics = Topics(config.kafka.topic_prefix)
    looked, budget = Looked([], []), _Budget(UNFINISHED_MAX)
    for group, stages in _places(topics, config).items():
        for topic, (stage, pool) in stages.items():
            tps = [TopicPartition(topic, n) for n in range(await _partitions(transport, topic) or 0)]
            if not tps:
                continue
            consumer = await transport.assign(tps, group)
            try:
                bounds = await consumer.bounds(tps)
                for tp in tps:
                    await _look_through(consumer, tp, bounds[tp], budget, _Sought(request_id, tenant, stage, pool), looked)
            finally:
                await consumer.close()
    return looked


class _Sought(Struct):
    """Which request is looked for, and what it means to find it there."""

    id: str
    tenant: str | None
    stage: Stage
    pool: str | None


def _places(topics: Topics, config: Config) -> Mapping[str, Mapping[str, tuple[Stage, str | None]]]:
    """Group -> topic -> what it means that a request is there, and of which pool."""
    engines = {topics.engine_group(pool): {topics.engine(pool): (Stage.SENT, pool)} for pool in config.pools}
    dispatcher = {
        topics.lanes: (Stage.LANE, None),
        topics.retries: (Stage.RETRY, None),
        topics.requests("interactive"): (Stage.UNREAD, None),
        topics.requests("batch"): (Stage.UNREAD, None),
    }
    return {**engines, topics.dispatcher_group: dispatcher}


async def _look_through(
    consumer: Consumer, tp: TopicPartition, bounds: tuple[int, int], budget: _Budget, sought: _Sought, looked: Looked
) -> None:
    committed, (first, end) = await consumer.committed(tp), bounds
    ledger, before = Ledger(committed, first), 0
    start = max(first, ledger.position)
    last = start - 1
    async for record in _read(consumer, tp, start, end, budget):
        last = record.offset
        if ledger.is_finished(record.offset):
            continue
        one = _unfinished(record, sought, before)
        if one is not None:
            looked.found.append(one)
        before += 1
    if budget.is_spent and last + 1 < end:
        looked.left_out.append(f"records from offset {last + 1} of {tp.topic}/{tp.partition} on")


def _ended(record: Record, tenant: str | None) -> Where | None:
    content_type = headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON
    try:
        result: InferenceResult = codecs.decode_result(record.value, content_type)
    except InvalidMessage:
        return None
    if tenant not in {None, result.tenant}:
        return None
    return Where(
        id=result.request_id,
        stage=Stage.ENDED,
        tenant=result.tenant,
        since_ms=record.timestamp_ms,
        record=(record.topic, record.partition, record.offset),
        pool=result.engine,
        worker=result.worker,
        output_tokens=result.usage.output_tokens,
        status=result.status,
    )


def _unfinished(record: Record, sought: _Sought, before: int) -> Where | None:
    """Say where the request is that a record is, if it is the one."""
    at = record.topic, record.partition, record.offset
    found = Where(sought.id, sought.stage, "", ahead=before, record=at, pool=sought.pool)
    if sought.stage is Stage.UNREAD:
        tenant = _tenant_of(record, sought.id)
        received_at_ms = record.timestamp_ms
    elif record.key == sought.id.encode():
        try:
            envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
        except InvalidMessage:
            return None
        tenant, received_at_ms = envelope.tenant, envelope.received_at_ms
    else:
        return None
    if tenant is None or sought.tenant not in {None, tenant}:
        return None
    return structs.replace(found, tenant=tenant, received_at_ms=received_at_ms)


def _tenant_of(record: Record, request_id: str) -> str | None:
    """The tenant of a client's record of that id, which the record names or has for want of one; None for others."""
    content_type = headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON
    value = record.value or b""
    derived = ids.derived_id(record.topic, record.partition, record.offset, record.timestamp_ms)
    if derived != request_id and record.key != request_id.encode() and request_id.encode() not in value:
        return None
    known = codecs.salvage(value, content_type)
    return known.get("tenant", DEFAULT_TENANT) if known.get("id", derived) == request_id else None


async def _read(consumer: Consumer, tp: TopicPartition, start: int, end: int, budget: _Budget) -> AsyncIterator[Record]:
    """Give the records of a partition between two offsets, as far as may still be read."""
    if start >= end:
        return
    consumer.seek(tp, start)
    while (consumer.position(tp) or start) < end and not budget.is_spent:
        for record in await consumer.poll([tp], CHUNK, POLL_MS):
            if record.offset >= end:
                return
            budget.spend(record)
            yield record


async def _partitions(transport: Transport, topic: str) -> int | None:
    admin = await transport.admin()
    try:
        return await admin.partitions(topic)
    finally:
        await admin.close()
