"""On Apache Kafka whose own retention is a second: a dead pool is rescued, a backlog stays, and finished work is deleted."""

import asyncio
import contextlib
import sys
from collections import Counter

import pytest
from cells import toml
from trees import ROOT

from broker.transport.kafka import KafkaTransport
from broker.transport.protocol import Outgoing, TopicPartition
from deploy.local.services import services
from dispatcher.service import DispatcherService
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import StatusBoard
from schemas import Topics, codecs, parse_config
from schemas.topics import TopicSpec

LIMIT_S = 90
TINY = {
    "log.retention.ms": "1000",
    "log.retention.check.interval.ms": "500",
    "log.initial.task.delay.ms": "500",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Apache Kafka that deletes, after a second, whatever does not say that it stays."""
    with services(tmp_path_factory.mktemp("tiny"), "kafka", TINY) as running:
        yield running


def tables(parts, prefix, delivery="exactly_once"):
    quick, slow = {"ttft_ms": 5, "tpot_ms": 1}, {"ttft_ms": 3_600_000}
    return {
        "kafka": {"bootstrap": parts.kafka, "topic_prefix": prefix, "delivery": delivery},
        "redis": {"url": parts.redis},
        "topics": {"request_partitions": 1, "engine_partitions": 2, "retry_partitions": 1, "lane_partitions": 1},
        "dispatcher": {"failover_timeout_ms": 3_000, "trim_interval_ms": 500},
        "engines": {
            "a": {"kind": "sim", "model": "m", "slots": 4, "interactive_slots": 0, "options": slow},
            "b": {"kind": "sim", "model": "m", "slots": 4, "options": quick},
        },
    }


class Cell:
    """A cell on a broker; its dispatcher and the workers of pool b run in this process."""

    def __init__(self, raw):
        self.config = parse_config(raw)
        self.topics = Topics(self.config.kafka.topic_prefix)
        self.transport = KafkaTransport(self.config.kafka)
        self.board = StatusBoard(self.config.redis, self.config.kafka.topic_prefix)

    @contextlib.asynccontextmanager
    async def running(self, *services):
        tasks = [asyncio.ensure_future(service.run()) for service in services]
        try:
            yield
        finally:
            for service in services:
                service.stop()
            await asyncio.gather(*tasks)

    def dispatcher(self, name):
        return DispatcherService(self.config, self.transport, self.board, name)

    def worker(self, name):
        return Worker(self.config, "b", load(self.config.engines["b"]), self.transport, self.board, name)

    async def produce(self, first, count):
        producer = await self.transport.producer()
        for n in range(first, first + count):
            value = b'{"id":"r%d","model":"m","prompt":"say","max_output_tokens":4}' % n
            await (await producer.send(Outgoing(self.topics.requests("batch"), value)))

    async def reader(self, topic, group=None):
        """A consumer of all that a topic holds, and its partitions."""
        admin = await self.transport.admin()
        tps = [TopicPartition(topic, n) for n in range(await admin.partitions(topic))]
        consumer = await self.transport.assign(tps, group)
        for tp, (first, _) in (await consumer.bounds(tps)).items():
            consumer.seek(tp, first)
        return consumer, tps

    async def until(self, true, topic):
        """Look at a topic's bounds again and again, until something is true of them."""
        consumer, tps = await self.reader(topic)
        while not true(list((await consumer.bounds(tps)).values())):
            await consumer.poll([], 1, 100)
        await consumer.close()

    async def results(self, ids, more_ms=2_000):
        """Exactly one completed result for each id, and nothing more in a while."""
        consumer, tps = await self.reader(self.topics.results)
        found = []
        while len(found) < len(ids):
            found += await consumer.poll(tps, 1_000, 500)
        found += await consumer.poll(tps, 1_000, more_ms)
        await consumer.close()
        results = [codecs.decode_result(record.value) for record in found]
        assert Counter(r.request_id for r in results) == Counter(ids)
        assert {r.status for r in results} == {"completed"}
        return results


def in_cell(raw, scenario):
    async def main():
        cell = Cell(raw)
        try:
            async with asyncio.timeout(LIMIT_S):
                admin = await cell.transport.admin()
                await admin.ensure(cell.topics.specs(cell.config.topics, cell.config.pools), 1, 1)
                await scenario(cell)
        finally:
            await cell.board.close()
            await cell.transport.close()

    asyncio.run(main())


def ids(first, count):
    return [f"r{n}" for n in range(first, first + count)]


def test_a_backlog_outlives_the_clusters_retention_and_is_deleted_once_it_is_finished(tiny):
    async def scenario(cell):
        requests, plain = cell.topics.requests("batch"), f"{cell.topics.prefix}-plain"
        admin = await cell.transport.admin()
        await admin.ensure([TopicSpec(plain, 1, {})], 1, 1)
        producer = await cell.transport.producer()
        await (await producer.send(Outgoing(plain, b"a record of a topic like any other")))
        await cell.produce(0, 30)
        await cell.until(lambda bounds: bounds == [(1, 1)], plain)
        await cell.produce(30, 1)  # a segment that is written to is looked at again
        await cell.until(lambda bounds: bounds == [(0, 31)], requests)
        async with cell.running(cell.dispatcher("d1"), cell.worker("w1")):
            await cell.results(ids(0, 31))
            await cell.until(lambda bounds: bounds == [(31, 31)], requests)
            await cell.until(lambda bounds: sum(end - first for first, end in bounds) <= len(bounds), cell.topics.engine("b"))
        async with cell.running(cell.dispatcher("d2"), cell.worker("w2")):  # and whoever comes next finds its place
            await cell.produce(31, 10)
            await cell.results(ids(0, 41))

    in_cell(tables(tiny, "tiny-retention"), scenario)


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_what_the_killed_only_worker_of_a_pool_had_in_hand_is_answered_by_another_pool(tiny, tmp_path, delivery):
    raw = tables(tiny, f"rescue-{delivery}", delivery)
    path = tmp_path / "forebay.toml"
    path.write_text(toml(raw))

    async def scenario(cell):
        async with cell.running(cell.dispatcher("d")):
            command = [sys.executable, "-m", "deploy.cli", "work", "--engine", "a", "--name", "victim", "--config", str(path)]
            nothing = asyncio.subprocess.DEVNULL
            victim = await asyncio.create_subprocess_exec(*command, stdout=nothing, stderr=nothing, cwd=ROOT)
            try:
                await cell.produce(0, 30)
                await cell.until(lambda bounds: sum(end for _, end in bounds) >= 6, cell.topics.engine("a"))
                await claimed(cell)
            finally:
                victim.kill()
                await victim.wait()
            async with cell.running(cell.worker("w")):
                results = await cell.results(ids(0, 30))
        rescued = [r for r in results if r.run_id.startswith("000001.")]
        assert len(rescued) == 6, "its runway: the others had waited for room"
        assert {r.engine for r in results} == {"b"}

    in_cell(raw, scenario)


async def claimed(cell):
    """Wait until the worker has put its name to the records, so that it has them in hand."""
    consumer, tps = await cell.reader(cell.topics.engine("a"), cell.topics.engine_group("a"))
    while not any([(committed := await consumer.committed(tp)) and committed.metadata for tp in tps]):
        await consumer.poll([], 1, 100)
    await consumer.close()
