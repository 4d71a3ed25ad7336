"""What is refused before anything is sent, so that no transaction is spent on it. Both adapters refuse alike."""

from broker.transport.errors import TooLarge
from broker.transport.protocol import Committed, Outgoing, Record

METADATA_BYTES_MAX = 4_096  # the broker's default, `offset.metadata.max.bytes`
_OVERHEAD_BYTES = 96  # of the batch and of the record, at most
_HEADER_OVERHEAD_BYTES = 10


def record_bytes(record: Outgoing | Record) -> int:
    """Bound from above what a record takes on the wire, in bytes."""
    size = _OVERHEAD_BYTES + len(record.value or b"") + len(record.key or b"")
    for name, value in record.headers:
        size += _HEADER_OVERHEAD_BYTES + 4 * len(name) + len(value)
    return size


def refuse_too_large(record: Outgoing, index: int, bytes_max: int) -> int:
    """Measure a record.

    Args:
        record: What is to be written.
        index: Its place among the records of the call.
        bytes_max: `kafka.record_bytes_max`.

    Returns:
        Its size in bytes.

    Raises:
        TooLarge: The record is above the bound.
    """
    size = record_bytes(record)
    if size > bytes_max:
        message = f"a record for topic {record.topic} takes {size} bytes: at most {bytes_max} (kafka.record_bytes_max) are sent"
        raise TooLarge(message, index)
    return size


def refuse_long_metadata(position: Committed) -> None:
    """Refuse what the broker would: it answers by killing the transaction.

    Raises:
        TooLarge: The metadata is above the bound.
    """
    size = len(position.metadata.encode())
    if size > METADATA_BYTES_MAX:
        message = f"the metadata of a commit takes {size} bytes: the broker keeps at most {METADATA_BYTES_MAX}"
        raise TooLarge(message)
