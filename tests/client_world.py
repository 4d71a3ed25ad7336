"""The whole path in memory, with a client on it."""

import asyncio

from virtual_loop import run_virtual

from broker import Client
from broker.transport.memory import MemoryCluster, MemoryTransport
from dispatcher.service import DispatcherService
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import MemoryBoard, MemorySeenLog
from schemas import Topics, parse_config


def config_of(**options):
    return parse_config(
        {
            "engines": {"sim": {"kind": "sim", "slots": 4, "options": {"ttft_ms": 20, "tpot_ms": 5, **options}}},
            "topics": {"request_partitions": 2, "engine_partitions": 4, "result_partitions": 3, "retry_partitions": 1},
        }
    )


class World:
    """A cluster with its topics; dispatcher and worker are started when a test wants answers."""

    def __init__(self, config):
        self.config, self.cluster, self.board = config, MemoryCluster(config.kafka, clock=self.clock), MemoryBoard()
        self.topics, self.tasks, self.clients = Topics(), [], []
        self.ways, self.running = {}, {}
        self.seen_log = MemorySeenLog(config.dispatcher.idempotency_window_ms, config.dispatcher.idempotency_ids_max)

    def clock(self):
        return asyncio.get_running_loop().time() + 1_700_000_000

    def way(self, name):
        self.ways[name] = MemoryTransport(self.cluster, name)
        return self.ways[name]

    async def ensure(self):
        admin = await self.way("admin").admin()
        await admin.ensure(self.topics.specs(self.config.topics, self.config.pools), 1, 1)

    def dispatcher(self, name="d"):
        service = DispatcherService(
            self.config, self.way(name), self.board, name, clock=lambda: int(self.clock() * 1000), seen_log=self.seen_log
        )
        self._begin(name, service.run())

    def worker(self, name="w"):
        worker = Worker(
            self.config,
            "sim",
            load("sim", self.config.engines["sim"]),
            self.way(name),
            self.board,
            name,
            clock=lambda: int(self.clock() * 1000),
        )
        self._begin(name, worker.run())

    def _begin(self, name, running):
        self.running[name] = asyncio.ensure_future(running)
        self.tasks.append(self.running[name])

    def kill(self, name):
        """End a process without a word to the cluster."""
        self.ways[name].kill()
        self.running[name].cancel()

    def answer(self):
        self.dispatcher()
        self.worker()

    def client(self, name="client", **named):
        client = Client(self.config, transport=self.way(name), client_id=name, clock=self.clock, **named)
        self.clients.append(client)
        return client

    async def close(self):
        for client in self.clients:
            await client.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def in_world(scenario, config=None):
    """Run a scenario under virtual time."""

    async def main():
        world = World(config or config_of())
        await world.ensure()
        try:
            return await scenario(world)
        finally:
            await world.close()

    return run_virtual(main())
