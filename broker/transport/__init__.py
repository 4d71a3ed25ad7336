"""The seam to Kafka. The adapters are `broker.transport.kafka` and `broker.transport.memory`, imported where one is chosen."""

from broker.transport.errors import Fenced, NoSuchTopic, OffsetGone, TooLarge, TransportError, Unreachable
from broker.transport.protocol import (
    Admin,
    AssignmentListener,
    Committed,
    Consumer,
    Membership,
    Outbox,
    Outgoing,
    Producer,
    Record,
    TopicPartition,
    Transport,
)

__all__ = [
    "Admin",
    "AssignmentListener",
    "Committed",
    "Consumer",
    "Fenced",
    "Membership",
    "NoSuchTopic",
    "OffsetGone",
    "Outbox",
    "Outgoing",
    "Producer",
    "Record",
    "TooLarge",
    "TopicPartition",
    "Transport",
    "TransportError",
    "Unreachable",
]
