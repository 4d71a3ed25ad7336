"""The consumer over aiokafka.

What it does beyond calling the library:

* A partition is read only after `seek`: aiokafka would go to the committed offset by itself after every rebalance.
* A poll never waits for a rebalance, serves the partitions named in turn, and counts as a sign of life for the library
  even when it names none.
* Whatever has no place in the consumer's own connection (heartbeats we ask for, offsets, bounds) goes over `Control`,
  where it does not wait behind a fetch or a join.
* When the library's coordination or fetch task has died, a new consumer is built under the same listener.
* Each consumer has its own subclass of the sticky assignor, whose memory lies on the class, and tells it the
  generation, which the library forgets; otherwise partitions move that need not.
"""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.consumer.fetcher import FetchResult
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError, OffsetOutOfRangeError
from aiokafka.structs import TopicPartition as KafkaPartition

from broker.transport.errors import OffsetGone, TransportError
from broker.transport.kafka.control import NO_MEMBER, Control
from broker.transport.kafka.link import bootstrap, client_settings, deadline, let_go, translate
from broker.transport.protocol import AssignmentListener, Committed, Membership, Record, TopicPartition
from broker.transport.turns import take_in_turn
from schemas.config import KafkaConfig

log = logging.getLogger("forebay.kafka")

FETCH_WAIT_MS = 100  # how long an empty fetch is held; a partition that starts to be read waits for it
FETCHES_HELD = 4  # largest records that one fetch may bring from a broker, over all its partitions
REJOIN_S = 0.5
CLOSE_S = 3.0
COMMIT_RETRY_S = 0.02


class KafkaConsumer:
    """Reads as a member of a group, or with partitions assigned by hand."""

    def __init__(self, config: KafkaConfig, control: Control, group: str | None, client_id: str) -> None:
        self._config, self._control, self._group, self._client_id = config, control, group, client_id
        self._topics: tuple[str, ...] = ()
        self._by_hand: tuple[TopicPartition, ...] = ()
        self._listener: _Listener | None = None
        self._inner: AIOKafkaConsumer | None = None
        self._rejoining: asyncio.Task[None] | None = None
        self._turn = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    # -- how it starts ------------------------------------------------------------------------------------------

    async def join(self, topics: Sequence[str], listener: AssignmentListener) -> None:
        """Become a member of the group; the topics exist."""
        self._topics = tuple(topics)
        self._listener = _Listener(listener)
        self._inner = await self._joined(self._listener)

    async def take(self, partitions: Sequence[TopicPartition]) -> None:
        """Have partitions assigned by hand; their topics exist."""
        self._by_hand = tuple(partitions)
        self._inner = await self._taken()

    # -- Consumer -------------------------------------------------------------------------------------------------

    async def poll(
        self, partitions: Sequence[TopicPartition], records_max: int, timeout_ms: int, each_max: int | None = None
    ) -> list[Record]:
        """See the protocol."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        named = list(dict.fromkeys(partitions))
        self._turn += 1
        waited = False
        while True:
            self._must_be_open()
            records = self._collect(named, records_max, each_max)
            left_s = until - loop.time()
            if records or left_s <= 0:
                if not waited:
                    await asyncio.sleep(0)  # a reader that always finds something must not starve the others
                return records
            waited = True
            await self._until_fetched(left_s)

    def seek(self, partition: TopicPartition, offset: int) -> bool:
        """See the protocol."""
        inner = self._inner
        if inner is None or self._closed or not inner._subscription.is_assigned(partition):
            return False
        inner.seek(KafkaPartition(*partition), offset)
        inner.resume(KafkaPartition(*partition))
        return True

    def position(self, partition: TopicPartition) -> int | None:
        """See the protocol."""
        state = None if self._inner is None else _state(self._inner, partition)
        return None if state is None or state.paused or not state.has_valid_position else int(state.position)

    async def committed(self, partition: TopicPartition) -> Committed | None:
        """See the protocol."""
        if self._group is None:
            message = "this consumer names no group whose committed positions it could read"
            raise TransportError(message)
        return await self._control.fetch_committed(self._group, partition)

    async def still_member(self) -> bool:
        """See the protocol."""
        if self._listener is None or self._group is None:
            return True
        membership = self._membership()
        return membership is not None and await self._control.knows(self._group, membership)

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """See the protocol."""
        return await self._control.bounds(partitions)

    async def close(self) -> None:
        """See the protocol."""
        if self._closed:
            return
        self._closed = True
        if self._rejoining is not None:
            self._rejoining.cancel()
            await asyncio.wait([self._rejoining])
        membership = self._membership()
        inner, self._inner = self._inner, None
        if inner is None:
            return
        if self._group is not None and membership is not None and inner._subscription.reassignment_in_progress:
            with contextlib.suppress(TransportError):  # else its session ends by itself
                await self._control.leave(self._group, membership)
        await _stop(inner)

    # -- what an outbox without transactions needs -------------------------------------------------------------------

    async def commit(self, partition: TopicPartition, position: Committed) -> None:
        """Commit a position for the group; waits out a rebalance while the partition stays ours.

        Raises:
            TransportError: The partition is not ours any more, or the outcome is unknown.
        """
        if self._group is None:
            message = "this consumer names no group to commit to"
            raise TransportError(message)
        async with deadline(self._config.request_timeout_ms, f"committing {partition.topic}/{partition.partition}"):
            while True:
                membership = NO_MEMBER if self._listener is None else self._membership()
                inner = self._inner
                if membership is None or inner is None or not inner._subscription.is_assigned(partition):
                    message = f"{partition.topic}/{partition.partition} is not ours to commit in group {self._group} any more"
                    raise TransportError(message)
                if await self._control.commit(self._group, partition, position, membership):
                    return
                await asyncio.sleep(COMMIT_RETRY_S)

    # -- inside: reading ---------------------------------------------------------------------------------------------

    def _collect(self, named: Sequence[TopicPartition], records_max: int, each_max: int | None) -> list[Record]:
        """Take what was fetched; nothing while the assignment is in the balance."""
        inner = self._inner
        if inner is None or self._rejoining is not None:
            return []
        subscription = inner._subscription
        with subscription.fetch_context():  # the sign of life, without which the library leaves the group
            pass
        if self._is_broken(inner):
            self._rejoining = asyncio.ensure_future(self._rejoin(inner))
            return []
        if self._listener is not None:
            self._listener.must_be_well()
        try:
            inner._coordinator.check_errors()
        except KafkaError as error:
            raise translate(error, f"reading as a member of {self._group}") from error
        if subscription.reassignment_in_progress:
            return []
        return take_in_turn(named, self._turn, records_max, lambda tp, most: _take(inner, tp, most), each_max)

    async def _until_fetched(self, limit_s: float) -> None:
        """Wait until something was fetched, or for the limit."""
        inner = self._inner
        if self._rejoining is not None:
            await asyncio.wait([self._rejoining], timeout=limit_s)
            return
        if inner is None or inner._subscription.reassignment_in_progress:
            await asyncio.sleep(min(limit_s, 0.01))
            return
        waiter = inner._fetcher._create_fetch_waiter()
        try:
            await asyncio.wait([waiter], timeout=limit_s)
        finally:
            if not waiter.done():
                waiter.cancel()
            elif not waiter.cancelled():
                waiter.exception()  # the coordinator's check tells it

    def _must_be_open(self) -> None:
        if self._closed:
            message = "the consumer is closed"
            raise TransportError(message)

    def _membership(self) -> Membership | None:
        if self._listener is None or self._inner is None:
            return None
        coordinator = self._inner._coordinator
        if not coordinator.member_id or coordinator.generation < 0:
            return None
        return Membership(coordinator.member_id, coordinator.generation)

    # -- inside: the library's consumer ------------------------------------------------------------------------------

    def _make(self, **settings: Any) -> AIOKafkaConsumer:  # noqa: ANN401 - passed on
        config = self._config
        return AIOKafkaConsumer(
            **client_settings(config),
            client_id=self._client_id,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="none",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_max_bytes=FETCHES_HELD * config.record_bytes_max,
            max_partition_fetch_bytes=config.record_bytes_max,
            max_poll_interval_ms=config.max_poll_interval_ms,
            session_timeout_ms=config.session_timeout_ms,
            heartbeat_interval_ms=config.heartbeat_ms,
            rebalance_timeout_ms=config.rebalance_timeout_ms,
            **settings,
        )

    async def _started(self, inner: AIOKafkaConsumer) -> AIOKafkaConsumer:
        try:
            await bootstrap(inner._client, self._config)
            async with deadline(self._config.request_timeout_ms, "starting a consumer"):
                await inner.start()
                # Known before the join, else the first assignment is empty; known only after the start, which forgets.
                await inner._client.set_topics({*self._topics, *(tp.topic for tp in self._by_hand)})
                await inner._client.force_metadata_update()
        except BaseException:
            await _stop(inner)
            raise
        return inner

    async def _joined(self, listener: "_Listener") -> AIOKafkaConsumer:
        sticky = type("Sticky", (StickyPartitionAssignor,), {})
        inner = await self._started(self._make(group_id=self._group, partition_assignment_strategy=(sticky,)))
        listener.serve(inner, sticky)
        inner.subscribe(self._topics, listener=listener)
        return inner

    async def _taken(self) -> AIOKafkaConsumer:
        inner = self._make()
        inner.assign([KafkaPartition(*tp) for tp in self._by_hand])
        _hold(inner, self._by_hand)
        return await self._started(inner)

    def _is_broken(self, inner: AIOKafkaConsumer) -> bool:
        coordinating = getattr(inner._coordinator, "_coordination_task", None)
        return bool(inner._fetcher._fetch_task.done() or (coordinating is not None and coordinating.done()))

    async def _rejoin(self, broken: AIOKafkaConsumer) -> None:
        """Replace a consumer that has died, as often as it takes."""
        log.error("consumer_died group=%s action=rejoin", self._group)
        positions = {tp: s.position for tp in self._by_hand if (s := _state(broken, tp)) is not None and not s.paused}
        if self._listener is not None:
            self._listener.on_partitions_revoked(broken.assignment())
        self._inner = None
        await _stop(broken)
        while self._inner is None:
            try:
                self._inner = await (self._taken() if self._listener is None else self._joined(self._listener))
            except TransportError as error:
                log.warning("rejoin_failed group=%s error=%s", self._group, error)
                await asyncio.sleep(REJOIN_S)
        self._rejoining = None
        for tp, position in positions.items():
            self.seek(tp, position)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    """Passes assignments on, and keeps what the listener raises: the library would only log it."""

    def __init__(self, listener: AssignmentListener) -> None:
        self._listener = listener
        self._inner: AIOKafkaConsumer | None = None
        self._sticky: type[StickyPartitionAssignor] = StickyPartitionAssignor
        self._failure: Exception | None = None

    def serve(self, inner: AIOKafkaConsumer, sticky: type[StickyPartitionAssignor]) -> None:
        """Work for a (new) consumer of the library."""
        self._inner, self._sticky = inner, sticky

    def must_be_well(self) -> None:
        """Raise what the listener raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def on_partitions_revoked(self, revoked: set[KafkaPartition]) -> None:
        """Called by the library when a rebalance begins, the first join included."""
        try:
            if revoked:
                self._listener.revoked(sorted(TopicPartition(*tp) for tp in revoked))
        except Exception as error:  # noqa: BLE001 - raised by the next poll
            self._failure = error

    def on_partitions_assigned(self, assigned: set[KafkaPartition]) -> None:
        """Called by the library with the whole new assignment."""
        inner = self._inner
        if inner is None:
            return
        try:
            partitions = sorted(TopicPartition(*tp) for tp in assigned)
            _hold(inner, partitions)
            coordinator = inner._coordinator
            self._sticky.on_generation_assignment(coordinator.generation)
            self._listener.assigned(partitions, Membership(coordinator.member_id, coordinator.generation))
        except Exception as error:  # noqa: BLE001 - raised by the next poll
            self._failure = error


def _hold(inner: AIOKafkaConsumer, partitions: Sequence[TopicPartition]) -> None:
    """Give partitions a position, so that the library does not look for one, and pause them until `seek`."""
    for tp in partitions:
        inner._subscription.seek(KafkaPartition(*tp), 0)
        inner._subscription.pause(KafkaPartition(*tp))


def _state(inner: AIOKafkaConsumer, tp: TopicPartition) -> Any:  # noqa: ANN401 - the library has no types
    subscription = inner._subscription.subscription
    return None if subscription is None or subscription.assignment is None else subscription.assignment.state_value(tp)


def _take(inner: AIOKafkaConsumer, tp: TopicPartition, records_max: int) -> list[Record]:
    """Take up to so many fetched records of a partition, as `getmany` does for all of them at once.

    Raises:
        OffsetGone: The position lies outside of what the partition holds.
        TransportError: What was fetched cannot be used; it is fetched again.
    """
    fetcher = inner._fetcher
    fetched = fetcher._records.get(tp)
    if fetched is None:
        return []
    try:
        if type(fetched) is not FetchResult:
            fetched.check_raise()
        found = fetched.getall(records_max)
        more = fetched.has_more()
    except OffsetOutOfRangeError as error:
        _fetch_again(fetcher, tp)
        state = _state(inner, tp)
        message = f"{tp.topic}/{tp.partition}: nothing lies at position {state.position if state else '?'} any more"
        raise OffsetGone(message) from error
    except KafkaError as error:
        _fetch_again(fetcher, tp)
        raise translate(error, f"reading {tp.topic}/{tp.partition}") from error
    if not more:
        _fetch_again(fetcher, tp)
    topic, partition = tp
    return [Record(topic, partition, r.offset, r.key, r.value, r.headers, r.timestamp) for r in found]


def _fetch_again(fetcher: Any, tp: TopicPartition) -> None:  # noqa: ANN401
    del fetcher._records[tp]
    fetcher._notify(fetcher._wait_consume_future)


async def _stop(inner: AIOKafkaConsumer) -> None:
    def tasks() -> list[asyncio.Future[Any] | None]:
        coordinator, fetcher = inner._coordinator, inner._fetcher
        names = ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task")
        pending = list(fetcher._pending_tasks) if fetcher is not None else []
        return [
            *(getattr(coordinator, name, None) for name in names),
            getattr(fetcher, "_fetch_task", None),
            *pending,
        ]

    await let_go("consumer", inner.stop, inner._client, tasks, CLOSE_S)
