"""From a record to a request in hand, or to the reason why it is refused. The record's bytes are not rewritten."""

from msgspec import Struct

from broker.transport.protocol import Record, TopicPartition
from broker.transport.refusals import record_bytes
from dispatcher.core.item import NEVER_MS, Demand, Excluded, Item
from dispatcher.core.seen import key_of
from schemas import codecs, features, headers, ids
from schemas.config import OVERHEAD_BYTES
from schemas.errors import ErrorCode, InvalidMessage
from schemas.messages import DEFAULT_TENANT, Envelope, ErrorInfo, InferenceRequest, ServiceClass

BESIDE_BYTES_MAX = OVERHEAD_BYTES // 2  # key and headers; the other half is for what is added on the way
OF_THE_POOL = frozenset({ErrorCode.CONTEXT_OVERFLOW, ErrorCode.UNSUPPORTED_FEATURE})  # its workers are all alike in that
OF_THE_REQUEST = frozenset({ErrorCode.INTERNAL, ErrorCode.TIMEOUT})  # no hand-backs: they exclude nobody
BYTES_PER_TOKEN = 4.0  # the core has no tokenizer; the worker's has the last word


class Refused(Struct, frozen=True):
    """A record that is no request: a dead letter in any case, and a result where its id can be read.

    Attributes:
        id: The id that could be read, or None.
        tenant: The tenant that could be read.
        error: What is wrong, with the field's path.
    """

    id: str | None
    tenant: str
    error: ErrorInfo


def admit(record: Record, service_class: ServiceClass, value_bytes_max: int) -> Item | Refused:
    """Read a record of a request topic.

    Args:
        record: As it was read.
        service_class: The class of its topic.
        value_bytes_max: Larger values are refused unread.
    """
    value = record.value or b""
    content_type = (headers.text(record.headers, headers.CONTENT_TYPE) if record.headers else None) or headers.JSON
    try:
        if len(value) > value_bytes_max:
            message = f"the record's value has {len(value)} bytes: at most {value_bytes_max} are taken"
            raise InvalidMessage(message)  # noqa: TRY301 - one place answers all refusals
        if (beside := record_bytes(record) - len(value)) > BESIDE_BYTES_MAX:
            message = f"the record's key and headers have {beside} bytes: at most {BESIDE_BYTES_MAX} are taken"
            raise InvalidMessage(message)  # noqa: TRY301 - one place answers all refusals
        request = codecs.decode_ingress(value, content_type)
    except InvalidMessage as error:
        known = codecs.salvage(value, content_type)
        return Refused(known.get("id"), known.get("tenant", DEFAULT_TENANT), ErrorInfo(error.code, error.message, error.param))
    origin = (record.topic, record.partition, record.offset)
    envelope = Envelope(
        id=request.id or ids.derived_id(*origin, record.timestamp_ms),
        tenant=request.tenant,
        service_class=service_class,
        origin=origin,
        received_at_ms=record.timestamp_ms,
    )
    item = _item(record, envelope, request)
    if request.id is not None:
        item.seen_key = key_of(request.tenant, request.id, item.headers)
    return item


def readmit(record: Record) -> Item | Refused:
    """Read a record of the retries topic, which the system itself wrote."""
    try:
        envelope = codecs.decode_envelope(headers.get(record.headers, headers.ENVELOPE))
    except InvalidMessage as error:
        return Refused(None, DEFAULT_TENANT, ErrorInfo(error.code, error.message, error.param))
    try:
        content_type = headers.text(record.headers, headers.CONTENT_TYPE) or headers.JSON
        request = codecs.decode_request(record.value, content_type)
    except InvalidMessage as error:
        return Refused(envelope.id, envelope.tenant, ErrorInfo(error.code, error.message, error.param))
    return _item(record, envelope, request)


def _item(record: Record, envelope: Envelope, request: InferenceRequest) -> Item:
    size_bytes = _size_bytes(request)
    excluded = _excluded(envelope) if envelope.excluded else ()
    return Item(
        work=(TopicPartition(record.topic, record.partition), record.offset),
        envelope=envelope,
        demand=Demand(request.model, request.routing_hint, request.fallback, excluded, features.needed(request)),
        input_tokens=len(request.input_tokens or ()) if size_bytes is None else size_bytes / BYTES_PER_TOKEN,
        max_output_tokens=request.max_output_tokens,
        deadline_ms=int(request.deadline.timestamp() * 1000) if request.deadline else NEVER_MS,
        value=record.value or b"",
        headers=headers.without(record.headers, headers.ENVELOPE) if record.headers else (),
        size_bytes=size_bytes,
        slo_ms=request.slo_latency_ms,
    )


def _size_bytes(request: InferenceRequest) -> int | None:
    """The size of a prompt's text, or None where it comes as tokens."""
    if request.prompt is not None:
        return _utf8_bytes(request.prompt)
    if request.messages is not None:
        return sum(_utf8_bytes(message.content) for message in request.messages)
    return None if request.input_ref is None else request.input_ref.size_bytes


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _excluded(envelope: Envelope) -> tuple[Excluded, ...]:
    """Who handed it back, the latest last."""
    backs = [a for a in envelope.route if a.error is not None and a.error.code not in OF_THE_REQUEST]
    places = {attempt.engine: place for place, attempt in enumerate(backs)}
    found = []
    for pool, epoch in sorted(envelope.excluded.items(), key=lambda known: (places.get(known[0], -1), known[0])):
        last = backs[places[pool]] if pool in places else None
        of_the_pool = last is None or last.error is None or last.error.code in OF_THE_POOL
        found.append(Excluded(pool, epoch, None if last is None or of_the_pool else last.worker))
    return tuple(found)
