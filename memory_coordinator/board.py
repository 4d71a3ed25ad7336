"""The seam to the status board, and the one that lives in this process: for simulation and for tests."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from schemas.messages import EngineStatus

EXPIRY_HEARTBEATS = 5
WATCHERS_QUEUE_MAX = 10_000


class Board(Protocol):
    """Where workers publish their status and the dispatcher reads it. It is advice: losing it costs speed only."""

    async def check(self) -> None:
        """Reach it once, or raise ConnectionError with one line that says what to do."""

    async def write(self, status: EngineStatus, heartbeat_ms: int) -> None:
        """Publish one worker's snapshot; it expires after five heartbeats."""

    async def remove(self, pool: str, worker: str) -> None:
        """Take a snapshot back: the worker left on purpose."""

    async def read(self) -> list[EngineStatus]:
        """Read all snapshots, sorted by pool and worker."""

    def watch(self, reread_ms: int) -> AsyncGenerator[EngineStatus, None]:
        """Give snapshots as they are published, and all of them again every `reread_ms`."""

    async def close(self) -> None:
        """Let go."""


class MemoryBoard:
    """A board inside one process, on the event loop's clock."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], tuple[float, EngineStatus]] = {}
        self._watchers: dict[asyncio.Queue[EngineStatus], None] = {}  # a set's order would differ from run to run

    async def check(self) -> None:
        """Always there."""

    async def write(self, status: EngineStatus, heartbeat_ms: int) -> None:
        """Publish one worker's snapshot; it expires after five heartbeats."""
        expires = asyncio.get_running_loop().time() + heartbeat_ms * EXPIRY_HEARTBEATS / 1000
        self._held[status.pool, status.worker] = expires, status
        for queue in self._watchers:
            if not queue.full():
                queue.put_nowait(status)

    async def remove(self, pool: str, worker: str) -> None:
        """Take a snapshot back."""
        self._held.pop((pool, worker), None)

    async def read(self) -> list[EngineStatus]:
        """Read all snapshots that have not expired."""
        now = asyncio.get_running_loop().time()
        return [status for _, (expires, status) in sorted(self._held.items(), key=lambda kv: kv[0]) if expires > now]

    def wipe(self) -> None:
        """Forget everything, as a wiped Redis does."""
        self._held.clear()

    async def watch(self, reread_ms: int) -> AsyncGenerator[EngineStatus, None]:
        """Give snapshots as they are published, and all of them again every `reread_ms`."""
        queue: asyncio.Queue[EngineStatus] = asyncio.Queue(WATCHERS_QUEUE_MAX)
        self._watchers[queue] = None
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                if loop.time() >= due:
                    due = loop.time() + reread_ms / 1000
                    for status in await self.read():
                        yield status
                try:
                    async with asyncio.timeout_at(due):
                        status = await queue.get()
                except TimeoutError:
                    continue
                yield status
        finally:
            self._watchers.pop(queue, None)

    async def close(self) -> None:
        """Nothing to let go of."""
