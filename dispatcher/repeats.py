"""Repeats, kept from running: one term's table of requests seen, and the log that hands it to the next term.

There is one active dispatcher, so within a term its own table is the truth. The log is advice for the next term, and
so that bad advice can lose nothing, a mark is written there only once the record it names is finished for good, and
is believed only where the group's position says so too: whatever is unfinished comes again by itself, and a cluster
that was made anew beside an old log has finished nothing yet.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from broker.transport.cancels import Cancels
from broker.transport.errors import TransportError
from broker.transport.ledger import Ledger
from broker.transport.protocol import Admin, TopicPartition, Transport
from dispatcher.core.item import Item, Work
from dispatcher.core.seen import Seen
from memory_coordinator.seen import SeenLog
from schemas import headers
from schemas.config import DispatcherConfig
from schemas.messages import SeenBatch, SeenMark

log = logging.getLogger("forebay.dispatcher")

RECALL_S = 2.0
WRITE_S = 0.2
LAST_WRITE_S = 1.0
BATCH_MARKS_MAX = 5_000


class Repeats:
    """Decides which records are repeats; `_write_behind` alone touches the log during the term.

    Args:
        config: The window and its bound.
        seen_log: What the term before left, and where this one leaves its own; None: nowhere.
        clock: Unix time in milliseconds.
        cancels: What was cancelled: a cancelled request answers no later one.
    """

    def __init__(self, config: DispatcherConfig, seen_log: SeenLog | None, clock: Callable[[], int], cancels: Cancels) -> None:
        self._cancels = cancels
        window_ms, self._ids_max, self._clock = config.idempotency_window_ms, config.idempotency_ids_max, clock
        self._log = seen_log if window_ms else None
        self._seen = Seen(window_ms, self._ids_max)
        self._unfinished: dict[Work, bytes] = {}  # remembered, and not finished for good: the hop bounds them
        self._unwritten: deque[SeenMark] = deque(maxlen=self._ids_max)
        self._is_away = False
        self.suppressed = 0  # records that were not run in this term

    def is_repeat(self, item: Item, now_ms: int) -> bool:
        """Whether another record's result answers this one. What is none is to be remembered once it is accepted."""
        key = item.seen_key
        if key is None or not self._seen.is_repeat(key, item.envelope.origin, now_ms):
            return False
        envelope, first = item.envelope, self._seen.first(key, now_ms)
        if first is None or self._cancels.matches(envelope.id, envelope.tenant, first.batch, first.at_ms):
            return False
        self.suppressed += 1
        log.info(
            "request_repeated id=%s tenant=%s topic=%s partition=%d offset=%d first=%s suppressed=%d",
            envelope.id,
            envelope.tenant,
            *envelope.origin,
            first.origin,
            self.suppressed,
        )
        return True

    def remember(self, item: Item, now_ms: int) -> None:
        """Take a request as accepted: the first of its name."""
        key = item.seen_key
        if key is not None:
            batch = headers.text(item.headers, headers.BATCH) if item.headers else None
            self._seen.remember(key, item.envelope.origin, now_ms, batch)
            if self._log is not None:
                self._unfinished[item.work] = key

    def finished(self, work: Work) -> None:
        """A record's output is durable: only now may the next term rely on it."""
        key = self._unfinished.pop(work, None)
        if key is not None:
            (topic, partition), offset = work
            self._unwritten.append(SeenMark(key, topic, partition, offset))

    def dropped(self, work: Work) -> None:
        """A record in hand went to somebody else, or was finished by somebody else."""
        self._unfinished.pop(work, None)

    async def recall(self, transport: Transport, admin: Admin, group: str, topics: Iterable[str]) -> None:
        """Take over what the term before has left, within a bounded time; without it the term begins empty.

        Args:
            transport: The cluster.
            admin: Tells how many partitions there are.
            group: Whose positions tell what is finished.
            topics: The topics that clients produce to.
        """
        if self._log is None:
            return
        try:
            async with asyncio.timeout(RECALL_S):
                held = await self._log.read()
                kept = await self._finished_here(held, transport, admin, group, topics)
                if kept != held:
                    await self._log.replace(kept)
        except (RedisError, TransportError, TimeoutError, OSError) as error:
            log.warning("seen_unknown error=%r action=start_empty: a repeat of an earlier request is run again", error)
            return
        for batch in kept:
            for mark in batch.marks:
                self._seen.remember(mark.key, (mark.topic, mark.partition, mark.offset), batch.at_ms)
        log.info("seen_recalled ids=%d", len(self._seen))

    async def write_behind(self) -> None:
        """Write to the log, until cancelled, what was finished; nobody waits for it."""
        while self._log is not None:
            await asyncio.sleep(WRITE_S)
            await self._write(self._log)

    async def close(self) -> None:
        """Write what is left, within a bounded time."""
        if self._log is not None:
            try:
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._write(self._log)
            except TimeoutError:
                log.warning("seen_unwritten reason=timeout")

    async def _write(self, seen_log: SeenLog) -> None:
        while self._unwritten:
            marks = [self._unwritten.popleft() for _ in range(min(len(self._unwritten), BATCH_MARKS_MAX, self._ids_max))]
            try:
                await seen_log.write(SeenBatch(self._clock(), marks))
            except (RedisError, OSError) as error:
                if not self._is_away:
                    log.warning("seen_unwritten error=%r action=go_on: the next term may run a repeat again", error)
                self._is_away = True
                return
            self._is_away = False

    async def _finished_here(
        self, batches: list[SeenBatch], transport: Transport, admin: Admin, group: str, topics: Iterable[str]
    ) -> list[SeenBatch]:
        """Keep the marks whose record this cluster's group has finished."""
        if not batches:
            return []
        counts = {topic: await admin.partitions(topic) or 0 for topic in topics}
        named = {(mark.topic, mark.partition) for batch in batches for mark in batch.marks}
        partitions = [TopicPartition(topic, number) for topic, number in sorted(named) if number < counts.get(topic, 0)]
        ledgers: dict[tuple[str, int], Ledger] = {}
        consumer = await transport.assign(partitions, group)
        try:
            for tp in partitions:
                ledgers[tp] = Ledger(await consumer.committed(tp))
        finally:
            await consumer.close()
        kept = [SeenBatch(batch.at_ms, [mark for mark in batch.marks if _is_finished(mark, ledgers)]) for batch in batches]
        return [batch for batch in kept if batch.marks]


def _is_finished(mark: SeenMark, ledgers: dict[tuple[str, int], Ledger]) -> bool:
    ledger = ledgers.get((mark.topic, mark.partition))
    return ledger is not None and ledger.is_finished(mark.offset)
