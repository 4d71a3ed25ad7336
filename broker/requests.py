"""What a caller gives, turned into the record that is sent: checked by the schema that the dispatcher checks it with."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from broker.transport.protocol import Outgoing
from schemas import codecs, headers
from schemas.config import Config
from schemas.control import cancel_of, encode_control
from schemas.errors import InvalidMessage
from schemas.ids import new_id
from schemas.messages import InferenceRequest
from schemas.topics import Topics

RequestLike = InferenceRequest | Mapping[str, Any] | str


class Prepared(NamedTuple):
    """A request that may be sent: with its id fixed, so that every retry of it is the same request."""

    id: str
    request: InferenceRequest
    value: bytes


def request_bytes_max(config: Config) -> int:
    """How large a request may be, whether it goes as a record or its input into the store."""
    return config.blobs.bytes_max if config.blobs.store is not None else config.value_bytes_max


def prepare(
    given: RequestLike | None, fields: Mapping[str, Any], *, content_type: str = headers.JSON, bytes_max: int
) -> Prepared:
    """Check a request and write it.

    Args:
        given: A request, its fields, or just a prompt.
        fields: Fields that stand beside it, and before its own.
        content_type: How it is written.
        bytes_max: A larger one is refused.

    Raises:
        InvalidMessage: With one sentence and the path of the field at fault.
    """
    raw = {**_plain(given), **fields}
    if raw.get("id") is None:
        raw["id"] = new_id()
    try:
        value = msgspec.json.encode(raw)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"the request cannot be written as JSON: {error}"
        raise InvalidMessage(message) from None
    request = codecs.decode_ingress(value)
    value = codecs.encode(request, content_type)
    if len(value) > bytes_max:
        message = f"the request is {len(value)} bytes: expected at most {bytes_max}; larger ones need a `blobs.store`"
        raise InvalidMessage(message)
    return Prepared(str(raw["id"]), request, value)


def cancelling(id: str | None, tenant: str | None, batch: str | None, topics: Topics) -> Outgoing:  # noqa: A002 - its name
    """Write the record that cancels what answers to everything given.

    Raises:
        InvalidMessage: Nothing is given, or a name cannot be one.
    """
    value = encode_control(cancel_of(id, tenant, batch))
    return Outgoing(topics.control, value, value, partition=0)


def _plain(given: RequestLike | None) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, str):
        return {"prompt": given}
    if isinstance(given, InferenceRequest):
        return {name: value for name, value in structs.asdict(given).items() if value is not None}
    if isinstance(given, Mapping):
        return dict(given)
    message = f"a request is an InferenceRequest, its fields, or a prompt; got {type(given).__name__}"
    raise InvalidMessage(message)
