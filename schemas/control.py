"""What is written to the control topic: so far cancels. The tag `kind` leaves room for others.

A filter must never be read more widely than it was meant, so a record with a field or a kind that is not known is
refused as a whole; readers pass such records over.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from schemas import faults, headers
from schemas.errors import InvalidMessage
from schemas.messages import Id, Tenant

BatchName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]


class Cancel(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="cancel"):
    """Ends requests that are not newer than this record and answer to everything that is given.

    Attributes:
        id: The request's id; alone, of any tenant.
        tenant: Whose requests; alone, all of them.
        batch: What the requests' header `forebay-batch` says.
    """

    id: Id | None = None
    tenant: Tenant | None = None
    batch: BatchName | None = None

    def __post_init__(self) -> None:
        """Refuse a filter that would take everything."""
        if self.id is None and self.tenant is None and self.batch is None:
            msg = "nothing is given: expected at least one of `id`, `tenant` and `batch`"
            raise ValueError(msg)


class _Tagged(Struct):
    """Any control record; a decoder of one tagged struct alone does not insist on the tag."""

    kind: str


_tag_decoder, _decoder = msgspec.json.Decoder(_Tagged), msgspec.json.Decoder(Cancel)


def cancel_of(id: str | None = None, tenant: str | None = None, batch: str | None = None) -> Cancel:  # noqa: A002 - its name
    """Make a cancel of what a caller gave.

    Raises:
        InvalidMessage: With one sentence and the field at fault.
    """
    given = {"kind": "cancel", "id": id, "tenant": tenant, "batch": batch}
    try:
        return msgspec.convert(given, Cancel)
    except msgspec.ValidationError as error:
        raise faults.invalid(error, value=lambda: given, kind=Cancel) from None


def batch_name(name: str) -> str:
    """Check the name of a batch.

    Raises:
        InvalidMessage: With what was expected.
    """
    try:
        return msgspec.convert(name, BatchName)
    except msgspec.ValidationError as error:
        message = f"`batch`: {faults.invalid(error).message.removeprefix('the value: ')}"
        raise InvalidMessage(message, "batch") from None


def encode_control(record: Cancel) -> bytes:
    """Write a control record; the same bytes are its key, so a later one of the same filter may supersede it.

    Raises:
        InvalidMessage: A text holds half of a surrogate pair, which no encoding can write.
    """
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        raise faults.unwritable(record) from None


def decode_control(value: bytes | None) -> Cancel:
    """Read a control record.

    Raises:
        InvalidMessage: It is malformed, or of a kind that is not known here.
    """
    if not value:
        message = "the record has no value: expected an object"
        raise InvalidMessage(message)
    try:
        _tag_decoder.decode(value)
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, headers.JSON, Cancel) from None
