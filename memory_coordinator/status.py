"""Engine status on Redis: each worker writes its own snapshot with an expiry, the dispatcher reads them all.

Wiping Redis costs one heartbeat of knowledge. A snapshot that cannot be read is passed over, as if it were absent.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import cast

from redis.exceptions import RedisError

from memory_coordinator.board import EXPIRY_HEARTBEATS
from memory_coordinator.connecting import connect, unreachable
from schemas import codecs, headers
from schemas.config import RedisConfig
from schemas.errors import InvalidMessage
from schemas.messages import EngineStatus

log = logging.getLogger("forebay.status")

SCAN_COUNT = 500
WORKERS_MAX = 10_000  # keys read in one go: a bound, not a wish


class StatusBoard:
    """The snapshots of one cell.

    Args:
        config: Where Redis is.
        prefix: The cell's topic prefix, also the first part of each key.

    Raises:
        ConfigError: The URL, or an option in it, is none that Redis's client knows.
    """

    def __init__(self, config: RedisConfig, prefix: str) -> None:
        self._config, self._redis, self._prefix = config, connect(config), prefix
        self._channel = f"{prefix}:status"

    async def check(self) -> None:
        """Reach Redis once.

        Raises:
            ConnectionError: In one line, with the address and what to do.
        """
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise unreachable(self._config, error) from None

    async def write(self, status: EngineStatus, heartbeat_ms: int) -> None:
        """Publish one worker's snapshot; it expires after five heartbeats."""
        value = codecs.encode(status, headers.MSGPACK)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._key(status.pool, status.worker), value, px=heartbeat_ms * EXPIRY_HEARTBEATS)
            pipe.publish(self._channel, value)
            await pipe.execute()

    async def remove(self, pool: str, worker: str) -> None:
        """Take a snapshot back: the worker left on purpose."""
        await self._redis.delete(self._key(pool, worker))

    async def read(self) -> list[EngineStatus]:
        """Read all snapshots, sorted by pool and worker."""
        keys: list[bytes] = []
        async for key in self._redis.scan_iter(match=self._key("*", "*"), count=SCAN_COUNT):
            keys.append(key)
            if len(keys) >= WORKERS_MAX:
                break
        if not keys:
            return []
        found = []
        for key, value in zip(keys, cast("list[bytes | None]", await self._redis.mget(keys)), strict=True):
            try:
                if value is not None:
                    found.append(codecs.decode_status(value))
            except InvalidMessage as error:
                log.warning("status_unreadable key=%s error=%s", key, error)
        return sorted(found, key=lambda s: (s.pool, s.worker))

    async def watch(self, reread_ms: int) -> AsyncGenerator[EngineStatus, None]:
        """Give snapshots as they are published, and all of them again every `reread_ms`.

        Raises:
            RedisError: When Redis cannot be reached; ask again later.
        """
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._channel)
            loop = asyncio.get_running_loop()
            due = loop.time()
            while True:
                if loop.time() >= due:
                    due = loop.time() + reread_ms / 1000
                    for status in await self.read():
                        yield status
                message = await pubsub.get_message(timeout=max(due - loop.time(), 0.001))
                if message is not None:
                    try:
                        yield codecs.decode_status(message["data"])
                    except InvalidMessage as error:
                        log.warning("status_unreadable channel=%s error=%s", self._channel, error)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._redis.aclose()

    def _key(self, pool: str, worker: str) -> str:
        return f"{self._prefix}:status:{pool}:{worker}"
