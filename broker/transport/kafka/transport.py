"""The Kafka transport: a cluster at an address."""

from collections.abc import Sequence

from broker.transport.errors import NoSuchTopic
from broker.transport.kafka.admin import KafkaAdmin
from broker.transport.kafka.consumer import KafkaConsumer
from broker.transport.kafka.control import Control
from broker.transport.kafka.noise import quieten
from broker.transport.kafka.outbox import PlainOutbox, TransactionalOutbox
from broker.transport.kafka.producer import KafkaProducer, SharedProducer
from broker.transport.protocol import AssignmentListener, Consumer, Outbox, TopicPartition
from schemas.config import KafkaConfig

_Opened = KafkaConsumer | TransactionalOutbox | PlainOutbox | KafkaProducer | KafkaAdmin


class KafkaTransport:
    """Where consumers, outboxes and producers of one cluster come from.

    Args:
        config: Address, security, time-outs; `delivery` says whether commits are transactions.
    """

    def __init__(self, config: KafkaConfig) -> None:
        quieten()
        self._config = config
        self.transactional = config.delivery == "exactly_once"
        self._control = Control(config)
        self._shared = SharedProducer(config, self._control)
        self._opened: list[_Opened] = []

    async def subscribe(self, topics: Sequence[str], group: str, listener: AssignmentListener, client_id: str) -> Consumer:
        """See the protocol."""
        await self._must_exist(topics)
        consumer = KafkaConsumer(self._config, self._control, group, client_id)
        self._keep(consumer)
        await consumer.join(topics, listener)
        return consumer

    async def assign(self, partitions: Sequence[TopicPartition], group: str | None = None) -> Consumer:
        """See the protocol."""
        await self._must_exist(sorted({tp.topic for tp in partitions}))
        consumer = KafkaConsumer(self._config, self._control, group, f"forebay-{group or 'reader'}")
        self._keep(consumer)
        await consumer.take(partitions)
        return consumer

    def outbox(self, group: str, source: TopicPartition, consumer: Consumer) -> Outbox:
        """See the protocol."""
        if not isinstance(consumer, KafkaConsumer):
            message = f"the consumer {consumer!r} is of another transport"
            raise TypeError(message)
        outbox: TransactionalOutbox | PlainOutbox
        if self.transactional:
            outbox = TransactionalOutbox(self._config, self._control, group, source)
        else:
            outbox = PlainOutbox(self._config, self._shared, source, consumer)
        self._keep(outbox)
        return outbox

    async def producer(self) -> KafkaProducer:
        """See the protocol."""
        await self._shared.writer()
        producer = KafkaProducer(self._config, self._shared)
        self._keep(producer)
        return producer

    async def admin(self) -> KafkaAdmin:
        """See the protocol."""
        admin = KafkaAdmin(self._config, self._control)
        self._keep(admin)
        await admin.start()
        return admin

    async def check(self) -> None:
        """See the protocol."""
        await self._control.client()

    async def close(self) -> None:
        """See the protocol."""
        for opened in self._opened:
            await opened.close()
        self._opened.clear()
        await self._shared.close()
        await self._control.close()

    def _keep(self, opened: _Opened) -> None:
        self._opened = [*(known for known in self._opened if not known.is_closed), opened]

    async def _must_exist(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if await self._control.partitions(topic) is None:
                message = f"topic {topic} does not exist: make it with `forebay topics ensure`"
                raise NoSuchTopic(message)
