"""What is written and read: records, transactions, offsets, topics."""

import asyncio
import itertools

import pytest

from broker.transport import (
    Committed,
    Fenced,
    NoSuchTopic,
    OffsetGone,
    Outgoing,
    TooLarge,
    TopicPartition,
    TransportError,
    Unreachable,
)
from broker.transport.partitioner import partition_for
from schemas.topics import BROKERS_TIME, TopicSpec

QUICK_S = 3


async def read(consumer, partitions, count, limit_s=20):
    """Read so many records, in the order in which they come."""
    records, until = [], asyncio.get_running_loop().time() + limit_s
    while len(records) < count:
        assert asyncio.get_running_loop().time() < until, f"only {len(records)} of {count} records came"
        records += await consumer.poll(partitions, count - len(records), 100)
    return records


async def nothing_comes(consumer, partitions, polls=5):
    for _ in range(polls):
        assert await consumer.poll(partitions, 10, 50) == []


async def reader(world, *partitions, group=None):
    """A consumer that reads the partitions from their first offset."""
    consumer = await world.process().assign(partitions, group)
    for tp in partitions:
        assert consumer.seek(tp, 0)
    return consumer


async def write(world, topic, values, **fields):
    producer = await world.process().producer()
    sent = [await producer.send(Outgoing(topic, value, **fields)) for value in values]
    places = [await acknowledged for acknowledged in sent]
    await producer.close()
    return places


async def opened(world, source, group, process=None):
    """An open outbox of a partition assigned by hand, and the consumer beside it."""
    process = process or world.process()
    consumer = await process.assign([source], group)
    outbox = process.outbox(group, source, consumer)
    await outbox.open()
    return outbox, consumer


# -- records ----------------------------------------------------------------------------------------------------------


async def order_in_a_partition(world):
    tp = TopicPartition(await world.topic(), 0)
    values = [b"%d" % n for n in range(500)]
    places = await write(world, tp.topic, values)
    assert places == [(0, n) for n in range(500)]
    records = await read(await reader(world, tp), [tp], 500)
    assert [r.value for r in records] == values
    assert [r.offset for r in records] == list(range(500))


async def all_of_a_record_comes_through(world):
    topic = await world.topic()
    tp = TopicPartition(topic, 0)
    headers = (("traceparent", b"00-ab"), ("binary", bytes(range(256))), ("empty", b""), ("traceparent", b"again"))
    producer = await world.process().producer()
    for record in (
        Outgoing(topic, b"value", b"key", headers),
        Outgoing(topic, None, b"tombstone"),
        Outgoing(topic, b"", b""),
        Outgoing(topic, "päivää".encode()),
    ):
        await (await producer.send(record))
    full, tombstone, empty, keyless = await read(await reader(world, tp), [tp], 4)
    assert (full.topic, full.partition, full.offset) == (topic, 0, 0)
    assert (full.key, full.value, full.headers) == (b"key", b"value", headers)
    assert (tombstone.key, tombstone.value, tombstone.headers) == (b"tombstone", None, ())
    assert (empty.key, empty.value) == (b"", b"")
    assert (keyless.key, keyless.value.decode()) == (None, "päivää")
    assert 0 <= full.timestamp_ms <= keyless.timestamp_ms


async def five_megabytes(world):
    source, topic = TopicPartition(await world.topic(), 0), await world.topic()
    tp, value = TopicPartition(topic, 0), bytes(range(256)) * 20_480
    outbox, _ = await opened(world, source, world.unique("group"))
    await outbox.commit([Outgoing(topic, b"small"), Outgoing(topic, value), Outgoing(topic, b"small")], Committed(1))
    await write(world, topic, [value])
    consumer = await reader(world, tp)
    assert [r.value for r in await read(consumer, [tp], 4)] == [b"small", value, b"small", value]


async def places_and_partitions(world):
    topic = await world.topic(3)
    keys = [b"key-%d" % n for n in range(30)]
    producer = await world.process().producer()
    places = [await (await producer.send(Outgoing(topic, b"v", key))) for key in keys]
    assert [partition for partition, _ in places] == [partition_for(key, 3) for key in keys]
    assert await (await producer.send(Outgoing(topic, b"v", b"key-1", partition=2))) == (2, sum(p == 2 for p, _ in places))
    source = TopicPartition(await world.topic(), 0)
    outbox, _ = await opened(world, source, world.unique("group"))
    fresh = await world.topic(3)
    chosen = await outbox.commit([Outgoing(fresh, b"v", key) for key in keys], Committed(1))
    assert chosen == places, "outbox and producer choose alike, and tell partition and offset in the order of the call"
    with pytest.raises(NoSuchTopic, match="no partition 3"):
        await producer.send(Outgoing(topic, b"v", partition=3))


# -- refusals -----------------------------------------------------------------------------------------------------------


async def unknown_topics_are_refused_quickly(world):
    source, missing = TopicPartition(await world.topic(), 0), world.unique("missing")
    process, group = world.process(), world.unique("group")
    outbox, _ = await opened(world, source, group, process)
    producer = await process.producer()
    good = await world.topic()
    async with asyncio.timeout(QUICK_S):
        with pytest.raises(NoSuchTopic, match=missing):
            await process.subscribe([missing], group, None, "test")
        with pytest.raises(NoSuchTopic, match=missing):
            await process.assign([TopicPartition(missing, 0)])
        with pytest.raises(NoSuchTopic, match=missing):
            await producer.send(Outgoing(missing, b"v"))
        with pytest.raises(NoSuchTopic, match=missing) as refused:
            await outbox.commit([Outgoing(good, b"v"), Outgoing(missing, b"v")], Committed(1))
    assert refused.value.index == 1
    assert await (await process.admin()).partitions(missing) is None, "asking made it"
    assert await outbox.commit([Outgoing(good, b"v")], Committed(1)) == [(0, 0)], "nothing was sent before"
    _, consumer = await opened(world, source, group)
    assert await consumer.committed(source) == Committed(1)


async def too_large_is_refused(world):
    source, topic = TopicPartition(await world.topic(), 0), await world.topic()
    outbox, _ = await opened(world, source, world.unique("group"))
    huge = Outgoing(topic, bytes(world.config.record_bytes_max))
    with pytest.raises(TooLarge, match="record_bytes_max") as refused:
        await outbox.commit([Outgoing(topic, b"v"), huge], Committed(1))
    assert refused.value.index == 1
    with pytest.raises(TooLarge):
        await (await world.process().producer()).send(huge)
    assert await outbox.commit([Outgoing(topic, b"v")], Committed(1)) == [(0, 0)], "nothing was sent before"


async def long_metadata_is_refused(world):
    source = TopicPartition(await world.topic(), 0)
    outbox, consumer = await opened(world, source, world.unique("group"))
    with pytest.raises(TooLarge, match="4096"):
        await outbox.commit([], Committed(1, "x" * 4_097))
    assert await consumer.committed(source) is None
    await outbox.commit([], Committed(1, "still usable"))


# -- commits ------------------------------------------------------------------------------------------------------------


async def positions_round_trip(world):
    source, group = TopicPartition(await world.topic(), 0), world.unique("group")
    outbox, consumer = await opened(world, source, group)
    assert await consumer.committed(source) is None
    for offset in (3, 0, 2**40):
        await outbox.commit([], Committed(offset))
        outbox, consumer = await opened(world, source, group)
        assert (await consumer.committed(source)).offset == offset
    assert await (await world.process().assign([source], world.unique("group"))).committed(source) is None


async def metadata_round_trips(world):
    source, out, group = TopicPartition(await world.topic(), 0), await world.topic(), world.unique("group")
    outbox, _ = await opened(world, source, group)
    for metadata in ("", "f1.AAECAw==", "x" * 4_096):
        await outbox.commit([Outgoing(out, b"v")], Committed(7, metadata))
        outbox, consumer = await opened(world, source, group)
        assert await consumer.committed(source) == Committed(7, metadata)


async def only_committed_records_are_read(world):
    source, topic = TopicPartition(await world.topic(2), 0), await world.topic()
    tp, group = TopicPartition(topic, 0), world.unique("group")
    consumer = await reader(world, tp)
    outbox, _ = await opened(world, source, group)
    neighbour, _ = await opened(world, source._replace(partition=1), group)
    world.break_commit(outbox)
    with pytest.raises(TransportError):
        await outbox.commit([Outgoing(topic, b"aborted")] * 3, Committed(1))
    await neighbour.commit([Outgoing(topic, b"committed")], Committed(1))
    await nothing_comes(consumer, [tp])
    assert (await consumer.bounds([tp]))[tp] == (0, 0), "an open transaction hides what lies behind it"
    await opened(world, source, group)
    (record,) = await read(consumer, [tp], 1)
    assert (record.value, record.offset) == (b"committed", 3), "aborted records take offsets"
    assert (await consumer.bounds([tp]))[tp] == (0, 6), "and so do the two markers"
    await nothing_comes(consumer, [tp])


async def offsets_are_not_contiguous(world):
    source, topic = TopicPartition(await world.topic(), 0), await world.topic()
    tp = TopicPartition(topic, 0)
    outbox, _ = await opened(world, source, world.unique("group"))
    for n in range(5):
        assert await outbox.commit([Outgoing(topic, b"%d" % n)], Committed(n)) == [(0, 2 * n)]
    consumer = await reader(world, tp)
    assert [r.offset for r in await read(consumer, [tp], 5)] == [0, 2, 4, 6, 8]
    assert consumer.seek(tp, 3)
    assert [r.offset for r in await read(consumer, [tp], 3)] == [4, 6, 8]
    while consumer.position(tp) != 10:  # behind the last marker too: so whoever reads knows that nothing is left
        assert await consumer.poll([tp], 1, 20) == []
    assert await consumer.bounds([tp]) == {tp: (0, 10)}


async def a_newer_outbox_fences(world):
    source, topic, group = TopicPartition(await world.topic(), 0), await world.topic(), world.unique("group")
    old, _ = await opened(world, source, group)
    await old.commit([Outgoing(topic, b"old")], Committed(1, "old"))
    new, _ = await opened(world, source, group)
    with pytest.raises(Fenced):
        await old.commit([Outgoing(topic, b"zombie")], Committed(2, "zombie"))
    with pytest.raises(TransportError):
        await old.commit([Outgoing(topic, b"zombie")], Committed(2, "zombie"))
    await new.commit([Outgoing(topic, b"new")], Committed(3, "new"))
    _, consumer = await opened(world, source, group)
    assert await consumer.committed(source) == Committed(3, "new")
    tp = TopicPartition(topic, 0)
    assert [r.value for r in await read(await reader(world, tp), [tp], 2)] == [b"old", b"new"]


async def a_successor_reads_what_was_settled(world):
    source, topic, group = TopicPartition(await world.topic(), 0), await world.topic(), world.unique("group")
    expected = None
    for n in range(12):
        process = world.process()
        outbox, consumer = await opened(world, source, group, process)
        assert await consumer.committed(source) == expected
        expected = Committed(n, f"round {n}")
        await outbox.commit([Outgoing(topic, b"kept %d" % n)], expected)
        if n % 3 == 1:
            world.break_commit(outbox)
            with pytest.raises(TransportError):
                await outbox.commit([Outgoing(topic, b"lost")], Committed(99, "lost"))
        if n % 2:
            await world.kill(process)
    await opened(world, source, group)
    tp = TopicPartition(topic, 0)
    records = await read(await reader(world, tp), [tp], 12)
    assert [r.value for r in records] == [b"kept %d" % n for n in range(12)]


# -- reading ------------------------------------------------------------------------------------------------------------


async def nothing_is_read_before_seek(world):
    topic = await world.topic(2)
    await write(world, topic, [b"a", b"b"], partition=0)
    tp, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    consumer = await world.process().assign([tp], None)
    await nothing_comes(consumer, [tp])
    assert consumer.seek(tp, 1)
    assert not consumer.seek(other, 0), "it is not ours"
    assert [r.value for r in await read(consumer, [tp, other], 1)] == [b"b"]
    await write(world, topic, [b"c"], partition=0)
    assert [r.value for r in await read(consumer, [tp], 1)] == [b"c"], "the position is kept"
    assert consumer.seek(tp, 0)
    assert [r.value for r in await read(consumer, [tp], 3)] == [b"a", b"b", b"c"]
    assert await consumer.still_member()


async def positions_pass_over_markers(world):
    source, topic, group = TopicPartition(await world.topic(), 0), await world.topic(), world.unique("group")
    tp = TopicPartition(topic, 0)
    outbox, _ = await opened(world, source, group)
    await outbox.commit([Outgoing(topic, b"v")], Committed(1))
    world.break_commit(outbox)
    with pytest.raises(TransportError):
        await outbox.commit([Outgoing(topic, b"aborted")] * 3, Committed(2))
    await opened(world, source, group)
    consumer = await world.process().assign([tp])
    assert consumer.position(tp) is None, "nobody said where to read"
    assert consumer.seek(tp, 0)
    assert consumer.position(tp) == 0
    assert [r.value for r in await read(consumer, [tp], 1)] == [b"v"]
    await nothing_comes(consumer, [tp])
    assert consumer.position(tp) == (await consumer.bounds([tp]))[tp][1] == 6


async def the_brokers_time_is_the_records(world):
    admin, name = await world.process().admin(), world.unique("stamped")
    await admin.ensure([TopicSpec(name, 2, BROKERS_TIME)], 1, 1)
    producer = await world.process().producer()
    waiting = [await producer.send(Outgoing(name, b"%d" % n, partition=0)) for n in range(20)]
    for acknowledged in waiting:
        await acknowledged
    await (await producer.send(Outgoing(name, b"later", partition=1)))
    tps = [TopicPartition(name, n) for n in range(2)]
    records = await read(await reader(world, *tps), tps, 21)
    times = [r.timestamp_ms for r in records if r.partition == 0]
    assert times == sorted(times)
    assert times[-1] <= next(r.timestamp_ms for r in records if r.partition == 1)


async def partitions_take_turns(world):
    topic = await world.topic(3)
    tps = [TopicPartition(topic, n) for n in range(3)]
    await write(world, topic, [b"x" * 100] * 2_000, partition=0)
    await write(world, topic, [b"y"] * 10, partition=1)
    await write(world, topic, [b"z"] * 10, partition=2)
    consumer = await reader(world, *tps)
    seen, polls = [], 0
    while {r.partition for r in seen} != {0, 1, 2}:
        got = await consumer.poll(tps, 30, 100)
        assert len(got) <= 30
        seen += got
        polls += bool(got)
    assert polls <= 5, "one partition's backlog stood in front of the others"
    rest = await read(consumer, tps, 2_020 - len(seen))
    for tp in tps:
        assert [r.offset for r in [*seen, *rest] if r.partition == tp.partition] == list(
            range(2_000 if tp.partition == 0 else 10)
        )
    only = await reader(world, *tps)
    assert {r.partition for r in await read(only, tps[1:], 20)} == {1, 2}, "only the partitions named"


async def no_partition_gives_more_than_it_may(world):
    topic = await world.topic(3)
    tps = [TopicPartition(topic, n) for n in range(3)]
    for n in range(2):
        await write(world, topic, [b"x"] * 50, partition=n)
    consumer = await reader(world, *tps)
    seen = []
    while len(seen) < 100:
        got = await consumer.poll(tps, 1_000, 100, 7)
        assert all(sum(r.partition == n for r in got) <= 7 for n in range(3))
        seen += got
    assert [(r.partition, r.offset) for r in sorted(seen)] == [(p, n) for p in range(2) for n in range(50)]


async def bounds_of_partitions(world):
    topic = await world.topic(2)
    tps = [TopicPartition(topic, n) for n in range(2)]
    consumer = await world.process().assign(tps)
    assert await consumer.bounds(tps) == {tps[0]: (0, 0), tps[1]: (0, 0)}
    await write(world, topic, [b"v"] * 7, partition=1)
    assert await consumer.bounds(tps) == {tps[0]: (0, 0), tps[1]: (0, 7)}


async def trimmed_records_are_gone(world):
    topic = await world.topic()
    tp = TopicPartition(topic, 0)
    await write(world, topic, [b"%d" % n for n in range(10)])
    admin = await world.process().admin()
    await admin.trim({tp: 4})
    await admin.trim({tp: 2})
    consumer = await world.process().assign([tp])
    assert consumer.position(tp) is None
    consumer.seek(tp, 0)
    assert consumer.position(tp) == 0
    assert await consumer.bounds([tp]) == {tp: (4, 10)}
    with pytest.raises(OffsetGone, match=topic):
        await read(consumer, [tp], 1)
    consumer.seek(tp, 4)
    assert [r.value for r in await read(consumer, [tp], 6)] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    await admin.trim({tp: 99})
    assert await consumer.bounds([tp]) == {tp: (10, 10)}


async def trim_does_no_harm(world):
    topic = await world.topic()
    tp = TopicPartition(topic, 0)
    await write(world, topic, [b"v"] * 3)
    admin = await world.process().admin()
    for _ in range(2):
        await admin.trim({tp: 2})
    assert len(await read(await reader(world, tp), [tp], 3)) == 3


# -- topics ---------------------------------------------------------------------------------------------------------------


async def topics_are_made_once(world):
    admin, names = await world.process().admin(), [world.unique("made") for _ in range(2)]
    specs = [TopicSpec(names[0], 2, {"retention.ms": "-1"}), TopicSpec(names[1], 1, {})]
    assert await admin.partitions(names[0]) is None
    lines = await admin.ensure(specs, 1, 1)
    assert [names[n] in line and "created" in line for n, line in enumerate(lines)] == [True, True]
    assert await admin.ensure(specs, 1, 1) == []
    assert [await admin.partitions(name) for name in names] == [2, 1]
    producer = await world.process().producer()
    for n in range(2):
        await (await producer.send(Outgoing(names[0], b"v", partition=n)))


async def topics_are_mended(world):
    admin, name = await world.process().admin(), world.unique("mended")
    await admin.ensure([TopicSpec(name, 2, {"retention.ms": "-1", "cleanup.policy": "delete"})], 1, 1)
    lines = await admin.ensure([TopicSpec(name, 5, {"retention.ms": "60000"})], 1, 1)
    assert len(lines) == 2
    assert "2 -> 5" in lines[0]
    assert "retention.ms=60000" in lines[1]
    assert await admin.partitions(name) == 5
    assert await admin.ensure([TopicSpec(name, 3, {"retention.ms": "60000", "cleanup.policy": "delete"})], 1, 1) == []
    producer = await world.process().producer()
    assert await (await producer.send(Outgoing(name, b"v", partition=4))) == (4, 0)


async def what_cannot_be_mended_is_told(world):
    admin, name = await world.process().admin(), world.unique("mended")
    await admin.ensure([TopicSpec(name, 2, {})], 1, 1)
    (line,) = await admin.ensure([TopicSpec(name, 5, {})], 1, 1)
    assert line.startswith("NOT done")
    assert "2 -> 5" in line


# -- the cluster ------------------------------------------------------------------------------------------------------------


async def unreachable_within_the_limit(world):
    process, loop = world.nowhere(), asyncio.get_running_loop()
    for call in (process.check, process.admin, process.producer):
        begun = loop.time()
        with pytest.raises(
            Unreachable, match=r"cannot reach Kafka at 127\.0\.0\.1:1 within 1 s.*forebay local up.*FOREBAY_KAFKA__BOOTSTRAP"
        ):
            await call()
        assert loop.time() - begun < QUICK_S


async def closing_is_quick(world):
    topic, group = await world.topic(), world.unique("group")
    source, process = TopicPartition(topic, 0), world.process()
    await process.check()
    outbox, consumer = await opened(world, source, group, process)
    producer = await process.producer()
    await write(world, topic, [b"v"])
    things = [outbox, consumer, producer, await process.admin(), (await world.member(topic, world.unique("group"), process))[0]]
    loop = asyncio.get_running_loop()
    for thing, _ in itertools.product([*things, process], range(2)):
        begun = loop.time()
        await thing.close()
        assert loop.time() - begun < QUICK_S
    for call in (
        lambda: consumer.poll([source], 1, 10),
        lambda: outbox.commit([], Committed(1)),
        lambda: producer.send(Outgoing(topic, b"")),
    ):
        with pytest.raises(TransportError):
            await call()
    assert not consumer.seek(source, 0)
