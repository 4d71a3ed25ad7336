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
from schemas.control import decode_control
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

    Attributes:
        cancels: What was cancelled, as far as it was read.
    """

    def __init__(self, transport: Transport, topics: Topics, patience_s: float = PATIENCE_S) -> None:
        self._transport, self._patience_s = transport, patience_s
        self._tp = TopicPartition(topics.control, 0)
        self._consumer: Consumer | None = None
        self._follows = False
        self.cancels = Cancels()

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
        log.info("control_replayed end=%d cancels=%d", end, len(self.cancels))

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
        while True:
            if await self._take_in(consumer):
                changed()
            if loop.time() - looked >= LOOK_S:
                looked = loop.time()
                await self._forget_trimmed(consumer)

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
                await self._to_first(consumer)
            except TransportError as reason:
                await _pause(reason)
            return False
        except TransportError as error:
            await _pause(error)
            return False
        return sum([self._take(record) for record in records]) > 0

    def _take(self, record: Record) -> bool:
        try:
            cancel = decode_control(record.value)
        except InvalidMessage as error:
            log.warning("control_record_passed_over offset=%d reason=%s", record.offset, error)
            return False
        self.cancels.add(cancel, record.offset, record.timestamp_ms)
        level = logging.INFO if self._follows else logging.DEBUG  # what lies there from before is told by its number
        log.log(level, "cancel offset=%d id=%s tenant=%s batch=%s", record.offset, cancel.id, cancel.tenant, cancel.batch)
        return True

    async def _to_first(self, consumer: Consumer) -> int:
        """Go on at the first record that is there; give the end."""
        first, end = (await consumer.bounds([self._tp]))[self._tp]
        self.cancels.forget(first)
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
