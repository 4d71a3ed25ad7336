"""What a request may need of an engine beyond plain text; engines list what they have."""

from schemas.messages import InferenceRequest, Sampling

CHAT = "chat"  # `messages` are rendered by the model's own template
INPUT_TOKENS = "input_tokens"
PENALTIES = "penalties"
PRIORITY = "priority"  # waiting requests are ordered by it
SEED = "seed"
STOP = "stop"

_PLAIN = Sampling()


def needed(request: InferenceRequest) -> tuple[str, ...]:
    """Name what an engine must have for a request, sorted; where the input lies elsewhere it is not known yet."""
    sampling, found = request.sampling, []
    if request.messages is not None:
        found.append(CHAT)
    if request.input_tokens is not None:
        found.append(INPUT_TOKENS)
    if sampling is not _PLAIN and sampling != _PLAIN:
        if sampling.presence_penalty or sampling.frequency_penalty:
            found.append(PENALTIES)
        if sampling.seed is not None:
            found.append(SEED)
        if sampling.stop:
            found.append(STOP)
    return tuple(found)
