"""The one line for a cluster that does not answer."""

from broker.transport.errors import Unreachable
from schemas.config import KafkaConfig


def unreachable(config: KafkaConfig, reason: str = "") -> Unreachable:
    """Say which address was tried, for how long, and what to do."""
    told = f" ({reason})" if reason else ""
    return Unreachable(
        f"cannot reach Kafka at {config.bootstrap} within {config.connect_timeout_ms / 1000:g} s{told}: start it with "
        "`forebay local up`, or set kafka.bootstrap in forebay.toml / FOREBAY_KAFKA__BOOTSTRAP"
    )
