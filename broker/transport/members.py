"""Who is in a group: shared by the adapters' admin clients."""

from collections.abc import Iterable, Sequence

from broker.transport.protocol import TopicPartition


def by_client(members: Iterable[tuple[str, Sequence[TopicPartition]]]) -> dict[str, tuple[TopicPartition, ...]]:
    """Give client id -> its partitions, sorted; members of one client id count as one."""
    found: dict[str, tuple[TopicPartition, ...]] = {}
    for client_id, partitions in members:
        found[client_id] = tuple(sorted({*found.get(client_id, ()), *partitions}))
    return found
