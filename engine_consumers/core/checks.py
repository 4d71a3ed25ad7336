"""Checks that are the same for every engine: sampling values, options, and what the context leaves for output."""

from collections.abc import Sequence
from math import isfinite
from typing import Any, TypeVar

import msgspec

from engine_consumers.errors import EngineError
from schemas.codecs import invalid
from schemas.errors import ConfigError, ErrorCode
from schemas.features import FIELDS, needed
from schemas.messages import InferenceRequest, Sampling

T = TypeVar("T", bound=msgspec.Struct)


def check_sampling(sampling: Sampling) -> None:
    """Check the sampling values against their bounds, also where the request was not decoded from a record.

    Raises:
        EngineError: `invalid_request` naming the field.
    """
    raw = msgspec.to_builtins(sampling)
    for name, value in raw.items():
        if isinstance(value, float) and not isfinite(value):
            message = f"`sampling.{name}`: expected a finite number, got {value}"
            raise EngineError(ErrorCode.INVALID_REQUEST, message, f"sampling.{name}")
    try:
        msgspec.convert(raw, Sampling)
    except msgspec.ValidationError as error:
        found = invalid(error)
        param = f"sampling.{found.param}" if found.param else "sampling"
        message = found.message.replace(f"`{found.param}`", f"`{param}`", 1)
        raise EngineError(ErrorCode.INVALID_REQUEST, message, param) from None


def check_features(request: InferenceRequest, features: Sequence[str]) -> None:
    """Check that an engine has what a request needs.

    Raises:
        EngineError: `unsupported_feature` naming the first that it lacks.
    """
    lacking = next((name for name in needed(request) if name not in features), None)
    if lacking is not None:
        field = FIELDS[lacking]
        message = f"`{field}`: the engine has no {lacking}: it has {', '.join(features)}"
        raise EngineError(ErrorCode.UNSUPPORTED_FEATURE, message, field)


def check_tokens(token_ids: Sequence[int] | None, vocabulary: int) -> None:
    """Check that every token of the input is one of the vocabulary's.

    Raises:
        EngineError: `invalid_request` naming the first that is not.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary):
        return
    at, token = next((n, token) for n, token in enumerate(token_ids) if not 0 <= token < vocabulary)
    message = f"`input_tokens[{at}]`: expected 0 to {vocabulary - 1}, got {token}"
    raise EngineError(ErrorCode.INVALID_REQUEST, message, f"input_tokens[{at}]")


def output_room(prompt_tokens: int, max_output_tokens: int, max_context: int) -> int:
    """Give how many tokens may be generated: the request's limit, cut to what the prompt leaves of the context.

    Raises:
        EngineError: `context_overflow` where the prompt leaves no room at all; `invalid_request` where there is no prompt.
    """
    if prompt_tokens < 1:
        raise EngineError(ErrorCode.INVALID_REQUEST, "the prompt has no tokens")
    if max_output_tokens < 1:
        message = f"`max_output_tokens`: expected at least 1, got {max_output_tokens}"
        raise EngineError(ErrorCode.INVALID_REQUEST, message, "max_output_tokens")
    room = max_context - prompt_tokens
    if room < 1:
        message = (
            f"the prompt has {prompt_tokens} tokens and {max_output_tokens} more were asked for, "
            f"but the context holds {max_context}: shorten the prompt to at most {max_context - 1} tokens"
        )
        raise EngineError(ErrorCode.CONTEXT_OVERFLOW, message)
    return min(room, max_output_tokens)


def parse_options(kind: type[T], options: dict[str, Any]) -> T:
    """Read an engine's options.

    Raises:
        ConfigError: Naming the option and what was expected; for an unknown one, those that exist.
    """
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for name in options:
        if name not in known:
            message = f"`options.{name}`: unknown option: expected one of {', '.join(sorted(known))}"
            raise ConfigError(message)
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        found = invalid(error)
        message = (
            found.message.replace(f"`{found.param}`", f"`options.{found.param}`", 1)
            if found.param
            else f"`options`: {found.message}"
        )
        raise ConfigError(message) from None
