"""Kafka through aiokafka, with its faults dealt with."""

from broker.transport.kafka.transport import KafkaTransport

__all__ = ["KafkaTransport"]
