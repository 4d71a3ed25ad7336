"""OpenAI's shapes: bodies of chat completions and completions to requests, and results to response bodies.

Whatever Forebay does not do is refused by the field's name, never ignored. A field that is null, or that has the
value by which it does nothing (`n` 1, `logprobs` false), counts as not given.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from broker.openai_logprobs import chat_logprobs, completion_logprobs
from schemas.codecs import invalid
from schemas.errors import ErrorCode, InvalidMessage
from schemas.messages import InferenceRequest, InferenceResult
from schemas.strict import StrictRequest

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
Json = dict[str, Any]

CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
ENDPOINTS: tuple[Endpoint, ...] = (CHAT, COMPLETIONS)
COMPLETION_TOKENS = 16  # what a completion without `max_tokens` gets from OpenAI

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_SHARED = frozenset({*_SAMPLING, "model", "stop", "max_tokens", "user", "metadata", "response_format", "logprobs"})
_TAKEN: Mapping[Endpoint, frozenset[str]] = {
    CHAT: _SHARED | {"messages", "max_completion_tokens", "top_logprobs"},
    COMPLETIONS: _SHARED | {"prompt"},
}
_IDLE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "store": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_WORDS = {
    "n": "several choices",
    "best_of": "several candidates",
    "tools": "tools",
    "functions": "functions",
    "top_logprobs": "log probabilities; `logprobs` says how many",
    "stream": "a stream",
    "echo": "the prompt's echo",
    "suffix": "insertion",
}


def request_of(
    endpoint: Endpoint, body: object, request_id: str, tenant: str, *, model: str | None = None, max_tokens: int | None = None
) -> InferenceRequest:
    """Turn the body of a call into a request.

    Args:
        endpoint: Which call it is.
        body: The body, decoded from JSON.
        request_id: The request's id.
        tenant: Whom it is for.
        model: Ask for this model whatever the body says.
        max_tokens: Bound of the output where the body has none; by default 16 for a completion, as OpenAI does, and
            Forebay's own default for a chat.

    Raises:
        InvalidMessage: Naming the body's field that is wrong or not served.
    """
    if not isinstance(body, dict):
        message = "`body`: expected an object"
        raise InvalidMessage(message, "body")
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unserved(endpoint, given)
    if model is not None:
        given["model"] = model
    if "model" not in given:
        message = "`model`: required field is missing"
        raise InvalidMessage(message, "model")
    raw: Json = {"id": request_id, "tenant": tenant, "model": given["model"]}
    raw |= _messages(given) if endpoint == CHAT else _prompt(given)
    limit_name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    limit = given.get(limit_name, max_tokens or (COMPLETION_TOKENS if endpoint == COMPLETIONS else None))
    if limit is not None:
        raw["max_output_tokens"] = limit
    raw["sampling"] = _sampling(given) | _logprobs(endpoint, given)
    if (form := _output_format(given.get("response_format"))) is not None:
        raw["output_format"] = form
    if metadata := _metadata(given):
        raw["metadata"] = metadata
    try:
        return msgspec.convert(raw, StrictRequest)
    except msgspec.ValidationError as error:
        theirs = {"max_output_tokens": limit_name, "input_tokens": "prompt", "output_format": "response_format"}
        theirs |= {"sampling.logprobs": "top_logprobs" if endpoint == CHAT else "logprobs", "sampling.": ""}
        raise _in_their_words(invalid(error, kind=StrictRequest), theirs) from None


def response_body(endpoint: Endpoint, result: InferenceResult, created_s: int, model: str) -> Json:
    """Give the body that answers a call.

    Args:
        endpoint: Which call it was.
        result: A completed result.
        created_s: Unix time of the answer.
        model: What was asked for; the result's own name of the model goes before it.
    """
    choice: Json = {"index": 0, "logprobs": None, "finish_reason": result.finish_reason}
    if endpoint == CHAT:
        choice["message"] = {"role": "assistant", "content": result.output_text, "refusal": None}
    else:
        choice["text"] = result.output_text
    if result.logprobs:
        choice["logprobs"] = (chat_logprobs if endpoint == CHAT else completion_logprobs)(result.logprobs)
    usage = result.usage
    return {
        "id": f"{'chatcmpl' if endpoint == CHAT else 'cmpl'}-{result.request_id}",
        "object": "chat.completion" if endpoint == CHAT else "text_completion",
        "created": created_s,
        "model": result.model or model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
    }


def _refuse_unserved(endpoint: Endpoint, given: Json) -> None:
    if "max_tokens" in given and "max_completion_tokens" in given and endpoint == CHAT:
        message = "`max_completion_tokens` cannot stand beside `max_tokens`: give one of them"
        raise InvalidMessage(message, "max_completion_tokens")
    for name, value in given.items():
        if name in _TAKEN[endpoint] or any(value == idle and type(value) is type(idle) for idle in _IDLE.get(name, ())):
            continue
        what = f" ({_WORDS[name]})" if name in _WORDS else ""
        message = f"`{name}`: not supported{what} on {endpoint}"
        raise InvalidMessage(message, name, ErrorCode.UNSUPPORTED_FEATURE)


def _messages(given: Json) -> Json:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        message = "`messages`: expected a list of at least one message"
        raise InvalidMessage(message, "messages")
    return {"messages": [_turn(turn, f"messages[{index}]") for index, turn in enumerate(messages)]}


def _turn(turn: object, path: str) -> Json:
    if not isinstance(turn, dict):
        message = f"`{path}`: expected an object"
        raise InvalidMessage(message, path)
    for name, value in turn.items():
        if name not in {"role", "content"} and value not in (None, []):
            message = f"`{path}.{name}`: not supported"
            raise InvalidMessage(message, f"{path}.{name}", ErrorCode.UNSUPPORTED_FEATURE)
    role = turn.get("role")
    if role in ("tool", "function"):
        message = f"`{path}.role`: not supported: {role}"
        raise InvalidMessage(message, f"{path}.role", ErrorCode.UNSUPPORTED_FEATURE)
    if not isinstance(role, str) or role not in _ROLES:
        message = f"`{path}.role`: expected one of {', '.join(_ROLES)}"
        raise InvalidMessage(message, f"{path}.role")
    return {"role": _ROLES[role], "content": _content(turn.get("content"), f"{path}.content")}


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        message = f"`{path}`: expected a text or a list of text parts"
        raise InvalidMessage(message, path)
    texts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str) and len(part) == 2:
            texts.append(part["text"])
        elif isinstance(kind, str) and kind != "text":
            message = f"`{where}.type`: not supported: {kind[:64]}; only text parts are"
            raise InvalidMessage(message, f"{where}.type", ErrorCode.UNSUPPORTED_FEATURE)
        else:
            message = f'`{where}`: expected {{"type": "text", "text": ...}}'
            raise InvalidMessage(message, where)
    return "\n".join(texts)


def _prompt(given: Json) -> Json:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            message = f"`prompt`: not supported: {len(prompt)} prompts in one body; give each a line of its own"
            raise InvalidMessage(message, "prompt", ErrorCode.UNSUPPORTED_FEATURE)
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt:
        return {"input_tokens": prompt}
    message = "`prompt`: expected a text or a list of token ids, not empty"
    raise InvalidMessage(message, "prompt")


def _sampling(given: Json) -> Json:
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    if sampling.get("top_k") == -1:  # vLLM's way to say: no limit
        sampling["top_k"] = 0
    if "stop" in given:
        stop = given["stop"]
        sampling["stop"] = [stop] if isinstance(stop, str) else stop
    return sampling


def _logprobs(endpoint: Endpoint, given: Json) -> Json:
    """A chat says whether and how many, a completion how many."""
    asked = given.get("logprobs", False)
    if endpoint == COMPLETIONS and asked is not False:
        return {"logprobs": asked}
    if not isinstance(asked, bool):
        message = "`logprobs`: expected true or false"
        raise InvalidMessage(message, "logprobs")
    count = given.get("top_logprobs", 0)
    if not asked and count != 0:
        message = "`top_logprobs`: expected `logprobs` to be true beside it"
        raise InvalidMessage(message, "top_logprobs")
    return {"logprobs": count} if asked else {}


def _output_format(given: object) -> Json | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind != "json_schema":
        message = "`response_format.type`: expected one of json_object, json_schema, text"
        raise InvalidMessage(message, "response_format.type")
    described = given.get("json_schema") if isinstance(given, dict) else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        message = "`response_format.json_schema.schema`: expected an object, the JSON schema"
        raise InvalidMessage(message, "response_format.json_schema.schema")
    return {"json_schema": schema}


def _metadata(given: Json) -> Json:
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict):
        message = "`metadata`: expected an object"
        raise InvalidMessage(message, "metadata")
    return {"user": given["user"], **metadata} if "user" in given else metadata


def _in_their_words(error: InvalidMessage, names: Mapping[str, str]) -> InvalidMessage:
    """Name the field as the body's author knows it.

    Args:
        error: What is wrong.
        names: How our fields begin -> what they are called there.
    """
    ours = error.param or ""
    begins = next((name for name in names if ours.startswith(name)), "")
    theirs = names.get(begins, "") + ours.removeprefix(begins)
    return InvalidMessage(error.message.replace(f"`{ours}`", f"`{theirs}`", 1), theirs or None, error.code)
