"""What a hop takes in when its handler wants nothing of some partition for now."""

import asyncio

from idle_handler import IdleHandler
from virtual_loop import run_virtual

from broker.transport.hop import Hop
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Committed, Outgoing, TopicPartition
from schemas.config import HopConfig

SHUT, FREE, OUT = TopicPartition("in", 0), TopicPartition("in", 1), "out"
GROUP = "group"


class Hand(IdleHandler):
    """A handler that takes of the first partition as many as it is told to, and finishes what it is told to."""

    def __init__(self, cluster, **bounds):
        self.way = MemoryTransport(cluster, "hand")
        self.hop = Hop(self.way, GROUP, self, HopConfig(**bounds))
        self.wanted, self.started, self.dropped = 0, [], []
        self.task = None

    async def take(self):
        await self.hop.assign([SHUT, FREE])
        self.task = asyncio.ensure_future(self.hop.run())

    async def leave(self):
        self.hop.stop()
        await self.task

    def begun(self, tp):
        return [offset for one, offset in self.started if one == tp]

    def room(self):
        return 1_000

    def takes(self, partition):
        return partition != SHUT or len(self.begun(SHUT)) < self.wanted

    def start(self, record, inherited):  # noqa: ARG002 - as the hop calls it
        self.started.append((TopicPartition(record.topic, record.partition), record.offset))

    def drop(self, work):
        self.dropped.append(work)


def on_cluster(scenario):
    async def main():
        cluster = MemoryCluster()
        cluster.add_topic("in", 2)
        cluster.add_topic(OUT, 1)
        await scenario(cluster, await MemoryTransport(cluster, "test").producer())

    run_virtual(main())


async def fill(producer, tp, count):
    for _ in range(count):
        await producer.send(Outgoing(tp.topic, b"x" * 10, partition=tp.partition))


def test_what_is_read_ahead_of_a_partition_that_waits_takes_nobodys_room():
    async def scenario(cluster, producer):
        await fill(producer, SHUT, 100)
        hand = Hand(cluster, in_flight_max=10, in_flight_bytes_max=105, unfinished_max=10)
        hand.wanted = 1
        await hand.take()
        await asyncio.sleep(1)
        assert hand.begun(SHUT) == [0]
        await fill(producer, FREE, 30)
        await asyncio.sleep(1)
        assert hand.begun(FREE) == list(range(9)), "all room is for those that may be begun"
        assert hand.hop.held_bytes == 100
        hand.wanted = 3
        hand.hop.finish((FREE, 0), [])
        hand.hop.finish((FREE, 1), [])
        await asyncio.sleep(1)
        assert hand.begun(SHUT) == [0, 1, 2]
        await hand.leave()
        assert hand.hop.held_bytes == 0

    on_cluster(scenario)


def test_work_kept_over_a_takeover_is_read_again_also_while_nothing_more_is_taken():
    async def scenario(cluster, producer):
        await fill(producer, SHUT, 20)
        hand = Hand(cluster)
        hand.wanted = 5
        await hand.take()
        await asyncio.sleep(1)
        hand.wanted = 0
        await hand.hop.assign([SHUT, FREE])  # as when a partition is added
        hand.hop.finish((SHUT, 4), [Outgoing(OUT, b"done")])
        await asyncio.sleep(1)
        assert cluster.committed[GROUP, SHUT].offset == 0
        assert len(cluster.logs(OUT)[0].read(0, 9)[0]) == 1, "what was finished is committed"
        assert hand.begun(SHUT) == [0, 1, 2, 3, 4]
        assert hand.dropped == []
        await hand.leave()

    on_cluster(scenario)


def test_a_partition_is_idle_up_to_where_it_was_read_only_while_nothing_of_it_is_in_hand():
    async def scenario(cluster, producer):
        hand = Hand(cluster)
        await hand.take()
        hand.wanted = 1
        await asyncio.sleep(1)
        assert hand.hop.idle_position(SHUT) == 0
        outbox = MemoryTransport(cluster, "other").outbox("others", FREE, hand.hop.consumer)
        await outbox.open()
        await outbox.commit([Outgoing(SHUT.topic, b"a", partition=0), Outgoing(SHUT.topic, b"b", partition=0)], Committed(0))
        await asyncio.sleep(1)
        assert hand.hop.idle_position(SHUT) is None, "one is in hand, and one was read ahead"
        hand.hop.finish((SHUT, 0), [])
        await asyncio.sleep(1)
        assert hand.hop.idle_position(SHUT) is None, "one was read ahead"
        hand.wanted = 9
        await asyncio.sleep(1)
        hand.hop.pump()
        assert hand.hop.idle_position(SHUT) is None
        hand.hop.finish((SHUT, 1), [])
        await asyncio.sleep(1)
        assert hand.hop.idle_position(SHUT) == 3, "the transaction's marker was passed over"
        await fill(producer, SHUT, 1)
        await asyncio.sleep(1)
        assert hand.hop.idle_position(SHUT) is None
        await hand.leave()

    on_cluster(scenario)
