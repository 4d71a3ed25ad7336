"""Errors of the transport.

TransportError            anything the cluster did that we could not use; the outcome may be unknown
├── Unreachable           no broker answers at the address
├── Fenced                a newer outbox of the same input partition exists
├── NoSuchTopic           a topic that must exist does not
├── TooLarge              a record above the size the broker takes
└── OffsetGone            a committed offset is no longer there: records were lost to retention
"""


class TransportError(Exception):
    """Base of this package's errors."""


class Unreachable(TransportError):
    """No broker answers."""


class Fenced(TransportError):
    """Somebody else took the partition's transactional id, or the broker timed our transaction out."""


class NoSuchTopic(TransportError):
    """The topic does not exist, or has no such partition.

    Args:
        message: One sentence naming the topic.
        index: Place of the record among those of the call; None where no record is concerned.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class TooLarge(TransportError):
    """A record, or the metadata of a commit, is larger than what the broker takes.

    Args:
        message: One sentence with topic, size and bound.
        index: Place of the record among those of the call; None where it is the metadata.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class OffsetGone(TransportError):
    """A committed offset lies below the first record: what was between is lost and somebody must know."""
