"""Taking turns: how one poll is shared among the partitions it names."""

from collections.abc import Callable, Sequence

from broker.transport.protocol import Record, TopicPartition

Take = Callable[[TopicPartition, int], list[Record]]  # up to so many records at hand; without waiting


def take_in_turn(
    partitions: Sequence[TopicPartition], first: int, records_max: int, take: Take, each_max: int | None = None
) -> list[Record]:
    """Collect what is at hand, an equal share from each partition, then whatever room is left from those with more.

    Args:
        partitions: Those asked for, each once.
        first: Whose turn it is to be asked first; count it up from poll to poll.
        records_max: Bound of the whole.
        take: Gives what is at hand of one partition.
        each_max: Bound of what one partition gives.
    """
    at = first % len(partitions) if partitions else 0
    waiting = [*partitions[at:], *partitions[:at]]
    taken: list[Record] = []
    left = dict.fromkeys(waiting, records_max if each_max is None else each_max)
    while waiting and len(taken) < records_max:
        share = max(1, (records_max - len(taken)) // len(waiting))
        more = []
        for partition in waiting:
            wanted = min(share, records_max - len(taken), left[partition])
            if not wanted:
                break
            got = take(partition, wanted)
            taken += got
            left[partition] -= len(got)
            if len(got) == wanted and left[partition]:
                more.append(partition)
        waiting = more
    return taken
