"""The ingress variants of the client's messages: a field that is not known is refused by name, never ignored."""

from typing import Annotated

from msgspec import Meta, field

from schemas.formats import OutputFormat
from schemas.messages import BlobRef, ChatMessage, InferenceRequest, Sampling


class StrictChatMessage(ChatMessage, frozen=True, forbid_unknown_fields=True):
    """A turn without unknown fields."""


class StrictSampling(Sampling, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters without unknown fields."""


class StrictOutputFormat(OutputFormat, frozen=True, forbid_unknown_fields=True):
    """A form without unknown fields; a schema's own are the schema's."""


class StrictBlobRef(BlobRef, frozen=True, forbid_unknown_fields=True):
    """A reference without unknown fields."""


class StrictRequest(InferenceRequest, frozen=True, forbid_unknown_fields=True):
    """A request without unknown fields, at any depth."""

    messages: Annotated[list[StrictChatMessage], Meta(min_length=1)] | None = None  # type: ignore[assignment]
    input_ref: StrictBlobRef | None = None
    sampling: StrictSampling = field(default_factory=StrictSampling)
    output_format: StrictOutputFormat | None = None
