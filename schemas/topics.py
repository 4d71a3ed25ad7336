"""Names and settings of the topics. A prefix names a cell: two cells share a cluster and nothing else."""

from dataclasses import dataclass

from schemas.config import RECORD_BYTES_MAX, TopicsConfig
from schemas.messages import ServiceClass

FOREVER = "-1"
BROKERS_TIME = {"message.timestamp.type": "LogAppendTime"}  # a cancel and the requests it takes are told apart by it


@dataclass(frozen=True)
class TopicSpec:
    """A topic as it should be: its partitions and the settings that matter."""

    name: str
    partitions: int
    settings: dict[str, str]


@dataclass(frozen=True)
class Topics:
    """The topic and group names of one cell."""

    prefix: str = "forebay"

    def requests(self, service_class: ServiceClass) -> str:
        """Where clients produce requests of a class."""
        return f"{self.prefix}.requests.{service_class}"

    def engine(self, pool: str) -> str:
        """Where the workers of a pool read."""
        return f"{self.prefix}.engine.{pool}"

    @property
    def retries(self) -> str:
        """Requests that wait for another try."""
        return f"{self.prefix}.retries"

    @property
    def lanes(self) -> str:
        """Surplus of tenants over their bound, one tenant to a partition."""
        return f"{self.prefix}.lanes"

    @property
    def results(self) -> str:
        """One terminal result per accepted request."""
        return f"{self.prefix}.results"

    @property
    def streams(self) -> str:
        """Token chunks."""
        return f"{self.prefix}.streams"

    @property
    def dead_letters(self) -> str:
        """Records that could not be served, as they came, with the reason as headers."""
        return f"{self.prefix}.dead-letters"

    @property
    def dead_letter_group(self) -> str:
        """The group of whoever puts dead letters back."""
        return f"{self.prefix}.dead-letters"

    @property
    def control(self) -> str:
        """Cancels and pauses; its one partition elects the dispatcher."""
        return f"{self.prefix}.control"

    @property
    def election_group(self) -> str:
        """The group whose member on `control` is the active dispatcher."""
        return f"{self.prefix}.dispatchers"

    @property
    def dispatcher_group(self) -> str:
        """The group that holds the dispatcher's committed offsets."""
        return f"{self.prefix}.dispatcher"

    def engine_group(self, pool: str) -> str:
        """The consumer group of a pool's workers."""
        return f"{self.prefix}.engine.{pool}"

    def is_internal(self, topic: str) -> bool:
        """Whether a topic is ours or Kafka's own, and so never a reply topic."""
        return topic.startswith((f"{self.prefix}.", "__"))

    def specs(self, config: TopicsConfig, pools: list[str], record_bytes_max: int = RECORD_BYTES_MAX) -> list[TopicSpec]:
        """List every topic of the cell, with the pools' topics, as they should exist.

        Args:
            config: Partitions and retention.
            pools: The pools, each of which has a topic.
            record_bytes_max: `kafka.record_bytes_max`; many clusters take only 1 MiB unless a topic says otherwise.
        """
        size = {"max.message.bytes": str(record_bytes_max)}
        forever = {"retention.ms": FOREVER, "retention.bytes": FOREVER, **size}
        passing = {"retention.ms": str(config.results_retention_ms), **size}
        accepted = [
            TopicSpec(self.requests("interactive"), config.request_partitions, {**forever, **BROKERS_TIME}),
            TopicSpec(self.requests("batch"), config.request_partitions, {**forever, **BROKERS_TIME}),
            TopicSpec(self.retries, config.retry_partitions, forever),
            TopicSpec(self.lanes, config.lane_partitions, forever),
            *(TopicSpec(self.engine(pool), config.engine_partitions, forever) for pool in sorted(pools)),
        ]
        return [
            *accepted,
            TopicSpec(self.control, 1, {**forever, **BROKERS_TIME}),
            TopicSpec(self.results, config.result_partitions, passing),
            TopicSpec(self.streams, config.result_partitions, {"retention.ms": str(config.streams_retention_ms), **size}),
            TopicSpec(self.dead_letters, config.dead_letter_partitions, forever),
        ]
