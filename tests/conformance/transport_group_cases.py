"""Groups: who owns what, what is kept over a rebalance, and what remains of those who die."""

import asyncio

import pytest
from conformance.transport_data_cases import nothing_comes, opened, read, write
from conformance.transport_worlds import Listener

from broker.transport import Committed, Membership, Outgoing, TopicPartition, TransportError


def partitions(topic, *numbers):
    return [TopicPartition(topic, n) for n in numbers]


async def members_share_and_leave(world):
    topic, group = await world.topic(4), world.unique("group")
    first, one = await world.member(topic, group)
    assert one.partitions == partitions(topic, 0, 1, 2, 3)
    second, two = await world.member(topic, group)
    await world.until(lambda: len(one.partitions) == 2, first, second)
    assert sorted([*one.partitions, *two.partitions]) == partitions(topic, 0, 1, 2, 3)
    assert one.partitions[0].partition == 0, "the lowest partition stays where it was"
    assert one.revocations == [partitions(topic, 0, 1, 2, 3)]
    before, after = one.memberships[-2:]
    assert after == Membership(before.member, before.generation + 1), "same member, very next generation"
    begun = asyncio.get_running_loop().time()
    await second.close()
    await world.until(lambda: len(one.partitions) == 4, first)
    assert asyncio.get_running_loop().time() - begun < world.config.session_timeout_ms / 1000, "it left, it did not expire"
    assert await first.still_member()


async def positions_wait_for_seek_after_a_rebalance(world):
    topic, group = await world.topic(2), world.unique("group")
    await write(world, topic, [b"a", b"b", b"c"], partition=0)
    consumer, listener = await world.member(topic, group)
    tp = TopicPartition(topic, 0)
    await nothing_comes(consumer, [tp])
    assert consumer.seek(tp, 0)
    assert [r.value for r in await read(consumer, [tp], 2)] == [b"a", b"b"]
    other, _ = await world.member(topic, group)
    await world.until(lambda: len(listener.memberships) == 2, consumer, other)
    assert listener.partitions == [tp]
    await nothing_comes(consumer, [tp])
    assert consumer.seek(tp, 2), "on from its own position"
    assert [r.value for r in await read(consumer, [tp], 1)] == [b"c"]
    assert not consumer.seek(TopicPartition(topic, 1), 0), "it went to the other"


async def polls_return_during_a_rebalance(world):
    topic, group = await world.topic(2), world.unique("group")
    consumer, listener = await world.member(topic, group)
    loop, longest = asyncio.get_running_loop(), 0.0
    joining = asyncio.ensure_future(world.member(topic, group))
    while len(listener.memberships) < 2 or not joining.done():
        begun = loop.time()
        await consumer.poll(listener.partitions, 10, 50)
        longest = max(longest, loop.time() - begun)
    await joining
    assert longest < 0.5


async def the_dead_are_replaced(world):
    topic, out, group = await world.topic(2), await world.topic(), world.unique("group")
    source, process = TopicPartition(topic, 0), world.process()
    doomed, listener = await world.member(topic, group, process)
    assert source in listener.partitions
    outbox = process.outbox(group, source, doomed)
    await outbox.open()
    await outbox.commit([Outgoing(out, b"done")], Committed(5, "ledger"))
    await world.kill(process)
    heir = world.process()
    listener = Listener()
    consumer = await heir.subscribe([topic], group, listener, "heir")
    await world.until(lambda: source in listener.partitions, consumer)
    outbox = heir.outbox(group, source, consumer)
    await outbox.open()
    assert (await consumer.committed(source)).offset == 5
    await outbox.commit([Outgoing(out, b"more")], Committed(6))
    settled = heir.outbox(group, source, consumer)
    await settled.open()
    assert (await consumer.committed(source)).offset == 6


async def an_idle_member_stays(world):
    topic, group = await world.topic(), world.unique("group")
    consumer, listener = await world.member(topic, group)
    loop = asyncio.get_running_loop()
    until = loop.time() + world.config.session_timeout_ms / 1000 + 1.5
    while loop.time() < until:
        assert await consumer.poll([], 1, 100) == []
    assert await consumer.still_member()
    assert len(listener.memberships) == 1


async def a_woken_zombie_is_told(world):
    topic, group = await world.topic(), world.unique("group")
    process = world.process()
    consumer, _ = await world.member(topic, group, process)
    assert await consumer.still_member()
    await world.freeze(process)
    assert not await consumer.still_member()


async def two_consumers_in_one_process(world):
    topics, groups = [await world.topic(4), await world.topic(4)], [world.unique("group"), world.unique("group")]
    process = world.process()
    pairs = [await world.member(topic, group, process) for topic, group in zip(topics, groups, strict=True)]
    third, three = await world.member(topics[0], groups[0], process)
    (first, one), (second, two) = pairs
    await world.until(lambda: len(one.partitions) == 2, first, second, third)
    assert sorted([*one.partitions, *three.partitions]) == partitions(topics[0], 0, 1, 2, 3)
    assert two.partitions == partitions(topics[1], 0, 1, 2, 3)
    for topic in topics:
        for n in range(4):
            await write(world, topic, [b"%d" % n], partition=n)
    for consumer, listener in (*pairs, (third, three)):
        assert all(consumer.seek(tp, 0) for tp in listener.partitions)
        records = await read(consumer, listener.partitions, len(listener.partitions))
        assert sorted(TopicPartition(r.topic, r.partition) for r in records) == listener.partitions


async def owners_are_known(world):
    topic, group = await world.topic(3), world.unique("group")
    admin = await world.process().admin()
    assert await admin.members(group) == {}
    consumer, _ = await world.member(topic, group)
    assert await admin.members(group) == {"test": tuple(partitions(topic, 0, 1, 2))}
    await consumer.close()
    assert await admin.members(group) == {}


async def unknown_owners_are_not_nobody(world):
    topic, group = await world.topic(), world.unique("group")
    admin = await world.process().admin()
    await world.member(topic, group)
    with pytest.raises(TransportError, match="does not tell"):
        await admin.members(group)


async def only_owners_commit(world):
    topic, group = await world.topic(2), world.unique("group")
    process = world.process()
    consumer, listener = await world.member(topic, group, process)
    outboxes = {tp: process.outbox(group, tp, consumer) for tp in listener.partitions}
    for tp, outbox in outboxes.items():
        await outbox.open()
        await outbox.commit([], Committed(tp.partition + 1))
    other, _ = await world.member(topic, group)
    await world.until(lambda: len(listener.partitions) == 1, consumer, other)
    (kept,) = listener.partitions
    (lost,) = set(outboxes) - {kept}
    await outboxes[kept].commit([], Committed(10))
    with pytest.raises(TransportError, match="not ours"):
        await outboxes[lost].commit([], Committed(10))
    assert (await consumer.committed(kept)).offset == 10
    assert (await consumer.committed(lost)).offset == lost.partition + 1
    by_hand, _ = await opened(world, lost, group)
    with pytest.raises(TransportError):
        await by_hand.commit([], Committed(11))


async def a_broken_consumer_joins_again(world):
    topic, group = await world.topic(2), world.unique("group")
    await write(world, topic, [b"a"], partition=0)
    consumer, listener = await world.member(topic, group)
    consumer._inner._coordinator._coordination_task.cancel()
    await world.until(lambda: len(listener.memberships) == 2, consumer)
    assert listener.revocations, "told that its partitions are in the balance"
    assert listener.memberships[0].member != listener.memberships[1].member
    tp = TopicPartition(topic, 0)
    assert consumer.seek(tp, 0)
    assert [r.value for r in await read(consumer, [tp], 1)] == [b"a"]
    assert await consumer.still_member()


async def a_failing_listener_is_heard(world):
    class Failing(Listener):
        def assigned(self, partitions, membership):
            super().assigned(partitions, membership)
            message = "a fault of ours"
            raise ValueError(message)

    listener = Failing()
    consumer = await world.process().subscribe([await world.topic()], world.unique("group"), listener, "test")
    with pytest.raises(ValueError, match="a fault of ours"):
        await world.until(lambda: False, consumer)
