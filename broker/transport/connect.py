"""The way to a cluster: the aiokafka adapter, imported only when somebody connects."""

from broker.transport.protocol import Transport
from schemas.config import KafkaConfig


def connect(config: KafkaConfig) -> Transport:
    """Make the transport of the configured cluster; nothing is reached before its first call."""
    from broker.transport.kafka import KafkaTransport  # noqa: PLC0415 - `import broker` stays quick without it

    return KafkaTransport(config)
