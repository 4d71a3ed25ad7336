"""Trimming: finished records are deleted, since nothing that was accepted ever expires.

Requests, retries, lanes and the pools' topics are cut below the low watermark, which is the committed offset: every record
below it is finished. A position that is read late is an older one, and so is a safe one. What is deleted is what was
committed a whole interval ago, so that without transactions too a dispatcher that was stopped for a while and commits an
older position once more finds its records there.

The control topic has no reader's position: a cancel is kept as long as there may be a request that it could mean, that
is as long as an unfinished one is as old, and `dispatcher.control_retention_ms` longer. All watermarks are read before
the first record is looked at: a request that moves on meanwhile is met where it was or where it went.

Settings hold for good, and go with the rest: first all that hold are written anew at the end of the topic, and nothing is
deleted before that was acknowledged. `broker/transport/settings.py` says why it does no harm to do so at any moment.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from broker.transport.control_log import ControlLog
from broker.transport.errors import TransportError
from broker.transport.protocol import Admin, Consumer, Outgoing, Record, TopicPartition, Transport
from schemas import codecs, headers
from schemas.config import Config
from schemas.control import encode_control
from schemas.errors import InvalidMessage
from schemas.topics import Topics

log = logging.getLogger("forebay.trim")

POLL_MS = 200
READ_S = 10.0  # for one partition's unfinished records; later than that nobody knows how old they are
BATCH = 500
READ_RECORDS_MAX = 20_000  # in one pass, over all retries and engine topics
READ_BYTES_MAX = 64 * 2**20

Bounds = Mapping[TopicPartition, tuple[int, int]]


class Trim:
    """Deletes finished records during one term of office.

    Args:
        config: The configuration.
        transport: The cluster.
        admin: Deletes.
        clock: Unix time in milliseconds.
        control: What of the control topic holds.
    """

    def __init__(self, config: Config, transport: Transport, admin: Admin, clock: Callable[[], int], control: ControlLog) -> None:
        self._transport, self._admin, self._clock, self._log = transport, admin, clock, control
        self._topics = Topics(config.kafka.topic_prefix)
        self._interval_s = config.dispatcher.trim_interval_ms / 1000
        self._retention_ms = config.dispatcher.control_retention_ms
        self._requests = (self._topics.requests("interactive"), self._topics.requests("batch"))
        self._groups = {self._topics.dispatcher_group: [*self._requests, self._topics.retries, self._topics.lanes]}
        self._groups |= {self._topics.engine_group(pool): [self._topics.engine(pool)] for pool in config.pools}
        self._control = TopicPartition(self._topics.control, 0)
        self._before: dict[TopicPartition, int] = {}  # what was committed an interval ago

    async def run(self) -> None:
        """Trim until cancelled; what fails is tried again in the next round."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.once()
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("trim_failed error=%r", error)
            except Exception:  # a fault of ours must not end the term: records that stay too long do no harm
                log.exception("trim_broken")

    async def once(self) -> None:
        """Delete what was finished an interval ago, and cancels that mean nobody any more.

        Raises:
            TransportError: The cluster did not answer; nothing wrong was deleted.
        """
        watermarks = await self._watermarks()
        reader = await self._transport.assign([self._control, *watermarks])
        try:
            bounds = await reader.bounds([self._control, *watermarks])
            await self._trim(watermarks, bounds)
            await self._trim_control(reader, watermarks, bounds)
        finally:
            await reader.close()

    # -- finished records ------------------------------------------------------------------------------------------

    async def _watermarks(self) -> dict[TopicPartition, int | None]:
        """The committed offset of every partition; None where nothing was committed yet."""
        found: dict[TopicPartition, int | None] = {}
        for group, topics in self._groups.items():
            partitions = [
                TopicPartition(topic, number)
                for topic in topics
                for number in range(await self._admin.partitions(topic) or 0)  # a pool's topic may still be to be made
            ]
            if not partitions:
                continue
            consumer = await self._transport.assign(partitions, group)
            try:
                for tp in partitions:
                    committed = await consumer.committed(tp)
                    found[tp] = committed.offset if committed else None
            finally:
                await consumer.close()
        return found

    async def _trim(self, watermarks: Mapping[TopicPartition, int | None], bounds: Bounds) -> None:
        now = {tp: offset for tp, offset in watermarks.items() if offset is not None}
        settled = {tp: min(offset, self._before[tp]) for tp, offset in now.items() if tp in self._before}
        self._before = now
        cut = {tp: offset for tp, offset in settled.items() if bounds[tp][0] < offset}
        if cut:
            await self._admin.trim(cut)
            log.info("trimmed partitions=%d offsets=%d", len(cut), sum(offset - bounds[tp][0] for tp, offset in cut.items()))

    # -- cancels -------------------------------------------------------------------------------------------------------

    async def _trim_control(self, reader: Consumer, watermarks: Mapping[TopicPartition, int | None], bounds: Bounds) -> None:
        limit_ms = self._clock() - self._retention_ms
        if await self._before_time(reader, bounds, limit_ms) is None:
            if self._log.settings is not None and self._log.settings.are_many:
                await self._keep_settings(bounds[self._control][0])
            return  # the usual case: nothing is old enough, whatever the backlog
        oldest_ms = await self._oldest_ms(reader, watermarks, bounds)
        if oldest_ms is not None:
            limit_ms = min(limit_ms, oldest_ms - self._retention_ms)
        before = await self._before_time(reader, bounds, limit_ms, READ_RECORDS_MAX)
        if before is not None and await self._keep_settings(before):
            await self._admin.trim({self._control: before})
            log.info("control_trimmed offset=%d", before)

    async def _keep_settings(self, before: int) -> bool:
        """Write all settings anew where the records below an offset hold some; whether these may be deleted then."""
        control, settings = self._log, self._log.settings
        if settings is None or not control.is_whole or control.position < before:
            log.info("control_not_trimmed reason=not_read_so_far position=%d offset=%d", control.position, before)
            return False
        if not settings.must_be_kept(before) and not settings.are_many:
            return True
        value = encode_control(settings.kept(control.position))
        producer = await self._transport.producer()
        try:
            _, offset = await (await producer.send(Outgoing(self._control.topic, value, value, partition=0)))
        finally:
            await producer.close()
        log.info("settings_kept offset=%d settings=%d", offset, len(settings))
        return True

    async def _before_time(self, reader: Consumer, bounds: Bounds, limit_ms: int, records_max: int = 1) -> int | None:
        """The offset below which every control record is older than that, looking at so many; None where none is."""
        before = None
        async for record in _read(reader, self._control, *bounds[self._control], records_max):
            if record.timestamp_ms >= limit_ms:
                break
            before = record.offset + 1
        return before

    async def _oldest_ms(self, reader: Consumer, watermarks: Mapping[TopicPartition, int | None], bounds: Bounds) -> int | None:
        """When the oldest request that may be unfinished was received; None where there is none.

        Request topics are in the order of time, so their first record tells. Retries, lanes and engine topics are not (a
        retry keeps its age, and a lane takes from several partitions), and so all that lies above the watermark is read;
        there is little of it, but for a lane whose tenant is far behind: then cancels are kept until it is not.

        Raises:
            TransportError: There is too much to read, or it does not come: nobody knows.
        """
        oldest_ms: int | None = None
        records = size = 0
        starts = {tp: bounds[tp][0] if offset is None else max(bounds[tp][0], offset) for tp, offset in watermarks.items()}
        if sum(bounds[tp][1] - start for tp, start in starts.items() if tp.topic == self._topics.lanes) > READ_RECORDS_MAX:
            log.info("control_kept reason=long_lanes")
            return 0
        for tp, start in starts.items():
            end = bounds[tp][1]
            is_request = tp.topic in self._requests
            async for record in _read(reader, tp, start, end, 1 if is_request else None):
                age_ms = record.timestamp_ms if is_request else _received_at_ms(record)
                oldest_ms = age_ms if oldest_ms is None else min(oldest_ms, age_ms)
                records, size = records + 1, size + len(record.value or b"")
                if records > READ_RECORDS_MAX or size > READ_BYTES_MAX:
                    message = f"more than {READ_RECORDS_MAX} records or {READ_BYTES_MAX} bytes are unfinished: cancels are kept"
                    raise TransportError(message)
        return oldest_ms


async def _read(
    reader: Consumer, tp: TopicPartition, start: int, end: int, records_max: int | None = None
) -> AsyncIterator[Record]:
    """Give the records of a partition between two offsets, at most so many.

    Raises:
        TransportError: They do not come in time.
    """
    loop = asyncio.get_running_loop()
    until, count = loop.time() + READ_S, 0
    if start >= end:
        return
    reader.seek(tp, start)
    while (reader.position(tp) or start) < end:
        if loop.time() > until:
            message = f"{tp.topic}/{tp.partition}: offsets {start} to {end} were not read within {READ_S:g} s"
            raise TransportError(message)
        for record in await reader.poll([tp], min(BATCH, records_max or BATCH), POLL_MS):
            if record.offset >= end:
                return
            yield record
            count += 1
            if count == records_max:
                return


def _received_at_ms(record: Record) -> int:
    """When the client produced the request, as its envelope says; where that is broken, when this record was written."""
    try:
        return codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE)).received_at_ms
    except InvalidMessage:
        return record.timestamp_ms
