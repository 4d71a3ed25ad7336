"""Rescue: the unfinished requests of a pool that no worker serves go back to the dispatcher.

A pool is dead once its consumer group has had no member at all for `dispatcher.failover_timeout_ms`: a group gives all
partitions to whoever is a member, so nobody owns any then. The group alone says so: a worker that Redis knows nothing of
may live, and a group that rebalances or does not answer is unknown, not dead.

The partitions are taken by hand under their own transactional ids, through the same `Hop` as everywhere. So a worker
that appears takes over from the rescuer as from any owner before it: it fences, and finds finished what was committed.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from broker.transport.errors import OffsetGone, TransportError
from broker.transport.handler import Place, Work
from broker.transport.hop import Hop
from broker.transport.ledger import Inherited
from broker.transport.outputs import Outputs
from broker.transport.protocol import Admin, Record, TopicPartition, Transport
from broker.transport.suspicion import crashes_of
from broker.transport.tasks import CLEAN_UP_S, end
from schemas import codecs, headers
from schemas.config import Config, HopConfig
from schemas.errors import InvalidMessage
from schemas.messages import ErrorInfo
from schemas.topics import Topics

log = logging.getLogger("forebay.rescue")

LOOKS = 15  # at a group, within the failover time-out


class Rescue:
    """Watches the pools during one term of office; one task, and at most one hop, for each.

    Args:
        config: The configuration.
        transport: The cluster.
        admin: Asked who is a member.
        still_leader: Asked before anybody is fenced.
    """

    def __init__(self, config: Config, transport: Transport, admin: Admin, still_leader: Callable[[], Awaitable[bool]]) -> None:
        self._pools = [_Pool(config, transport, admin, still_leader, pool) for pool in config.pools]

    async def run(self) -> None:
        """Watch until cancelled; a rescue that goes on then commits what it has and lets go."""
        await asyncio.gather(*(pool.watch() for pool in self._pools))


class _Pool:
    """Watches one pool and moves its requests when it is dead."""

    def __init__(
        self, config: Config, transport: Transport, admin: Admin, still_leader: Callable[[], Awaitable[bool]], pool: str
    ) -> None:
        self._transport, self._admin, self._still_leader, self._name = transport, admin, still_leader, pool
        self._topics = Topics(config.kafka.topic_prefix)
        self._topic, self._group = self._topics.engine(pool), self._topics.engine_group(pool)
        self._outputs = Outputs(self._topics, config.topics.result_partitions, config.kafka.record_bytes_max)
        self._hop_config = config.dispatcher.hop
        self._patience_s = config.dispatcher.failover_timeout_ms / 1000
        self._look_s = self._patience_s / LOOKS
        self._empty: dict[TopicPartition, int] = {}  # the end up to which nothing is unfinished, markers included
        self._unknown = False

    async def watch(self) -> None:
        """Look at the group again and again; the pool is dead when it was seen without a member for long enough."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            await asyncio.sleep(self._look_s)
            if await self._has_members() is not False:
                since = None
                continue
            since = loop.time() if since is None else since
            if loop.time() - since < self._patience_s:
                continue
            try:
                await self._rescue()
            except OffsetGone as error:  # the records are lost for a worker too; other pools have theirs
                log.critical("offset_gone pool=%s error=%s", self._name, error)
                return
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("rescue_interrupted pool=%s error=%r", self._name, error)
            except Exception:  # a fault of ours must not end the watch over this pool
                log.exception("rescue_broken pool=%s", self._name)
            else:
                since = loop.time()  # what is sent there nevertheless is found after the same time

    async def _has_members(self) -> bool | None:
        """Ask the group; None where nobody knows."""
        try:
            members = await self._admin.members(self._group)
        except (TransportError, TimeoutError, OSError) as error:
            if not self._unknown:
                log.warning("group_unknown group=%s error=%r", self._group, error)
            self._unknown = True
            return None
        self._unknown = False
        return bool(members)

    async def _rescue(self) -> None:
        partitions = await self._unfinished()
        if not partitions:
            return
        names = ",".join(str(tp.partition) for tp in partitions)
        log.warning("pool_dead pool=%s partitions=%s action=rescue", self._name, names)
        rescuer = _Rescuer(self._transport, self._group, self._outputs, self._hop_config, self._still_owner)
        await rescuer.hop.assign(partitions)
        await self._run(rescuer.hop, partitions)
        log.info("rescue_ends pool=%s records=%d", self._name, rescuer.count)

    async def _run(self, hop: Hop, partitions: Sequence[TopicPartition]) -> None:
        """Serve until a member appears or nothing is left."""
        running = asyncio.ensure_future(hop.run())
        try:
            while not running.done():
                await asyncio.wait([running], timeout=self._look_s)
                if not running.done() and (await self._has_members() or await self._is_served(hop, partitions)):
                    hop.stop()
                    break
            await running
        finally:
            await end(running, again_s=CLEAN_UP_S)

    async def _still_owner(self) -> bool:
        """Whether the pool's partitions are still ours to take: whoever became a member has them."""
        return await self._still_leader() and not await self._admin.members(self._group)

    async def _unfinished(self) -> list[TopicPartition]:
        """The partitions that may hold unfinished records; none where the topic is still to be made."""
        count = await self._admin.partitions(self._topic)
        partitions = [TopicPartition(self._topic, number) for number in range(count or 0)]
        if not partitions:
            return []
        consumer = await self._transport.assign(partitions, self._group)
        try:
            bounds = await consumer.bounds(partitions)
            found = []
            for tp in partitions:
                committed = await consumer.committed(tp)
                first, end = bounds[tp]
                if (committed.offset if committed else first) < end != self._empty.get(tp):
                    found.append(tp)
        finally:
            await consumer.close()
        return found

    async def _is_served(self, hop: Hop, partitions: Sequence[TopicPartition]) -> bool:
        """Whether everything up to the end was read and committed, gaps included."""
        try:
            bounds = await hop.consumer.bounds(partitions)
        except (TransportError, TimeoutError, OSError) as error:
            log.warning("bounds_unknown group=%s error=%r", self._group, error)
            return False
        opened = hop.positions()
        ends = {tp: end for tp, (_, end) in bounds.items()}
        if hop.used or any(tp not in opened or (hop.consumer.position(tp) or 0) < end for tp, end in ends.items()):
            return False
        self._empty |= ends
        return True


class _Rescuer:
    """The handler of one rescue: each record goes to the retries at once, one hop on and otherwise as it is.

    How often it was in hand when a worker died goes with it: what kills workers is to be found in whatever pool.

    Args:
        transport: The cluster.
        group: The dead pool's.
        outputs: Makes the records.
        config: The hop's bounds.
        still_owner: Asked before anybody is fenced again.
    """

    def __init__(
        self, transport: Transport, group: str, outputs: Outputs, config: HopConfig, still_owner: Callable[[], Awaitable[bool]]
    ) -> None:
        self._outputs, self._room = outputs, config.in_flight_max
        self.hop = Hop(transport, group, self, config, still_owner=still_owner)
        self.count = 0

    def room(self) -> int:
        """Nothing is held here: the hop's own bounds are all."""
        return self._room

    def takes(self, partition: TopicPartition) -> bool:  # noqa: ARG002 - no partition is unlike another
        """Whatever lies there is to be moved."""
        return True

    def claim(self, record: Record, inherited: Inherited) -> None:
        """Begin at once: a record is not in anybody's hands here."""

    def noted(self, work: Work) -> None:
        """No notes are written here."""

    def start(self, record: Record, inherited: Inherited) -> None:
        """Move a record, or set it aside where nobody can read whose it is."""
        try:
            envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
        except InvalidMessage as error:
            log.warning("record_unreadable topic=%s partition=%d offset=%d reason=%s", *record[:3], error.message)
            output = self._outputs.dead_letter(record, ErrorInfo(error.code, error.message, error.param))
        else:
            moved = structs.replace(envelope, hop=envelope.hop + 1, crashes=crashes_of(envelope.crashes, inherited))
            output = self._outputs.retry(moved, record.value or b"", record.headers)
        self.hop.finish((TopicPartition(record.topic, record.partition), record.offset), [output])

    def moved(self) -> None:
        """Nobody is told where we read."""

    def flush(self) -> None:
        """Nothing waits for the end of a batch."""

    def drop(self, work: Work) -> None:
        """Nothing to forget."""

    def committed(self, work: Work, places: Sequence[Place]) -> None:  # noqa: ARG002 - all that counts is how many
        """The record waits for the dispatcher now."""
        self.count += 1
