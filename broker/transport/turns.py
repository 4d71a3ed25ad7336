"""Taking turns: how one poll is shared among the partitions it names."""

from collections.abc import Callable, Sequence

from broker.transport.protocol import Record, TopicPartition

Take = Callable[[TopicPartition, int], list[Record]]  # up to so many records at hand; without waiting


def take_in_turn(partitions: Sequence[TopicPartition], first: int, records_max: int, take: Take) -> list[Record]:
    """Collect what is at hand, an equal share from each partition, then whatever room is left from those with more.

    Args:
        partitions: Those asked for, each once.
        first: Whose turn it is to be asked first; count it up from poll to poll.
        records_max: Bound of the whole.
        take: Gives what is at hand of one partition.
    """
    at = first % len(partitions) if partitions else 0
    waiting = [*partitions[at:], *partitions[:at]]
    taken: list[Record] = []
    while waiting and len(taken) < records_max:
        share = max(1, (records_max - len(taken)) // len(waiting))
        more = []
        for partition in waiting:
            wanted = min(share, records_max - len(taken))
            if not wanted:
                break
            got = take(partition, wanted)
            taken += got
            if len(got) == wanted:
                more.append(partition)
        waiting = more
    return taken
