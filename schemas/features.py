"""What a request may need of an engine beyond plain text; engines list what they have."""

from schemas.messages import InferenceRequest, Sampling

CHAT = "chat"  # `messages` are rendered by the model's own template
INPUT_TOKENS = "input_tokens"
JSON_SCHEMA = "json_schema"  # outputs that a schema allows
LOGPROBS = "logprobs"
PENALTIES = "penalties"
PRIORITY = "priority"  # waiting requests are ordered by it
REGEX = "regex"  # outputs that an expression matches
SEED = "seed"
STOP = "stop"

FIELDS = {  # what of a request asks for it
    CHAT: "messages",
    INPUT_TOKENS: "input_tokens",
    JSON_SCHEMA: "output_format.json_schema",
    LOGPROBS: "sampling.logprobs",
    PENALTIES: "sampling",
    REGEX: "output_format.regex",
    SEED: "sampling.seed",
    STOP: "sampling.stop",
}

_PLAIN = Sampling()


def needed(request: InferenceRequest) -> tuple[str, ...]:
    """Name what an engine must have for a request, sorted; where the input lies elsewhere it is not known yet."""
    sampling, form, found = request.sampling, request.output_format, []
    if request.messages is not None:
        found.append(CHAT)
    if request.input_tokens is not None:
        found.append(INPUT_TOKENS)
    if form is not None:
        found.append(REGEX if form.json_schema is None else JSON_SCHEMA)
    if sampling is not _PLAIN and sampling != _PLAIN:
        if sampling.presence_penalty or sampling.frequency_penalty:
            found.append(PENALTIES)
        asked = ((LOGPROBS, sampling.logprobs), (SEED, sampling.seed), (STOP, sampling.stop or None))
        found += [name for name, value in asked if value is not None]
    return tuple(sorted(found))
