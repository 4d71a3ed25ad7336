"""What a term knows of its lanes: whose each is, read back from Kafka at the beginning, and how far each has been read.

A lane belongs to the owner of its first unfinished record. Nothing may write to lanes while that is looked for, so first
every partition is taken over, which fences whoever had it before; until it is known, no record is begun.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from broker.transport.errors import TransportError
from broker.transport.hop import Hop
from broker.transport.ledger import Ledger
from broker.transport.protocol import Consumer, Record, TopicPartition, Transport
from dispatcher.core import LaneRead, LaneSeen
from schemas import codecs, headers
from schemas.errors import InvalidMessage
from schemas.messages import ServiceClass

log = logging.getLogger("forebay.dispatcher")

FENCE_S = 20.0  # a partition that cannot be taken over for so long keeps the others waiting no longer
READ_S = 10.0
PAUSE_S = 0.5
POLL_MS = 200
BATCH = 500


class LaneWatch:
    """Tells the machine of its lanes, during one term; `run` alone looks at them.

    Args:
        transport: The cluster.
        hop: That of the term.
        topic: The lanes' topic.
        tell: Takes what was found.

    Attributes:
        is_open: Whether records may be begun.
    """

    def __init__(self, transport: Transport, hop: Hop, topic: str, tell: Callable[[LaneSeen | LaneRead], None]) -> None:
        self._transport, self._hop, self._topic, self._tell = transport, hop, topic, tell
        self._known: list[TopicPartition] = []
        self._moved = asyncio.Event()
        self.is_open = False

    def moved(self) -> None:
        """The partitions in hand are others now, or one was taken over."""
        self._moved.set()

    async def run(self) -> None:
        """Look at each lane once, also at those that are added, until cancelled."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            lanes = [tp for tp in self._hop.partitions if tp.topic == self._topic and tp not in self._known]
            if not lanes:
                continue
            try:
                await self._until_taken_over()
                found = await look(self._transport, self._hop.group, lanes)
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("lanes_unknown error=%r", error)
                await asyncio.sleep(PAUSE_S)
                self._moved.set()
                continue
            except Exception as error:  # a fault of ours: nothing would ever be begun
                log.exception("lanes_broken")
                self._hop.fail(error)
                return
            for seen in found:
                self._tell(seen)
            log.info("lanes_known lanes=%d taken=%d", len(found), sum(seen.owner is not None for seen in found))
            self._known += lanes
            self.is_open = True
            self._hop.freed()

    def tell_read(self) -> None:
        """Tell how far the lanes are done of which nothing is in hand."""
        for tp in self._known:
            position = self._hop.idle_position(tp)
            if position is not None:
                self._tell(LaneRead(tp.partition, position))

    async def _until_taken_over(self) -> None:
        try:
            async with asyncio.timeout(FENCE_S):
                while self._closed():
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            log.warning("not_taken_over partitions=%d action=go_on", len(self._closed()))

    def _closed(self) -> list[TopicPartition]:
        opened = self._hop.positions()
        return [tp for tp in self._hop.partitions if tp not in opened]


async def look(transport: Transport, group: str, lanes: Sequence[TopicPartition]) -> list[LaneSeen]:
    """Find the first unfinished record of each lane.

    Args:
        transport: The cluster.
        group: Whose positions tell what is finished.
        lanes: The lanes to look at.

    Raises:
        TransportError: The cluster did not answer, or not in time.
    """
    consumer = await transport.assign(lanes, group)
    try:
        async with asyncio.timeout(READ_S):
            return await _look(consumer, lanes)
    except TimeoutError:
        message = f"the lanes of {group} were not read within {READ_S:g} s"
        raise TransportError(message) from None
    finally:
        await consumer.close()


async def _look(consumer: Consumer, lanes: Sequence[TopicPartition]) -> list[LaneSeen]:
    bounds = await consumer.bounds(lanes)
    ledgers: dict[TopicPartition, Ledger] = {}
    for tp in lanes:
        first, _ = bounds[tp]
        ledgers[tp] = Ledger(await consumer.committed(tp), first)
        consumer.seek(tp, max(ledgers[tp].position, first))
    found: dict[TopicPartition, LaneSeen] = {}
    while True:
        for tp in lanes:
            end = bounds[tp][1]
            if tp not in found and (consumer.position(tp) or 0) >= end:
                found[tp] = LaneSeen(tp.partition, None, end, end)
        left = [tp for tp in lanes if tp not in found]
        if not left:
            return [found[tp] for tp in lanes]
        for record in await consumer.poll(left, BATCH, POLL_MS):
            tp = TopicPartition(record.topic, record.partition)
            owner = _owner(record)
            if tp not in found and owner is not None and not ledgers[tp].is_finished(record.offset):
                found[tp] = LaneSeen(tp.partition, owner, bounds[tp][1], record.offset)


def _owner(record: Record) -> tuple[ServiceClass, str] | None:
    """Whose a record is; None where nobody can read that, which is told when it is served."""
    try:
        envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
    except InvalidMessage:
        return None
    return envelope.service_class, envelope.tenant
