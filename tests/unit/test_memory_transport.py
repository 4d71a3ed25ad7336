"""What the in-memory transport does beyond the conformance suite: faults on demand, time, and the same again."""

import asyncio

import pytest
from virtual_loop import run_virtual

from broker.transport import Committed, Fenced, Membership, OffsetGone, Outgoing, TopicPartition, TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.memory.groups import assign_sticky
from schemas.config import KafkaConfig

IN, OUT = TopicPartition("in", 0), TopicPartition("out", 0)


class Listener:
    def __init__(self):
        self.told = []
        self.partitions = ()

    def revoked(self, partitions):
        self.told.append(("revoked", asyncio.get_running_loop().time(), [tp.partition for tp in partitions]))

    def assigned(self, partitions, membership):
        self.partitions = partitions
        self.told.append(("assigned", asyncio.get_running_loop().time(), [tp.partition for tp in partitions], membership))


class Hook:
    """Raises, or waits, once, at one step."""

    def __init__(self, moment, operation, act):
        self.moment, self.operation, self.act = moment, operation, act

    async def __call__(self, step):
        if (step.moment, step.operation) == (self.moment, self.operation) and self.act is not None:
            act, self.act = self.act, None
            await act()


def make_cluster(**config):
    cluster = MemoryCluster(KafkaConfig(**config))
    cluster.add_topic("in", 4)
    cluster.add_topic("out")
    return cluster


async def open_outbox(transport, group="g"):
    consumer = await transport.assign([IN], group)
    outbox = transport.outbox(group, IN, consumer)
    await outbox.open()
    return outbox, consumer


async def visible(cluster):
    consumer = await MemoryTransport(cluster).assign([OUT])
    consumer.seek(OUT, 0)
    return [record.value for record in await consumer.poll([OUT], 100, 0)]


def fail(error):
    async def act():
        raise error

    return act


@pytest.mark.parametrize(
    ("moment", "operation", "committed"),
    [
        ("before", "produce", False),
        ("after", "produce", False),
        ("before", "offsets", False),
        ("after", "offsets", False),
        ("before", "end", False),
        ("after", "end", True),
    ],
)
def test_a_commit_that_fails_at_any_step_is_all_or_nothing_after_a_takeover(moment, operation, committed):
    async def main():
        cluster = make_cluster()
        outbox, _ = await open_outbox(MemoryTransport(cluster))
        cluster.hook = Hook(moment, operation, fail(TransportError("lost")))
        with pytest.raises(TransportError, match="lost"):
            await outbox.commit([Outgoing("out", b"a"), Outgoing("out", b"b")], Committed(7, "m"))
        with pytest.raises(TransportError, match="open a new one"):
            await outbox.commit([], Committed(8))
        _, consumer = await open_outbox(MemoryTransport(cluster))
        assert await consumer.committed(IN) == (Committed(7, "m") if committed else None)
        assert await visible(cluster) == ([b"a", b"b"] if committed else [])

    run_virtual(main())


def test_a_call_that_is_never_answered_ends_by_its_deadline():
    async def main():
        cluster = make_cluster()
        transport = MemoryTransport(cluster)
        outbox, consumer = await open_outbox(transport)
        loop = asyncio.get_running_loop()
        for operation, call in (
            ("committed", lambda: consumer.committed(IN)),
            ("end", lambda: outbox.commit([Outgoing("out", b"v")], Committed(1))),
            ("init", outbox.open),
        ):
            cluster.hook = Hook("before", operation, lambda: asyncio.sleep(1e6))
            begun = loop.time()
            with pytest.raises(TransportError, match="no answer within 15 s"):
                await call()
            assert loop.time() - begun == pytest.approx(15)

    run_virtual(main())


def test_a_transaction_left_open_times_out_and_its_owner_is_fenced():
    async def main():
        cluster = make_cluster()
        outbox, _ = await open_outbox(MemoryTransport(cluster))
        neighbour = await MemoryTransport(cluster).producer()
        cluster.hook = Hook("before", "end", lambda: asyncio.sleep(8))
        commit = asyncio.ensure_future(outbox.commit([Outgoing("out", b"late")], Committed(1)))
        await asyncio.sleep(1)
        await (await neighbour.send(Outgoing("out", b"neighbour")))
        await asyncio.sleep(3.9)
        assert await visible(cluster) == [], "4.9 s: still open, and it hides what lies behind it"
        await asyncio.sleep(0.2)
        assert await visible(cluster) == [b"neighbour"]
        with pytest.raises(Fenced):
            await commit

    run_virtual(main())


def test_a_killed_member_is_expired_after_its_session_and_nothing_it_left_counts():
    async def main():
        cluster = make_cluster()
        one, two = MemoryTransport(cluster, "one"), MemoryTransport(cluster, "two")
        first, second = Listener(), Listener()
        consumer = await one.subscribe(["in"], "g", first, "one")
        await two.subscribe(["in"], "g", second, "two")
        await asyncio.sleep(1)
        outbox = one.outbox("g", IN, consumer)
        await outbox.open()
        cluster.hook = Hook("before", "end", fail(TransportError("killed")))
        with pytest.raises(TransportError):
            await outbox.commit([Outgoing("out", b"v")], Committed(1))
        one.kill()
        with pytest.raises(TransportError, match="killed"):
            await consumer.poll([], 1, 10)
        await asyncio.sleep(10)
        assert second.told[1:] == [
            ("revoked", pytest.approx(7, abs=0.1), [1, 3]),
            ("assigned", pytest.approx(7, abs=0.1), [0, 1, 2, 3], Membership(second.told[0][3].member, 2)),
        ]
        assert len(first.told) == 1, "the dead are not told"
        assert await visible(cluster) == []
        await one.close()

    run_virtual(main())


@pytest.mark.parametrize(("frozen_s", "expired"), [(5, False), (7, True)])
def test_a_frozen_process_comes_back_as_itself_or_as_a_new_member(frozen_s, expired):
    async def main():
        cluster = make_cluster()
        transport, listener = MemoryTransport(cluster), Listener()
        consumer = await transport.subscribe(["in"], "g", listener, "c")
        await asyncio.sleep(1)
        transport.freeze()
        await asyncio.sleep(frozen_s)
        assert await consumer.still_member() is not expired
        transport.thaw()
        await asyncio.sleep(1)
        assert await consumer.still_member()
        members = [told[3].member for told in listener.told if told[0] == "assigned"]
        assert len(members) == len(set(members)) == (2 if expired else 1)

    run_virtual(main())


def test_a_rebalance_waits_for_a_silent_member_no_longer_than_its_time_out():
    async def main():
        cluster = make_cluster()
        silent, joining = MemoryTransport(cluster), MemoryTransport(cluster)
        first, second = Listener(), Listener()
        consumer = await silent.subscribe(["in"], "g", first, "silent")
        await asyncio.sleep(1)
        silent.freeze()
        await joining.subscribe(["in"], "g", second, "joining")
        await asyncio.sleep(5)
        assert second.told == [("assigned", pytest.approx(4), [0, 1, 2, 3], Membership(second.told[0][3].member, 2))]
        assert not await consumer.still_member()

    run_virtual(main())


def test_a_broker_that_is_down_delays_calls_and_stops_intake_and_loses_nothing():
    async def main():
        cluster = make_cluster()
        transport = MemoryTransport(cluster)
        producer = await transport.producer()
        await (await producer.send(Outgoing("out", b"before")))
        consumer = await transport.assign([OUT], "g")
        consumer.seek(OUT, 0)
        cluster.stop()
        assert await consumer.poll([OUT], 1, 100) == []
        asyncio.get_running_loop().call_later(4, cluster.start)
        await (await producer.send(Outgoing("out", b"after")))
        assert asyncio.get_running_loop().time() == pytest.approx(4.1)
        assert [r.value for r in await consumer.poll([OUT], 2, 100)] == [b"before", b"after"]
        cluster.stop()
        with pytest.raises(TransportError, match="no answer"):
            await producer.send(Outgoing("out", b"never"))
        cluster.start()
        assert await visible(cluster) == [b"before", b"after"]

    run_virtual(main())


def test_retention_deletes_by_time_and_reading_what_it_took_is_an_alarm():
    async def main():
        cluster = make_cluster()
        cluster.add_topic("out", 1, {"retention.ms": "1000"})
        transport = MemoryTransport(cluster)
        producer, consumer = await transport.producer(), await transport.assign([OUT])
        for _ in range(3):
            await (await producer.send(Outgoing("out", b"v")))
            await asyncio.sleep(0.6)
        assert await consumer.bounds([OUT]) == {OUT: (2, 3)}
        consumer.seek(OUT, 0)
        with pytest.raises(OffsetGone, match=r"out/0: position 0 lies outside of 2\.\.3"):
            await consumer.poll([OUT], 1, 0)

    run_virtual(main())


def test_a_poll_wakes_for_a_record_at_once():
    async def main():
        cluster = make_cluster()
        transport = MemoryTransport(cluster)
        consumer, producer = await transport.assign([OUT]), await transport.producer()
        consumer.seek(OUT, 0)
        poll = asyncio.ensure_future(consumer.poll([OUT], 10, 60_000))
        await asyncio.sleep(2)
        await producer.send(Outgoing("out", b"v"))
        assert [r.timestamp_ms for r in await poll] == [2_000], "records carry the loop's time"
        assert asyncio.get_running_loop().time() == pytest.approx(2)

    run_virtual(main())


def test_a_topic_that_grows_is_assigned_anew():
    async def main():
        cluster = make_cluster()
        listener = Listener()
        await MemoryTransport(cluster).subscribe(["in"], "g", listener, "c")
        await asyncio.sleep(1)
        cluster.add_topic("in", 6)
        await asyncio.sleep(1)
        assert [tp.partition for tp in listener.partitions] == [0, 1, 2, 3, 4, 5]

    run_virtual(main())


def test_stickiness_keeps_the_lowest_and_moves_no_more_than_it_must():
    partitions = [TopicPartition("t", n) for n in range(7)]
    topics = {name: frozenset({"t"}) for name in "ab"}
    before = assign_sticky(partitions, topics, {})
    assert {name: len(held) for name, held in before.items()} == {"a": 4, "b": 3}
    after = assign_sticky(partitions, {**topics, "c": frozenset({"t"})}, before)
    assert sorted(tp for held in after.values() for tp in held) == partitions
    assert all(after[name] == before[name][: len(after[name])] for name in "ab"), "they give up their highest"
    assert len(after["c"]) == 2
    assert assign_sticky(partitions, topics, {"a": after["a"], "b": after["b"]}).keys() == {"a", "b"}


def test_members_get_only_partitions_of_topics_they_read():
    partitions = [TopicPartition(topic, n) for topic in ("t", "u") for n in range(2)]
    result = assign_sticky(partitions, {"a": frozenset({"t"}), "b": frozenset({"t", "u"}), "c": frozenset({"v"})}, {})
    assert result == {"a": partitions[:2], "b": partitions[2:], "c": []}
