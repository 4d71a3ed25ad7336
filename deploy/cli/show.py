"""How results look: whole as JSON, or on one line for people."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from schemas.formats import TokenLogprob
from schemas.messages import InferenceResult

_WIDTHS = {"request_id": 26, "status": 9, "tenant": 12, "engine": 12}


def whole_json(message: msgspec.Struct) -> str:
    """A message on one line with all of its fields, also those at their defaults: scripts need not guess."""
    return msgspec.json.encode(whole(message)).decode()


def whole(value: Any) -> Any:  # noqa: ANN401 - whatever a message holds
    """A message as plain objects with all of its fields."""
    if isinstance(value, msgspec.Struct):
        return {name: whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {name: whole(below) for name, below in value.items()}
    return value


def plain(text: str, columns: int | None = None) -> str:
    """A text on one line, cut to so many columns, with nothing in it that a terminal would obey."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if columns is None or len(line) <= columns else line[: columns - 1] + "…"


def result_line(result: InferenceResult, columns: int | None = None) -> str:
    """A result on one line: id, status, tenant, engine, tokens, latency, and its text or error as far as it fits."""
    fields = [f"{getattr(result, name) or '-':<{width}}" for name, width in _WIDTHS.items()]
    latency_ms = result.timing.latency_ms
    fields.append(f"{result.usage.output_tokens:>6} tok")
    fields.append("        -" if latency_ms is None else f"{latency_ms / 1000:>7.2f} s")
    said = f"{result.error.code.value}: {result.error.message}" if result.error else result.output_text or elsewhere(result)
    return plain("  ".join([*fields, " ".join(said.split())]), columns)


def elsewhere(result: InferenceResult) -> str:
    """Where an output lies that was too large for a record and could not be fetched; empty where it is here."""
    ref = result.output_ref
    if ref is None or result.output_text or result.output_tokens:
        return ""
    return f"its output of {ref.size_bytes} bytes lies at {ref.url}: set `blobs` so that it can be read from here"


def summary(result: InferenceResult) -> str:
    """What a completed request cost, in a few words."""
    words = [f"{result.engine}/{result.worker}", f"{result.usage.input_tokens} + {result.usage.output_tokens} tokens"]
    timing = result.timing
    if timing.latency_ms is not None:
        words.append(f"{timing.latency_ms / 1000:.2f} s")
    if timing.ttft_ms is not None:
        words.append(f"first token after {timing.ttft_ms / 1000:.2f} s")
    if timing.tokens_per_second is not None:
        words.append(f"{timing.tokens_per_second:.1f} tokens/s")
    return ", ".join(words)


def likelihoods(logprobs: Sequence[TokenLogprob]) -> list[str]:
    """Each token on a line: how likely it was, in percent, and the likeliest ones there."""

    def one(text: str, logprob: float) -> str:
        return f"{math.exp(logprob):>7.2%} {plain(repr(text))}"

    return ["  ".join([one(it.text, it.logprob), *(one(other.text, other.logprob) for other in it.top)]) for it in logprobs]


def failure(result: InferenceResult) -> str:
    """One line for a result that is not completed."""
    why = f": {result.error.code.value}: {' '.join(result.error.message.split())}" if result.error else ""
    return f"forebay: request {result.request_id} {result.status}{why}"
