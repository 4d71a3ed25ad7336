"""How likely an output's tokens were, in OpenAI's two shapes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from schemas.formats import Alternative, TokenLogprob

Json = dict[str, Any]

HALF = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    """Give the `logprobs` of a chat's choice."""
    content = [{**_one(token), "top_logprobs": [_one(other) for other in token.top]} for token in logprobs]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    """Give the `logprobs` of a completion's choice; of alternatives that are spelled alike the likeliest counts."""
    texts = [token.text for token in logprobs]
    return {
        "tokens": texts,
        "token_logprobs": [token.logprob for token in logprobs],
        "top_logprobs": [_likeliest(token) for token in logprobs],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)),
    }


def _likeliest(token: TokenLogprob) -> Json:
    return {token.text: token.logprob} | {other.text: other.logprob for other in reversed(token.top)}


def _one(token: TokenLogprob | Alternative) -> Json:
    spelled = None if HALF in token.text else list(token.text.encode())
    return {"token": token.text, "logprob": token.logprob, "bytes": spelled}
