"""The control topic as every process reads it: all of it before it consumes anything, then on and on.

It has one partition, is read without a group and from its first record, and nothing in it can stop a reader: a record
that cannot be read, or of a kind that is not known here, is passed over.
"""

import asyncio
import logging
from collections.abc import Callable

from broker.transport.cancels import Cancels
from broker.transport.errors import OffsetGone, TransportError
from broker.transport.protocol import Consumer, Record, TopicPartition, Transport
from broker.transport.settings import Settings
from schemas.control import Cancel, decode_control
from schemas.errors import InvalidMessage
from schemas.topics import Topics

log = logging.getLogger("forebay.control")

PATIENCE_S = 30.0
POLL_MS = 500
RECORDS_MAX = 2_000
PAUSE_S = 0.5
LOOK_S = 60.0


class ControlLog:
    """Follows the control topic and keeps what holds of it.

    Args:
        transport: Where it is.
        topics: The cell's names.
        patience_s: `replay` gives up when it came no further for so long.
        settings: What the settings in it are added to; None where nobody here goes by them.

    Attributes:
        cancels: What was cancelled, as far as it was read.
        settings: What was set, as far as it was read.
        position: The next offset to be taken in: what holds is as of this.
    """

    def __init__(
        self, transport: Transport, topics: Topics, patience_s: float = PATIENCE_S, *, settings: Settings | None = None
    ) -> None:
        self._transport, self._patience_s = transport, patience_s
        self._tp = TopicPartition(topics.control, 0)
        self._consumer: Consumer | None = None
        self._follows = False
        self._quiet_below = 0  # what holds is not known before this was read
        self.settings = settings
        self.cancels = Cancels()
        self.position = 0

    async def replay(self) -> None:
        """Read all that lies there now; called once, before `run` and before anything is consumed.

        Raises:
            NoSuchTopic: With what to do about it.
            TransportError: It came no further for too long: what was cancelled is not known.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience_s) as limit:
                self._consumer = consumer = await self._transport.assign([self._tp])
                end = await self._to_first(consumer)
                while (before := consumer.position(self._tp)) is None or before < end:
                    await self._take_in(consumer)
                    if consumer.position(self._tp) != before:
                        limit.reschedule(loop.time() + self._patience_s)
        except TimeoutError:
            message = f"topic {self._tp.topic} gave nothing for {self._patience_s:g} s: what was cancelled is not known"
            raise TransportError(message) from None
        settings = 0 if self.settings is None else len(self.settings)
        log.info("control_replayed end=%d cancels=%d settings=%d", end, len(self.cancels), settings)

    async def run(self, changed: Callable[[], None]) -> None:
        """Follow until cancelled.

        Args:
            changed: Called once after each poll that brought something.
        """
        consumer = self._consumer
        if consumer is None:
            message = "the control topic was not replayed"
            raise RuntimeError(message)
        self._follows = True
        loop = asyncio.get_running_loop()
        looked = loop.time()
        has_news = False
        while True:
            has_news = await self._take_in(consumer) or has_news
            if has_news and self.is_whole:
                has_news = False
                changed()
            if loop.time() - looked >= LOOK_S:
                looked = loop.time()
                await self._forget_trimmed(consumer)

    @property
    def is_whole(self) -> bool:
        """Whether all was read that holds: not while records that had gone are made up for by those that are left."""
        return self._consumer is not None and (self._consumer.position(self._tp) or 0) >= self._quiet_below

    async def close(self) -> None:
        """Let go."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _take_in(self, consumer: Consumer) -> bool:
        """Poll once; whether that brought something. Errors are told and waited out."""
        try:
            records = await consumer.poll([self._tp], RECORDS_MAX, POLL_MS)
        except OffsetGone as error:
            log.warning("control_records_gone error=%s action=go_to_first", error)
            try:
                self._quiet_below = await self._to_first(consumer)
            except TransportError as reason:
                await _pause(reason)
            return True
        except TransportError as error:
            await _pause(error)
            return False
        return sum([self._take(record) for record in records]) > 0

    def _take(self, record: Record) -> bool:
        self.position = record.offset + 1
        try:
            control = decode_control(record.value)
        except InvalidMessage as error:
            log.warning("control_record_passed_over offset=%d reason=%s", record.offset, error)
            return False
        level = logging.INFO if self._follows else logging.DEBUG  # what lies there from before is told by its number
        if isinstance(control, Cancel):
            self.cancels.add(control, record.offset, record.timestamp_ms)
            log.log(level, "cancel offset=%d id=%s tenant=%s batch=%s", record.offset, control.id, control.tenant, control.batch)
            return True
        if self.settings is None:
            return False
        before = self.settings.version
        reason = self.settings.add(control, record.offset)
        if reason is not None:
            log.warning("control_record_passed_over offset=%d reason=%s", record.offset, reason)
        log.log(level, "settings offset=%d record=%s", record.offset, (record.value or b"").decode())
        return self.settings.version != before

    async def _to_first(self, consumer: Consumer) -> int:
        """Go on at the first record that is there; give the end."""
        first, end = (await consumer.bounds([self._tp]))[self._tp]
        self.cancels.forget(first)
        if self.settings is not None:
            self.settings.restart(first)
        self.position = first
        consumer.seek(self._tp, first)
        return end

    async def _forget_trimmed(self, consumer: Consumer) -> None:
        try:
            first, _ = (await consumer.bounds([self._tp]))[self._tp]
        except TransportError as error:
            log.warning("control_bounds_unknown error=%s", error)
        else:
            self.cancels.forget(first)


async def _pause(error: TransportError) -> None:
    log.warning("control_unreadable error=%s", error)
    await asyncio.sleep(PAUSE_S)
