"""Record headers: their names, and how numbers in them are written.

Spring's names serve request-reply (`kafka_correlationId`, `kafka_replyTopic`, `kafka_replyPartition`), so that a
stock client needs no library of ours. Numbers are big-endian, as Spring writes them.
"""

from collections.abc import Iterable

Headers = tuple[tuple[str, bytes], ...]

CONTENT_TYPE = "content-type"
TRACEPARENT = "traceparent"
CORRELATION_ID = "kafka_correlationId"
REPLY_TOPIC = "kafka_replyTopic"
REPLY_PARTITION = "kafka_replyPartition"
RESULT_PARTITION = "forebay-result-partition"  # where a client wishes results and chunks of its request
CLIENT = "forebay-client"  # who waits for the answer: an id that somebody else asks with is run again
REPLAY = "forebay-replay"  # whatever it holds, this record is run, although its id was seen; in its result too
BATCH = "forebay-batch"  # a name by which requests are cancelled together
ENVELOPE = "forebay-envelope"
RUN_ID = "forebay-run-id"
DEAD_TOPIC = "forebay-original-topic"
DEAD_PARTITION = "forebay-original-partition"
DEAD_OFFSET = "forebay-original-offset"
DEAD_CODE = "forebay-error-code"
DEAD_REASON = "forebay-reason"
DEAD_BYTES = "forebay-original-bytes"  # only where the value had to be cut
OF_DEAD = (DEAD_TOPIC, DEAD_PARTITION, DEAD_OFFSET, DEAD_CODE, DEAD_REASON, DEAD_BYTES)
REPLAYED = "forebay-replayed"  # a record without value among the dead letters: partition/offset of one that was put back

JSON = "application/json"
MSGPACK = "application/msgpack"


def get(headers: Iterable[tuple[str, bytes]], name: str) -> bytes | None:
    """Give the last header of that name, or None."""
    found = None
    for key, value in headers:
        if key == name:
            found = value
    return found


def text(headers: Iterable[tuple[str, bytes]], name: str) -> str | None:
    """Give the last header of that name as text, or None; bytes that are no UTF-8 are replaced."""
    value = get(headers, name)
    return None if value is None else value.decode("utf-8", "replace")


def number(value: bytes) -> int | None:
    """Read a big-endian signed number of 1 to 8 bytes, or None where it is none."""
    return int.from_bytes(value, "big", signed=True) if 1 <= len(value) <= 8 else None


def pack_number(value: int) -> bytes:
    """Write a number as Spring does: four bytes, big-endian."""
    return value.to_bytes(4, "big", signed=True)


def without(headers: Iterable[tuple[str, bytes]], *names: str) -> Headers:
    """Give the headers without those of the given names."""
    kept = [h for h in headers if h[0] not in names]
    return tuple(kept)
