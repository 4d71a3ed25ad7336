"""The seam to Kafka: what every adapter offers, in the terms of Kafka itself.

Two adapters ship: `kafka/` (aiokafka) and `memory/` (one process, virtual time, faults on demand); one conformance
suite runs on both. Nothing above this seam imports aiokafka.

Rules that hold for each adapter:

* A consumer never moves by itself from a position that was set: after a rebalance the owner seeks.
* `poll` asks only the partitions named; naming none still keeps the membership alive.
* `Outbox.commit` is all or nothing where transactions exist. Any exception from it means *outcome unknown*: drop the
  outbox, open a new one (which fences and settles), and read the committed offset again.
* Every call ends by its own deadline with `TransportError`; none waits for ever.
* Unknown topics, records that are too large and metadata that is too long are refused before anything is sent.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, Protocol

from broker.transport.topic_plan import TopicPlan
from schemas.headers import Headers
from schemas.topics import TopicSpec


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class Record(NamedTuple):
    """A record as read."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class Outgoing(NamedTuple):
    """A record to be written; without a partition the key's murmur2 hash chooses it, without a key any will do.

    One that is `optional` is left out, by the hop, where its topic has gone: somebody else's reply topic.
    """

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None
    optional: bool = False


class Committed(NamedTuple):
    """A committed position: the next offset to read, and up to 4,096 bytes of metadata."""

    offset: int
    metadata: str = ""


class Membership(NamedTuple):
    """A member's standing in its group: same member and the very next generation means that nobody came between."""

    member: str
    generation: int


class AssignmentListener(Protocol):
    """Told of rebalances. Both calls must return at once: no heartbeat is sent until they do."""

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """A rebalance began; intake pauses, work goes on."""

    def assigned(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """The whole new assignment. Every partition is paused until `seek` is called on it."""


class Consumer(Protocol):
    """Reads records, as a member of a group or with partitions assigned by hand."""

    async def poll(
        self, partitions: Sequence[TopicPartition], records_max: int, timeout_ms: int, each_max: int | None = None
    ) -> list[Record]:
        """Read what is at hand of the named partitions, or wait up to `timeout_ms` for the first record.

        One partition gives at most `each_max` records, and about `kafka.record_bytes_max` bytes or one record.

        Partitions that are not (or no longer) ours, or on which `seek` was not called yet, are passed over; those
        named are served in turn. Must be called at least every few seconds, if need be with no partitions at all.
        During a rebalance it gives nothing.

        Raises:
            OffsetGone: The position of a partition lies outside of what the partition holds.
        """

    def seek(self, partition: TopicPartition, offset: int) -> bool:
        """Set the next offset to read; False where the partition is not ours any more."""

    def position(self, partition: TopicPartition) -> int | None:
        """The next offset to read: what lies below was given, or no reader gets it (markers, aborted records).

        None before `seek`, and where it is not known at the moment.
        """

    async def committed(self, partition: TopicPartition) -> Committed | None:
        """Read the group's committed position.

        Up to date only after an outbox of the partition was opened: that settles what is open, and what was committed
        a moment ago may still be on its way to the group.
        """

    async def still_member(self) -> bool:
        """Ask the group whether it still knows us as a member of the current generation (one heartbeat).

        True for partitions assigned by hand.

        Raises:
            TransportError: The group did not answer, so nobody knows.
        """

    async def bounds(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, tuple[int, int]]:
        """Give first offset and end (last stable offset for read_committed) of each partition."""

    async def close(self) -> None:
        """Leave the group at once and let go."""


class Outbox(Protocol):
    """Writes records and finishes input offsets in one step, for one input partition of one group."""

    async def open(self) -> None:
        """Fence every earlier outbox of the same input partition and settle what it left open."""

    async def commit(self, records: Sequence[Outgoing], position: Committed) -> list[tuple[int, int]]:
        """Write the records, all acknowledged, and then the input position; atomically where transactions exist.

        Returns:
            Partition and offset of each record.

        Raises:
            NoSuchTopic, TooLarge: Naming the record at fault; nothing was sent.
            Fenced: A newer outbox exists, or the broker timed our transaction out.
            TransportError: Anything else; the outcome is unknown.
        """

    async def close(self) -> None:
        """Let go within a bounded time, whatever state it is in."""


class Producer(Protocol):
    """Writes records outside any transaction; idempotent where the broker can."""

    async def send(self, record: Outgoing) -> Awaitable[tuple[int, int]]:
        """Queue a record; waits while too much is queued already.

        Returns:
            Ends with the record's partition and offset once it is acknowledged, or with `TransportError`. It need not
            be awaited.

        Raises:
            NoSuchTopic, TooLarge: The record was not queued.
        """

    async def close(self) -> None:
        """Flush within a bounded time and let go."""


class Admin(Protocol):
    """Looks after topics."""

    async def partitions(self, topic: str) -> int | None:
        """Number of partitions, or None where there is no such topic."""

    async def ensure(self, topics: Sequence[TopicSpec], replication: int, min_insync: int) -> list[str]:
        """Create what is missing, add partitions and mend settings; give one line for each thing done.

        Returns once every partition has a leader, so that the first write succeeds.
        """

    async def compare(self, topics: Sequence[TopicSpec], min_insync: int) -> list[TopicPlan]:
        """Tell, without doing it, what `ensure` would do to each topic, in their order."""

    async def members(self, group: str) -> dict[str, tuple[TopicPartition, ...]]:
        """The members of the group now: client id -> the partitions it owns, which may be none.

        Raises:
            TransportError: The group did not settle in time; who owns what is unknown then.
        """

    async def trim(self, before: Mapping[TopicPartition, int]) -> None:
        """Delete records below the given offsets; does nothing where the broker cannot."""

    async def close(self) -> None:
        """Let go."""


class Transport(Protocol):
    """A cluster: where consumers, outboxes and producers come from."""

    transactional: bool  # whether `Outbox.commit` is atomic

    async def subscribe(self, topics: Sequence[str], group: str, listener: AssignmentListener, client_id: str) -> Consumer:
        """Join a group, read_committed, sticky assignment, no auto-commit; returns before the first assignment.

        Raises:
            NoSuchTopic: Naming it.
            Unreachable: With the address and what to do about it.
        """

    async def assign(self, partitions: Sequence[TopicPartition], group: str | None = None) -> Consumer:
        """Read the given partitions, read_committed; `group` only names whose committed positions `committed` reads.

        Nothing is read of a partition before `seek`.
        """

    def outbox(self, group: str, source: TopicPartition, consumer: Consumer) -> Outbox:
        """Make the outbox of one input partition (`transactional.id` = group.topic.partition); not yet open."""

    async def producer(self) -> Producer:
        """Start a producer."""

    async def admin(self) -> Admin:
        """Start an admin client."""

    async def check(self) -> None:
        """Reach the cluster once, within the connect timeout.

        Raises:
            Unreachable: With the address and what to do about it.
        """

    async def close(self) -> None:
        """Close everything that was opened here and is still open."""
