"""A request in vLLM's words, and what vLLM says of tokens in ours."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.formats import LOGPROB_MIN, Alternative, OutputFormat, TokenLogprob
from schemas.messages import Sampling


def sampling_fields(sampling: Sampling, seed: int, room: int) -> dict[str, Any]:
    """Give the fields of vLLM's `SamplingParams`.

    Args:
        sampling: As the request has it.
        seed: Of its draws.
        room: Tokens that may be generated.
    """
    return {
        "max_tokens": room,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "seed": seed,
        "logprobs": sampling.logprobs,
    }


def format_fields(form: OutputFormat) -> dict[str, Any]:
    """Give the fields of vLLM's `StructuredOutputsParams`."""
    return {"regex": form.regex} if form.json_schema is None else {"json": form.json_schema}


def told(token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, count: int | None) -> list[TokenLogprob]:
    """Give what vLLM tells of some tokens; nothing where it was not asked.

    Args:
        token_ids: That came.
        logprobs: At each of them, token -> vLLM's `Logprob`; that of the token that came is among them in any case.
        count: Of the likeliest ones asked for.
    """
    if count is None or logprobs is None:
        return []
    found = []
    for token, there in zip(token_ids, logprobs, strict=True):
        ranked = sorted((one.rank, other) for other, one in there.items() if one.rank is not None and one.rank <= count)
        top = [Alternative(other, there[other].decoded_token or "", _finite(there[other].logprob)) for _, other in ranked]
        found.append(TokenLogprob(token, there[token].decoded_token or "", _finite(there[token].logprob), top))
    return found


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_MIN
