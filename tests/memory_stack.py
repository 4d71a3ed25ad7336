"""The whole path in memory under virtual time: dispatchers, workers and their engines on one in-memory cluster."""

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

from virtual_loop import run_virtual

from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Outgoing, TopicPartition
from dispatcher.service import DispatcherService
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import MemoryAsking, MemoryBoard, MemorySeenLog
from schemas import Topics, codecs, parse_config

TOPICS = Topics()
INTERACTIVE = TOPICS.requests("interactive")


def config_of(worker=None, dispatcher=None, slots=4, **options):
    """Give a configuration with one `sim` engine of these options, and what differs for workers and dispatchers."""
    return parse_config(
        {
            "engines": {"sim": {"kind": "sim", "slots": slots, "options": {"ttft_ms": 20, "tpot_ms": 5, **options}}},
            "topics": {"request_partitions": 2, "engine_partitions": 4, "result_partitions": 3, "retry_partitions": 1},
            "worker": worker or {},
            "dispatcher": dispatcher or {},
        }
    )


class Stack:
    """One cluster with its processes; every process may be killed."""

    def __init__(self, config):
        self.config, self.board, self.asking = config, MemoryBoard(), MemoryAsking(config.redis)
        self.seen_log = MemorySeenLog(config.dispatcher.idempotency_window_ms, config.dispatcher.idempotency_ids_max)
        self.cluster = MemoryCluster(config.kafka, clock=lambda: self.clock() / 1000)
        self.tasks, self.ways = {}, {}

    def clock(self):
        return int(asyncio.get_running_loop().time() * 1000) + 1_700_000_000_000

    def deadline(self, after_s):
        """Give a moment of the stack's own time, as requests name it."""
        return (datetime.fromtimestamp(self.clock() / 1000, UTC) + timedelta(seconds=after_s)).isoformat()

    def way(self, name):
        """A process's connection to the cluster."""
        self.ways[name] = MemoryTransport(self.cluster, name)
        return self.ways[name]

    async def ensure(self):
        self.transport = self.way("test")
        admin = await self.transport.admin()
        await admin.ensure(TOPICS.specs(self.config.topics, self.config.pools), 1, 1)

    def dispatcher(self, name="d"):
        more = {"clock": self.clock, "seen_log": self.seen_log, "asking": self.asking}
        service = DispatcherService(self.config, self.way(name), self.board, name, **more)
        self.tasks[name] = asyncio.ensure_future(service.run())
        return service

    def worker(self, name="w", engine="sim"):
        made = load(self.config.engines[engine])
        worker = Worker(self.config, engine, made, self.way(name), self.board, name, clock=self.clock, asking=self.asking)
        self.tasks[name] = asyncio.ensure_future(worker.run())
        return worker

    def kill(self, name):
        """End a process without a word to the cluster."""
        self.ways[name].kill()
        self.tasks.pop(name).cancel()

    def hold(self, name):
        """Make a hook that stops a process at its next word to the cluster, until `release`."""
        self._released = asyncio.Event()

        async def hook(step):
            if step.process == name:
                await self._released.wait()

        return hook

    def release(self):
        """Let what was held go on."""
        self._released.set()

    async def produce(self, values, topic=INTERACTIVE, headers=()):
        producer = await self.transport.producer()
        for value in values:
            await (await producer.send(Outgoing(topic, value, None, tuple(headers))))
        await producer.close()

    async def read(self, topic):
        admin = await self.transport.admin()
        tps = [TopicPartition(topic, n) for n in range(await admin.partitions(topic))]
        consumer = await self.transport.assign(tps)
        for tp, (first, _) in (await consumer.bounds(tps)).items():
            consumer.seek(tp, first)
        records = []
        while batch := await consumer.poll(tps, 10_000, 1000):
            records += batch
        await consumer.close()
        return records

    async def results(self, expected, limit_s=120.0):
        until = asyncio.get_running_loop().time() + limit_s
        while True:
            records = await self.read(TOPICS.results)
            if len(records) >= expected or asyncio.get_running_loop().time() > until:
                return [codecs.decode_result(r.value) for r in records]

    async def stop(self):
        for task in self.tasks.values():
            task.cancel()
        for task in self.tasks.values():
            with contextlib.suppress(asyncio.CancelledError):
                await task


def prompts(count, tenants=3):
    return [b'{"id":"r%d","tenant":"t%d","prompt":"say %d","max_output_tokens":8}' % (n, n % tenants, n) for n in range(count)]


def on_stack(scenario, config=None, kind=Stack):
    """Run a scenario under virtual time."""

    async def main():
        stack = kind(config or config_of())
        await stack.ensure()
        try:
            return await scenario(stack)
        finally:
            await stack.stop()

    return run_virtual(main())
