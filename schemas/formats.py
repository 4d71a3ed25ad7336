"""What a client may ask of an output beyond its text: a form that it has, and how likely its tokens were."""

from typing import Annotated, Any

from msgspec import Meta, Struct, field

REGEX_CHARS_MAX = 8_192
LOGPROBS_MAX = 20
LOGPROB_MIN = -9_999.0  # stands for minus infinity, which JSON cannot write

JsonSchema = dict[str, Any]
Regex = Annotated[str, Meta(min_length=1, max_length=REGEX_CHARS_MAX)]
LogprobCount = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]


class OutputFormat(Struct, frozen=True, omit_defaults=True):
    """The form that an output has from its first character to its last; exactly one is given.

    An output that `max_output_tokens` ends early is only the beginning of such a text.

    Attributes:
        json_schema: It is a JSON document which this JSON schema allows.
        regex: This regular expression matches the whole of it.
    """

    json_schema: JsonSchema | None = None
    regex: Regex | None = None

    def __post_init__(self) -> None:
        """Refuse none or both."""
        if (self.json_schema is None) == (self.regex is None):
            message = "expected exactly one of `json_schema` and `regex`"
            raise ValueError(message)


class Alternative(Struct, frozen=True):
    """A token that could have come.

    Attributes:
        token: Its id.
        text: As the engine spells it; half a character is no text.
        logprob: Natural logarithm of its probability before temperature and cuts; `LOGPROB_MIN` where it has none.
    """

    token: int
    text: str
    logprob: float


class TokenLogprob(Struct, frozen=True, omit_defaults=True):
    """A token that came, with how likely it was.

    Attributes:
        token: Its id.
        text: As the engine spells it; half a character is no text.
        logprob: Natural logarithm of its probability before temperature and cuts.
        top: The likeliest tokens there, the likeliest first, as many as were asked for.
    """

    token: int
    text: str
    logprob: float
    top: list[Alternative] = field(default_factory=list)
