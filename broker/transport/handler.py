"""What a hop does with its records: the dispatcher's and the worker's side of it."""

from collections.abc import Sequence
from typing import Protocol

from broker.transport.ledger import Inherited
from broker.transport.protocol import Record, TopicPartition

Work = tuple[TopicPartition, int]  # a record in hand: its partition and offset
Place = tuple[int, int]  # where an output went: partition and offset


class Handler(Protocol):
    """What a hop does with its records. All calls are synchronous and quick."""

    def room(self) -> int:
        """How many more records may be taken in now."""

    def takes(self, partition: TopicPartition) -> bool:
        """Whether another record of that partition may be begun now; what is read ahead of it waits for that."""

    def claim(self, record: Record, inherited: Inherited) -> int | None:
        """Give the note to be in the ledger before work on a record begins; None where it may begin at once."""

    def start(self, record: Record, inherited: Inherited) -> None:
        """Begin work on a record; told what is known of it from before."""

    def noted(self, work: Work) -> None:
        """A note given to `Hop.note` is durable."""

    def flush(self) -> None:
        """A batch of `start` calls is over."""

    def moved(self) -> None:
        """The partitions in hand are others now."""

    def drop(self, work: Work) -> None:
        """Forget a record in hand: it is not ours to finish any more."""

    def committed(self, work: Work, places: Sequence[Place]) -> None:
        """A record's output is durable; `places` tells where each of its outputs went, where that is known."""
