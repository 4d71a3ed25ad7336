"""Deleting records on a broker that cannot at the moment, and on one that never can."""

import asyncio

import pytest
from aiokafka.errors import KafkaConnectionError

from broker.transport.errors import TransportError
from broker.transport.kafka.admin import KafkaAdmin
from broker.transport.protocol import TopicPartition
from schemas.config import KafkaConfig

TP = TopicPartition("t", 0)


class Broker:
    """Both what knows the bounds and what deletes; the first deletion fails."""

    def __init__(self):
        self.asked = []

    async def bounds(self, partitions):
        return dict.fromkeys(partitions, (0, 10))

    async def delete_records(self, wanted):
        self.asked.append({tuple(tp): records.before_offset for tp, records in wanted.items()})
        if len(self.asked) == 1:
            raise KafkaConnectionError


def admin_of(delivery):
    broker = Broker()
    admin = KafkaAdmin(KafkaConfig(delivery=delivery), broker)
    admin._inner = broker
    return admin, broker


def test_a_broker_that_has_transactions_is_asked_again():
    async def main():
        admin, broker = admin_of("exactly_once")
        with pytest.raises(TransportError, match="deleting records"):
            await admin.trim({TP: 4})
        await admin.trim({TP: 5})
        assert broker.asked == [{("t", 0): 4}, {("t", 0): 5}]

    asyncio.run(main())


def test_another_is_not():
    async def main():
        admin, broker = admin_of("at_least_once")
        await admin.trim({TP: 4})
        await admin.trim({TP: 5})
        assert broker.asked == [{("t", 0): 4}]

    asyncio.run(main())
