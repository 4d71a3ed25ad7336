"""Bytes to messages and back: JSON by default, msgpack where the `content-type` header says so."""

from typing import Any, TypeVar

import msgspec

from schemas import faults, headers
from schemas.errors import InvalidMessage
from schemas.messages import EngineStatus, Envelope, InferenceRequest, InferenceResult, SeenBatch, TokenChunk
from schemas.strict import StrictRequest

T = TypeVar("T")

invalid = faults.invalid  # what msgspec raised, as an error of ours
_TYPES = (StrictRequest, InferenceRequest, InferenceResult, TokenChunk, EngineStatus, SeenBatch)
_JSON = {t: msgspec.json.Decoder(t) for t in _TYPES}
_MSGPACK = {t: msgspec.msgpack.Decoder(t) for t in _TYPES}
_envelope = msgspec.msgpack.Decoder(Envelope)
_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct, content_type: str = headers.JSON) -> bytes:
    """Write a message in the given content type.

    Raises:
        InvalidMessage: A text holds half of a surrogate pair, which no encoding can write.
    """
    try:
        return _msgpack_encoder.encode(message) if content_type == headers.MSGPACK else _json_encoder.encode(message)
    except UnicodeEncodeError:
        raise faults.unwritable(message) from None


def decode_ingress(value: bytes | None, content_type: str = headers.JSON) -> InferenceRequest:
    """Read a client's request, refusing whatever is not known.

    Raises:
        InvalidMessage: With one sentence and the path of the field at fault.
    """
    return _decode(StrictRequest, value, content_type)


def decode_request(value: bytes | None, content_type: str = headers.JSON) -> InferenceRequest:
    """Read a request inside the system, where a newer part may know more fields than we do."""
    return _decode(InferenceRequest, value, content_type)


def decode_result(value: bytes | None, content_type: str = headers.JSON) -> InferenceResult:
    """Read a terminal result."""
    return _decode(InferenceResult, value, content_type)


def decode_chunk(value: bytes | None, content_type: str = headers.JSON) -> TokenChunk:
    """Read a token chunk."""
    return _decode(TokenChunk, value, content_type)


def decode_status(value: bytes | None) -> EngineStatus:
    """Read a worker's heartbeat."""
    return _decode(EngineStatus, value, headers.MSGPACK)


def decode_seen(value: bytes | None) -> SeenBatch:
    """Read the marks that an earlier dispatcher left."""
    return _decode(SeenBatch, value, headers.MSGPACK)


def encode_envelope(envelope: Envelope) -> bytes:
    """Write the envelope for its header."""
    return _msgpack_encoder.encode(envelope)


def decode_envelope(value: bytes | None) -> Envelope:
    """Read the envelope from its header.

    Raises:
        InvalidMessage: Where it is missing or broken.
    """
    try:
        return _envelope.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"header `{headers.ENVELOPE}`: {error}"
        raise InvalidMessage(message, headers.ENVELOPE) from None


def salvage(value: bytes | None, content_type: str = headers.JSON) -> dict[str, Any]:
    """Read what can be read of a request that was refused: `id` and `tenant`, where they are sound.

    A record that is not even an object gives an empty dict.
    """
    raw: object = None
    value = value or b""
    if content_type != headers.MSGPACK:
        value = faults.without_mark(value)
    try:
        raw = (msgspec.msgpack if content_type == headers.MSGPACK else msgspec.json).decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = faults.legible(value, content_type)
    return _sound(raw)


def _sound(raw: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if isinstance(raw, dict):
        for name in ("id", "tenant"):
            hint = InferenceRequest.__annotations__[name]
            try:
                found[name] = msgspec.convert(raw[name], hint)
            except (KeyError, msgspec.ValidationError):
                continue
    return {k: v for k, v in found.items() if v is not None}


def _decode(kind: type[T], value: bytes | None, content_type: str) -> T:
    if not value:
        message = "the record has no value: expected an object"
        raise InvalidMessage(message)
    if content_type == headers.MSGPACK:
        decoder: Any = _MSGPACK[kind]  # type: ignore[index]
    elif content_type == headers.JSON or content_type.partition(";")[0].strip().lower() in {headers.JSON, ""}:
        decoder = _JSON[kind]  # type: ignore[index]
    else:
        message = f"header `{headers.CONTENT_TYPE}`: expected {headers.JSON} or {headers.MSGPACK}, got {content_type!r}"
        raise InvalidMessage(message, headers.CONTENT_TYPE)
    try:
        decoded: T = decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, content_type, kind) from None
    return decoded
