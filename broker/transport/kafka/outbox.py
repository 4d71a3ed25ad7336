"""Outboxes: a transaction per commit, or, for `at_least_once`, a plain write and then the position."""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError
from aiokafka.producer import sender as library_sender
from aiokafka.structs import OffsetAndMetadata
from aiokafka.structs import TopicPartition as KafkaPartition

from broker.transport.errors import Fenced, TransportError
from broker.transport.kafka.batches import BATCH_BYTES, BatchWriter, Place, acknowledged
from broker.transport.kafka.consumer import KafkaConsumer
from broker.transport.kafka.control import Control
from broker.transport.kafka.link import bootstrap, client_settings, deadline, let_go_of_producer, look_at, translate
from broker.transport.kafka.producer import SharedProducer
from broker.transport.protocol import Committed, Outgoing, TopicPartition
from broker.transport.refusals import refuse_long_metadata
from schemas.config import KafkaConfig

CLOSE_S = 0.5  # nothing is queued after a commit, and what is queued after a failed one is of no use

# A transaction begun right after the last is answered "not yet"; the library then waits 20 ms, hard-coded.
library_sender.BACKOFF_OVERRIDE = 0.003


class TransactionalOutbox:
    """One transactional producer, for one input partition of one group."""

    def __init__(self, config: KafkaConfig, control: Control, group: str, source: TopicPartition) -> None:
        self._config, self._control, self._group, self._source = config, control, group, source
        self._id = f"{group}.{source.topic}.{source.partition}"
        self._producer: AIOKafkaProducer | None = None
        self._usable = self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def open(self) -> None:
        """See the protocol."""
        config = self._config
        self._producer = producer = AIOKafkaProducer(
            **client_settings(config),
            client_id=self._id,
            transactional_id=self._id,
            transaction_timeout_ms=config.transaction_timeout_ms,
            acks="all",
            linger_ms=0,
            max_batch_size=BATCH_BYTES,
            max_request_size=config.record_bytes_max,
            retry_backoff_ms=config.retry_backoff_ms,
        )
        await bootstrap(producer.client, config)
        try:
            async with deadline(config.request_timeout_ms, f"fencing transactional id {self._id}"):
                await producer._sender.start()  # `producer.start` would only connect again first
        except TransportError as error:
            if isinstance(error.__cause__, KafkaError) and not error.__cause__.retriable and not isinstance(error, Fenced):
                message = f"{error}: where the broker has no transactions, set kafka.delivery to at_least_once"
                raise TransportError(message) from error
            raise
        self._usable = True

    async def commit(self, records: Sequence[Outgoing], position: Committed) -> list[Place]:
        """See the protocol."""
        producer = self._producer
        if producer is None or not self._usable:
            message = f"the outbox {self._id} is not open: open a new one"
            raise TransportError(message)
        refuse_long_metadata(position)
        config = self._config
        writer = BatchWriter(producer, self._control, config.record_bytes_max)
        async with deadline(config.request_timeout_ms, f"preparing a commit of {self._id}"):
            batches = await writer.prepare(records)
        self._usable = False  # unless all goes well, the outcome is unknown
        try:
            async with deadline(config.request_timeout_ms + config.transaction_timeout_ms, f"committing {self._id}"):
                await producer.begin_transaction()
                producer._txn_manager.wait_for_transaction_end().add_done_callback(look_at)
                for batch in batches:
                    writer.hand_over(batch)
                # The library commits although a batch has failed, and offsets beside records on their way collide
                # with the broker's own verification: so every acknowledgement comes first.
                places = await acknowledged(batches, len(records))
                offsets = {KafkaPartition(*self._source): OffsetAndMetadata(position.offset, position.metadata)}
                await producer.send_offsets_to_transaction(offsets, self._group)
                await producer.commit_transaction()
        except TransportError as error:
            raise self._told(error) from error
        self._usable = True
        return places

    async def close(self) -> None:
        """See the protocol."""
        self._usable, self._closed = False, True
        producer, self._producer = self._producer, None
        if producer is not None:
            await let_go_of_producer(f"outbox {self._id}", producer, CLOSE_S)

    def _told(self, error: TransportError) -> TransportError:
        """After being fenced the library fails in many ways; its sender knows the first."""
        task = self._producer._sender.sender_task if self._producer is not None else None
        if not isinstance(error, Fenced) and task is not None and task.done() and not task.cancelled():
            failure = task.exception()
            told = translate(failure, f"committing {self._id}") if failure is not None else error
            if isinstance(told, Fenced):
                return told
        return error


class PlainOutbox:
    """Writes through the transport's one producer, and commits the position once everything is acknowledged."""

    def __init__(self, config: KafkaConfig, shared: SharedProducer, source: TopicPartition, consumer: KafkaConsumer) -> None:
        self._config, self._shared, self._source, self._consumer = config, shared, source, consumer
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    async def open(self) -> None:
        """See the protocol; there is nothing to fence."""
        await self._shared.writer()

    async def commit(self, records: Sequence[Outgoing], position: Committed) -> list[Place]:
        """See the protocol."""
        refuse_long_metadata(position)
        config, places = self._config, list[Place]()
        what = f"committing {self._source.topic}/{self._source.partition}"
        writer = await self._shared.writer()
        async with deadline(config.request_timeout_ms, what):
            batches = await writer.prepare(records)
            for batch in batches:
                writer.hand_over(batch)
            places = await acknowledged(batches, len(records))
        await self._consumer.commit(self._source, position)
        return places

    async def close(self) -> None:
        """See the protocol; the producer is the transport's."""
        self._closed = True
