"""The processes of a chaos run: kept alive as a supervisor would, and hit by the faults of the plan."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cells import Cell, until
from plan import DISPATCHERS, WORKERS, Fault
from redis import Redis

from deploy.local.program import Running
from deploy.local.services import Services

BARE = (sys.executable, str(Path(__file__).with_name("bare_loop.py")))
AGAIN_S = 1.0  # between the death of a process and its next start
BROKER_UP_S = 120.0


class Actors:
    """Dispatchers and workers, or bare loops in their places: each that ends is started again."""

    def __init__(self, cell: Cell, *, bare: bool) -> None:
        self._cell, self._bare = cell, bare
        self._names = [f"dispatcher-{n}" for n in range(DISPATCHERS)] + [f"worker-{n}" for n in range(WORKERS)]

    def _start(self, name: str) -> None:
        if self._bare:
            self._cell.start(name, entry=BARE)
        elif name.startswith("dispatcher"):
            self._cell.dispatcher(name)
        else:
            self._cell.worker(name)

    async def run(self) -> None:
        """Keep all alive until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._names:
                group.create_task(self._keep(name))

    async def _keep(self, name: str) -> None:
        while True:
            await asyncio.to_thread(self._start, name)
            await until(lambda: self._cell.processes[name].exit_code is not None)
            await asyncio.sleep(AGAIN_S)

    async def living(self, name: str) -> str:
        """Give the process of that name, or another of its part where it is dead just now; waits where all are."""
        part = name.partition("-")[0]
        names = [name, *(other for other in self._names if other.startswith(part) and other != name)]

        def alive() -> list[str]:
            return [one for one in names if one in self._cell.processes and self._cell.processes[one].exit_code is None]

        await until(lambda: bool(alive()))
        return alive()[0]


class Faults:
    """Carries out a plan.

    Attributes:
        struck: (when, fault, the process it hit) of each fault so far.
        kills: SIGKILLs sent.
    """

    def __init__(self, plan: list[Fault], cell: Cell, actors: Actors, services: Services, say: Callable[[str], None]) -> None:
        self._plan, self._cell, self._actors, self._services, self._say = plan, cell, actors, services, say
        self._broker_free, self._redis_free = asyncio.Lock(), asyncio.Lock()
        self.struck: list[tuple[float, Fault, str]] = []
        self.kills = 0

    async def run(self, began: float) -> None:
        """Strike at each fault's time; returns when all is whole again."""
        async with asyncio.TaskGroup() as group:
            for fault in self._plan:
                await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
                group.create_task(self._strike(fault))

    async def _strike(self, fault: Fault) -> None:
        if fault.part == "broker":
            async with self._broker_free:
                await self._hit_broker(fault)
        elif fault.part == "redis":
            async with self._redis_free:
                await self._hit_redis(fault)
        else:
            await self._hit_process(fault)

    def _note(self, fault: Fault, name: str) -> None:
        self.struck.append((time.monotonic(), fault, name))
        self.kills += fault.is_kill
        pause = f" {fault.pause_s:.0f} s" if fault.pause_s else ""
        self._say(f"fault {len(self.struck)} of {len(self._plan)}: {fault.kind} {name}{pause}")

    async def _hit_process(self, fault: Fault) -> None:
        name = await self._actors.living(fault.name)
        one = self._cell.processes[name]
        self._note(fault, name)
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}[fault.kind]
        _signal(one, number)
        if fault.kind == "stop":
            await asyncio.sleep(fault.pause_s)
            _signal(one, signal.SIGCONT)

    async def _hit_broker(self, fault: Fault) -> None:
        services = self._services
        self._note(fault, "broker")
        await asyncio.to_thread(services.kill_broker if fault.kind == "kill" else services.stop_broker)
        await asyncio.sleep(fault.pause_s)
        await asyncio.to_thread(services.start_broker, wait=False)
        await asyncio.to_thread(services.wait_broker, BROKER_UP_S)

    async def _hit_redis(self, fault: Fault) -> None:
        services = self._services
        self._note(fault, "redis")
        if fault.kind == "flush":
            await asyncio.to_thread(_flush, services.redis)
            return
        await asyncio.to_thread(services.kill_redis)
        await asyncio.sleep(fault.pause_s)
        await asyncio.to_thread(services.start_redis)


def _signal(one: Running, number: signal.Signals) -> None:
    if one.exit_code is None:
        os.kill(one.pid, number)


def _flush(url: str) -> None:
    with Redis.from_url(url, socket_timeout=5) as client:
        client.flushall()
