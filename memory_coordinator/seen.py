"""The seam to the log of requests seen lately, the one in this process, and the one on Redis: a stream of batches.

It is written behind the active dispatcher and read once by the next: losing it may cost a second run of a request
that was produced twice, and nothing else. Both logs hold no more than the window and the number of marks allow.
"""

import logging
from collections import deque
from typing import Any, NamedTuple, Protocol, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from schemas import codecs, headers
from schemas.config import RedisConfig
from schemas.errors import InvalidMessage
from schemas.messages import SeenBatch

log = logging.getLogger("forebay.seen")

PAGE_ENTRIES = 500
_FIELD = b"b"


class SeenLog(Protocol):
    """Where the active dispatcher leaves its marks for the next one. Any call may fail with RedisError or OSError."""

    async def write(self, batch: SeenBatch) -> None:
        """Add marks, and let go of those beyond the bounds."""

    async def read(self) -> list[SeenBatch]:
        """Read what is held, oldest first; what cannot be read is passed over."""

    async def replace(self, batches: list[SeenBatch]) -> None:
        """Hold these and no others."""

    async def close(self) -> None:
        """Let go."""


class MemorySeenLog:
    """A log inside one process, for simulation and for tests.

    Args:
        window_ms: Older batches go.
        marks_max: Beyond so many marks the oldest batches go.
    """

    def __init__(self, window_ms: int, marks_max: int) -> None:
        self._bounds = _Bounds(window_ms, marks_max)
        self._batches: list[SeenBatch] = []

    async def write(self, batch: SeenBatch) -> None:
        """Add marks, and let go of those beyond the bounds."""
        self._batches.append(batch)
        self._bounds.add(b"", batch)
        del self._batches[: len(self._batches) - len(self._bounds)]

    async def read(self) -> list[SeenBatch]:
        """Read what is held, oldest first."""
        return list(self._batches)

    async def replace(self, batches: list[SeenBatch]) -> None:
        """Hold these and no others."""
        self.wipe()
        for batch in batches:
            await self.write(batch)

    def wipe(self) -> None:
        """Forget everything, as a wiped Redis does."""
        self._bounds.clear()
        self._batches.clear()

    async def close(self) -> None:
        """Nothing to let go of."""


class RedisSeenLog:
    """The log of one cell on Redis: one stream, an entry for each batch.

    Args:
        config: Where Redis is.
        prefix: The cell's topic prefix, also the first part of the key.
        window_ms: Older batches go, and so does the stream when nothing is added for so long.
        marks_max: Beyond so many marks the oldest batches go.
    """

    def __init__(self, config: RedisConfig, prefix: str, window_ms: int, marks_max: int) -> None:
        timeout_s = config.timeout_ms / 1000
        self._redis = Redis.from_url(
            config.url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),  # marks that are written twice say no more than once
        )
        self._key = f"{prefix}:seen"
        self._window_ms = max(window_ms, 1)
        self._marks_max = marks_max
        self._bounds = _Bounds(window_ms, marks_max)

    async def write(self, batch: SeenBatch) -> None:
        """Add marks, and let go of those beyond the bounds.

        Raises:
            RedisError, OSError: Redis is away.
        """
        oldest = self._bounds.oldest_beside(batch)
        async with self._redis.pipeline(transaction=False) as pipe:
            self._add(pipe, batch, {"minid": oldest} if oldest else {"maxlen": 1})
            pipe.pexpire(self._key, self._window_ms)
            added = await pipe.execute()
        self._bounds.add(added[0], batch)

    async def read(self) -> list[SeenBatch]:
        """Read what is held, oldest first; what cannot be read is passed over.

        Raises:
            RedisError, OSError: Redis is away.
        """
        found: list[tuple[bytes, SeenBatch]] = []
        count, newest = 0, b"+"
        while count < self._marks_max:
            answer = await self._redis.xrevrange(self._key, max=newest, min="-", count=PAGE_ENTRIES)
            page = cast("list[tuple[bytes, dict[bytes, bytes]]]", answer)
            if not page:
                break
            for entry, fields in page:
                batch = _decoded(entry, fields)
                if batch is not None:
                    found.append((entry, batch))
                    count += len(batch.marks)
            newest = b"(" + page[-1][0]
        found.reverse()
        self._bounds.clear()
        for entry, batch in found:
            self._bounds.add(entry, batch)
        return [batch for _, batch in found[len(found) - len(self._bounds) :]]

    async def replace(self, batches: list[SeenBatch]) -> None:
        """Hold these and no others.

        Raises:
            RedisError, OSError: Redis is away.
        """
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key)
            for batch in batches:
                self._add(pipe, batch, {})
            pipe.pexpire(self._key, self._window_ms)
            done = await pipe.execute()
        self._bounds.clear()
        for entry, batch in zip(done[1:-1], batches, strict=True):
            self._bounds.add(entry, batch)

    async def close(self) -> None:
        """Let go of the connections."""
        await self._redis.aclose()

    def _add(self, pipe: Any, batch: SeenBatch, kept: dict[str, Any]) -> None:  # noqa: ANN401 - of redis
        pipe.xadd(self._key, {_FIELD: codecs.encode(batch, headers.MSGPACK)}, approximate=False, **kept)


class _Held(NamedTuple):
    """An entry of the stream, as far as the bounds ask."""

    entry: bytes
    at_ms: int
    marks: int


class _Bounds:
    """What is held, oldest first, and where it has to begin."""

    def __init__(self, window_ms: int, marks_max: int) -> None:
        self._window_ms, self._marks_max = window_ms, marks_max
        self._held: deque[_Held] = deque()
        self._marks = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, entry: bytes, batch: SeenBatch) -> None:
        """Take in what was written."""
        self.oldest_beside(batch)
        self._held.append(_Held(entry, batch.at_ms, len(batch.marks)))
        self._marks += len(batch.marks)

    def oldest_beside(self, batch: SeenBatch) -> bytes | None:
        """Let go of what has no place beside a new batch; gives the oldest entry that stays, None where none does."""
        held, room = self._held, self._marks_max - len(batch.marks)
        while held and (self._marks > room or batch.at_ms - held[0].at_ms >= self._window_ms):
            self._marks -= held.popleft().marks
        return held[0].entry if held else None

    def clear(self) -> None:
        """Nothing is held any more."""
        self._held.clear()
        self._marks = 0


def _decoded(entry: bytes, fields: dict[bytes, bytes]) -> SeenBatch | None:
    try:
        return codecs.decode_seen(fields.get(_FIELD))
    except InvalidMessage as error:
        log.warning("seen_unreadable entry=%s error=%s", entry, error)
        return None
