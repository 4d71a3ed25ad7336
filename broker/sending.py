"""Sending requests, again where Kafka did not acknowledge them: the id is fixed, so a repeat is the same request."""

import asyncio
import logging

from broker.transport.errors import NoSuchTopic, TooLarge, TransportError
from broker.transport.protocol import Outgoing, Producer, Transport

log = logging.getLogger("forebay.client")

ATTEMPTS_MAX = 3
BACKOFF_S = 0.5
FLUSH_S = 20.0


class Sender:
    """One producer, and the sends that are not acknowledged yet."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._producer: Producer | None = None
        self._starting = asyncio.Lock()
        self._unacknowledged: set[asyncio.Task[None]] = set()

    async def queue(self, record: Outgoing) -> "asyncio.Task[None]":
        """Queue a record, waiting while too much is queued already; the task ends once it is acknowledged.

        Raises:
            NoSuchTopic, TooLarge: The record was refused. Whatever else goes wrong, the task tells.
        """
        producer = await self._started()
        first: asyncio.Future[tuple[int, int]]
        try:
            first = asyncio.ensure_future(await producer.send(record))
        except (NoSuchTopic, TooLarge):
            raise
        except TransportError as error:
            first = asyncio.get_running_loop().create_future()
            first.set_exception(error)
        task = asyncio.create_task(self._see_through(record, first))
        self._unacknowledged.add(task)
        task.add_done_callback(self._unacknowledged.discard)
        task.add_done_callback(_look)
        return task

    async def close(self) -> None:
        """Wait, within a bound, for what is queued, and let go."""
        if self._unacknowledged:
            _, late = await asyncio.wait(set(self._unacknowledged), timeout=FLUSH_S)
            for task in late:
                task.cancel()
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()

    async def _started(self) -> Producer:
        async with self._starting:
            if self._producer is None:
                self._producer = await self._transport.producer()
            return self._producer

    async def _see_through(self, record: Outgoing, first: "asyncio.Future[tuple[int, int]]") -> None:
        acknowledged: asyncio.Future[tuple[int, int]] = first
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                await acknowledged
            except (NoSuchTopic, TooLarge):
                raise
            except TransportError as error:
                if attempt == ATTEMPTS_MAX:
                    raise
                log.warning("send_again topic=%s attempt=%d error=%s", record.topic, attempt, error)
            else:
                return
            await asyncio.sleep(BACKOFF_S * attempt)
            acknowledged = asyncio.ensure_future(self._once(record))

    async def _once(self, record: Outgoing) -> tuple[int, int]:
        producer = await self._started()
        return await (await producer.send(record))


def _look(task: "asyncio.Task[None]") -> None:
    """Mark an error as seen: whoever queued the record may have stopped waiting."""
    if not task.cancelled():
        task.exception()
