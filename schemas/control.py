"""What is written to the control topic: cancels, and settings that are changed while it runs. The tag `kind` tells which.

A filter must never be read more widely than it was meant, so a record with a field or a kind that is not known is
refused as a whole; readers pass such records over.

A setting is a change of some fields: a field that is left out stays as it is, null goes back to the configuration's,
and `none` takes a bound away.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from schemas import faults, headers
from schemas.config import PoolName
from schemas.errors import InvalidMessage
from schemas.messages import Id, Tenant
from schemas.policy import Positive, Rate, Seconds, Weight

NONE = "none"
NoBound = Literal["none"] | UnsetType | None
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


class TenantPatch(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What of a tenant's settings differs; the fields are those of `TenantConfig`."""

    weight: Weight | NoBound = UNSET
    requests_per_s: Rate | NoBound = UNSET
    tokens_per_s: Rate | NoBound = UNSET
    requests_per_s_max: Rate | NoBound = UNSET
    tokens_per_s_max: Rate | NoBound = UNSET
    burst_s: Seconds | UnsetType | None = UNSET
    queue_max: Positive | NoBound = UNSET
    paused: bool | UnsetType | None = UNSET


class PoolPatch(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What of an engine's settings differs; the fields are those of `PoolSettings`."""

    requests_per_s_max: Rate | NoBound = UNSET
    tokens_per_s_max: Rate | NoBound = UNSET
    burst_s: Seconds | UnsetType | None = UNSET
    paused: bool | UnsetType | None = UNSET


class TenantSettings(TenantPatch, frozen=True, kw_only=True, tag_field="kind", tag="tenant"):
    """Changes a tenant's settings.

    Attributes:
        tenant: Whose.
        reset: Everything else goes back to the configuration's first.
    """

    tenant: Tenant
    reset: bool = False

    def __post_init__(self) -> None:
        """Refuse a change of nothing."""
        _must_change(self)


class EngineSettings(PoolPatch, frozen=True, kw_only=True, tag_field="kind", tag="engine"):
    """Changes an engine's settings, and with them those of its pool.

    Attributes:
        engine: Its name, or its pool's.
        reset: Everything else goes back to the configuration's first.
    """

    engine: PoolName
    reset: bool = False

    def __post_init__(self) -> None:
        """Refuse a change of nothing."""
        _must_change(self)


class KeptSettings(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="settings"):
    """All changes of settings merged, so that the records that made them may be deleted.

    Attributes:
        as_of: It stands for all records below this offset; what was written later holds on top of it.
    """

    as_of: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    tenants: dict[Tenant, TenantPatch] = field(default_factory=dict)
    pools: dict[PoolName, PoolPatch] = field(default_factory=dict)


Change = TenantSettings | EngineSettings
Control = Cancel | TenantSettings | EngineSettings | KeptSettings

_decoder: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)


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


def change_of(kind: type[TenantSettings] | type[EngineSettings], **given: Any) -> Change:  # noqa: ANN401 - the schema checks it
    """Make a change of settings of what a caller gave.

    Raises:
        InvalidMessage: With one sentence and the field at fault.
    """
    record = {"kind": "tenant" if kind is TenantSettings else "engine", **given}
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        raise faults.invalid(error, value=lambda: record, kind=kind) from None


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


def encode_control(record: Control) -> bytes:
    """Write a control record; the same bytes are its key, so a later one that says the same may supersede it.

    Raises:
        InvalidMessage: A text holds half of a surrogate pair, which no encoding can write.
    """
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        raise faults.unwritable(record) from None


def decode_control(value: bytes | None) -> Control:
    """Read a control record.

    Raises:
        InvalidMessage: It is malformed, or of a kind that is not known here.
    """
    if not value:
        message = "the record has no value: expected an object"
        raise InvalidMessage(message)
    try:
        return _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, headers.JSON, Control) from None


def _must_change(change: Any) -> None:  # noqa: ANN401 - one of two
    names = change.__struct_fields__[:-2]
    if not change.reset and all(getattr(change, name) is UNSET for name in names):
        msg = f"nothing is given: expected `reset` or at least one of {', '.join(f'`{name}`' for name in names)}"
        raise ValueError(msg)
