"""Deleted records and the owners of a partition: what somebody else finished is no loss, and a loss is an alarm."""

import asyncio

import pytest
from idle_handler import IdleHandler
from virtual_loop import run_virtual

from broker.transport.errors import OffsetGone
from broker.transport.hop import Hop
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Outgoing, TopicPartition
from schemas.config import HopConfig

IN = TopicPartition("in", 0)
GROUP = "group"


class Hand(IdleHandler):
    """A handler that finishes nothing, or everything at once; its hop stands under a transport of its own."""

    def __init__(self, cluster, name, *, room, finishes, is_owner=lambda: True, config=None):
        async def ask():
            return is_owner()

        self.way = MemoryTransport(cluster, name)
        self.hop = Hop(self.way, GROUP, self, config or HopConfig(), still_owner=ask)
        self.free, self.finishes, self.started, self.dropped = room, finishes, [], []

    async def take(self):
        await self.hop.assign([IN])
        self.task = asyncio.ensure_future(self.hop.run())

    def room(self):
        return self.free - self.hop.used

    def start(self, record, inherited):  # noqa: ARG002 - as the hop calls it
        self.started.append(record.offset)
        if self.finishes:
            self.hop.finish((IN, record.offset), [])

    def drop(self, work):
        self.dropped.append(work[1])


def on_cluster(scenario):
    async def main():
        cluster = MemoryCluster()
        cluster.add_topic("in", 1)
        test = MemoryTransport(cluster, "test")
        producer = await test.producer()
        for n in range(10):
            await producer.send(Outgoing("in", b"%d" % n))
        await scenario(cluster, test, producer)

    run_virtual(main())


def test_a_zombie_whose_records_were_finished_and_deleted_by_its_successor_sees_no_loss():
    async def scenario(cluster, test, producer):
        zombie = Hand(cluster, "zombie", room=5, finishes=False, is_owner=lambda: False)
        await zombie.take()
        await asyncio.sleep(1)
        assert zombie.started == [0, 1, 2, 3, 4]
        owner = Hand(cluster, "owner", room=100, finishes=True)
        await owner.take()
        await asyncio.sleep(1)
        await (await test.admin()).trim({IN: cluster.committed[GROUP, IN].offset})
        zombie.free = 100  # it reads on where it stood
        await producer.send(Outgoing("in", b"new"))
        await asyncio.sleep(5)
        assert zombie.hop.failure is None
        assert not zombie.task.done()
        assert owner.started == [*range(10), 10]
        assert zombie.started == [0, 1, 2, 3, 4]
        for hand in (zombie, owner):
            hand.hop.stop()
            await hand.task
        assert zombie.dropped == [0, 1, 2, 3, 4]

    on_cluster(scenario)


def test_a_takeover_that_is_overtaken_by_a_successor_and_a_trim_sees_no_loss():
    async def scenario(cluster, test, producer):
        first = Hand(cluster, "first", room=100, finishes=True)
        await first.take()
        await asyncio.sleep(1)
        first.hop.stop()
        await first.task
        for n in range(10):
            await producer.send(Outgoing("in", b"more %d" % n))
        gate, waiting = asyncio.Event(), asyncio.Event()

        async def hook(step):
            if (step.process, step.moment, step.operation) == ("slow", "after", "committed"):
                waiting.set()
                await gate.wait()  # stopped between its two questions

        cluster.hook = hook
        slow = Hand(cluster, "slow", room=100, finishes=True)
        await slow.take()
        await waiting.wait()
        owner = Hand(cluster, "owner", room=100, finishes=True)
        await owner.take()
        await asyncio.sleep(1)
        await (await test.admin()).trim({IN: cluster.committed[GROUP, IN].offset})
        gate.set()
        await asyncio.sleep(5)
        assert slow.hop.failure is None
        assert slow.started == []
        for hand in (slow, owner):
            hand.hop.stop()
            await hand.task

    on_cluster(scenario)


def test_an_owner_that_stands_in_a_gap_is_not_overtaken_by_the_deletion_of_what_it_inherited_as_finished():
    async def scenario(cluster, test, _):
        first = Hand(cluster, "first", room=100, finishes=False)
        await first.take()
        await asyncio.sleep(1)
        for offset in (*range(1, 8), 9):
            first.hop.finish((IN, offset), [])
        first.hop.stop()
        await first.task  # 0 and 8 are left
        second = Hand(cluster, "second", room=1, finishes=False)
        await second.take()
        await asyncio.sleep(1)
        assert second.started == [0]
        second.free = 0
        second.hop.finish((IN, 0), [])
        await asyncio.sleep(1)
        await (await test.admin()).trim({IN: cluster.committed[GROUP, IN].offset})
        second.free = 100
        await asyncio.sleep(1)
        assert second.hop.failure is None
        assert second.started == [0, 8]
        assert cluster.log(IN).first == 1
        second.hop.stop()
        await second.task

    on_cluster(scenario)


def test_the_position_of_an_idle_partition_is_written_again_before_the_group_forgets_it():
    async def scenario(cluster, *_):
        hand = Hand(cluster, "hand", room=100, finishes=False, config=HopConfig(recommit_ms=60_000))
        await hand.take()
        await asyncio.sleep(1)
        for offset in (1, 2, 5):
            hand.hop.finish((IN, offset), [])
        await asyncio.sleep(1)
        position = cluster.committed[GROUP, IN]
        for _ in range(3):
            cluster.committed.clear()  # as a cluster does after its `offsets.retention.minutes`
            await asyncio.sleep(61)
            assert cluster.committed[GROUP, IN] == position
        hand.hop.stop()
        await hand.task
        again = Hand(cluster, "again", room=100, finishes=False)
        await again.take()
        await asyncio.sleep(1)
        assert again.started == [0, 3, 4, 6, 7, 8, 9]
        again.hop.stop()
        await again.task

    on_cluster(scenario)


def test_records_that_are_lost_while_they_wait_are_an_alarm():
    async def scenario(cluster, test, _):
        hand = Hand(cluster, "hand", room=5, finishes=False)
        await hand.take()
        await asyncio.sleep(1)
        hand.hop.finish((IN, 0), [])  # something is committed
        await asyncio.sleep(1)
        await (await test.admin()).trim({IN: 9})  # as retention would
        hand.free = 100
        with pytest.raises(OffsetGone, match="deleted before they were served"):
            await asyncio.wait_for(hand.task, 60)

    on_cluster(scenario)
