"""The records that a hop writes: the next hop, a retry, a terminal result, a dead letter."""

from broker.transport.protocol import Outgoing, Record
from broker.transport.refusals import record_bytes
from schemas import codecs, headers
from schemas.config import OVERHEAD_BYTES
from schemas.headers import Headers
from schemas.messages import Envelope, ErrorInfo, InferenceResult
from schemas.topics import Topics

REASON_CHARS_MAX = 1_000
PASSED_ON = frozenset({headers.CORRELATION_ID, headers.TRACEPARENT, headers.REPLAY})  # from the request to its result


class Outputs:
    """Makes records for one cell.

    Args:
        topics: The cell's names.
        result_partitions: How many partitions results and streams have; a client's wish beyond that is passed over.
        record_bytes_max: The broker takes no larger record.
    """

    def __init__(self, topics: Topics, result_partitions: int, record_bytes_max: int) -> None:
        self._topics, self._result_partitions = topics, result_partitions
        self._record_bytes_max, self._value_bytes_max = record_bytes_max, record_bytes_max - OVERHEAD_BYTES

    def forward(self, topic: str, partition: int | None, envelope: Envelope, value: bytes, request_headers: Headers) -> Outgoing:
        """The request on its next topic: its own bytes and headers, and the envelope beside them."""
        kept = headers.without(request_headers, headers.ENVELOPE) if request_headers else ()
        with_envelope = (*kept, (headers.ENVELOPE, codecs.encode_envelope(envelope)))
        return Outgoing(topic, value, envelope.id.encode(), with_envelope, partition)

    def retry(self, envelope: Envelope, value: bytes, request_headers: Headers) -> Outgoing:
        """The request back to the dispatcher."""
        return self.forward(self._topics.retries, None, envelope, value, request_headers)

    def result(self, result: InferenceResult, request_headers: Headers) -> list[Outgoing]:
        """The terminal record, and its copy for a reply topic where the request names one."""
        content_type = headers.text(request_headers, headers.CONTENT_TYPE) or headers.JSON
        if content_type != headers.MSGPACK:
            content_type = headers.JSON
        value, key = codecs.encode(result, content_type), result.request_id.encode()
        passed_on = [h for h in request_headers if h[0] in PASSED_ON]
        run = [(headers.RUN_ID, result.run_id.encode())] if result.run_id else []
        out: Headers = ((headers.CONTENT_TYPE, content_type.encode()), *passed_on, *run)
        records = [Outgoing(self._topics.results, value, key, out, self.result_partition(request_headers))]
        reply_topic = headers.text(request_headers, headers.REPLY_TOPIC)
        if reply_topic:
            partition = headers.get(request_headers, headers.REPLY_PARTITION)
            number = None if partition is None else headers.number(partition)
            records.append(Outgoing(reply_topic, value, key, out, number, optional=True))
        return records

    def result_partition(self, request_headers: Headers) -> int | None:
        """The partition that the client wished results and chunks in, or None to go by key."""
        wished = headers.get(request_headers, headers.RESULT_PARTITION)
        number = None if wished is None else headers.number(wished)
        return number if number is not None and 0 <= number < self._result_partitions else None

    def dead_letter(self, record: Record, error: ErrorInfo) -> Outgoing:
        """The record as it came, with where it lay and why it was not served."""
        why: Headers = (
            (headers.DEAD_TOPIC, record.topic.encode()),
            (headers.DEAD_PARTITION, str(record.partition).encode()),
            (headers.DEAD_OFFSET, str(record.offset).encode()),
            (headers.DEAD_CODE, error.code.value.encode()),
            (headers.DEAD_REASON, error.message[:REASON_CHARS_MAX].encode()),
        )
        kept = headers.without(record.headers, *headers.OF_DEAD)
        letter = Outgoing(self._topics.dead_letters, record.value, record.key, (*kept, *why))
        if record_bytes(letter) <= self._record_bytes_max:
            return letter
        why = (*why, (headers.DEAD_BYTES, str(len(record.value or b"")).encode()))
        if record_bytes(letter._replace(value=b"")) > OVERHEAD_BYTES:  # it is the key or the headers that are too large
            kept, letter = (), letter._replace(key=None)
        return letter._replace(value=(record.value or b"")[: self._value_bytes_max], headers=(*kept, *why))

    def fits(self, record: Outgoing) -> bool:
        """Whether the broker will take the record."""
        return len(record.value or b"") <= self._value_bytes_max
