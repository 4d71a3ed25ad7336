"""One line of a batch file: from its bytes to a request, and from a result to the line that answers it."""

from typing import Any

import msgspec

from broker import openai
from broker.batch.reader import InputFile
from broker.openai import Endpoint
from schemas.codecs import invalid
from schemas.errors import ErrorCode, InvalidMessage
from schemas.messages import InferenceRequest, InferenceResult

CUSTOM_ID_CHARS_MAX = 512
_FIELDS = ("custom_id", "method", "url", "body")
_CODES = {"expired": "batch_expired", "cancelled": "batch_cancelled"}


class Settings(msgspec.Struct, frozen=True):
    """What a run adds to its lines.

    Attributes:
        model: Ask for this model whatever the lines say.
        max_tokens: Bound of the output where a line has none.
    """

    tenant: str
    model: str | None = None
    max_tokens: int | None = None


class Call(msgspec.Struct, frozen=True):
    """A sound line."""

    custom_id: str
    endpoint: Endpoint
    request: InferenceRequest


class BadLine(InvalidMessage):
    """A line that cannot be sent.

    Args:
        error: What is wrong with it.
        custom_id: Its custom_id, where that can be read.
    """

    def __init__(self, error: InvalidMessage, custom_id: str | None) -> None:
        super().__init__(error.message, error.param, error.code)
        self.custom_id = custom_id


def parse(source: InputFile, index: int, request_id: str, settings: Settings) -> Call:
    """Read a line of the file.

    Args:
        source: The file.
        index: Place in `source.numbers`.
        request_id: The id that its request gets.
        settings: What the run adds.

    Raises:
        BadLine: With one sentence, and the path of the field at fault.
    """
    custom_id: str | None = None
    try:
        raw = _decoded(source, index)
        custom_id = _custom_id(raw)
        _check_new(source, index, custom_id)
        endpoint = _endpoint(raw)
        body = raw.get("body")
        request = openai.request_of(
            endpoint, body, request_id, settings.tenant, model=settings.model, max_tokens=settings.max_tokens
        )
    except InvalidMessage as error:
        raise BadLine(error, custom_id) from None
    return Call(custom_id, endpoint, request)


def answer(call: Call, result: InferenceResult, created_s: int) -> bytes:
    """Give the output line of a completed result."""
    body = openai.response_body(call.endpoint, result, created_s, call.request.model)
    response = {"status_code": 200, "request_id": result.request_id, "body": body}
    line = {"id": f"batch_req_{result.request_id}", "custom_id": call.custom_id, "response": response, "error": None}
    return msgspec.json.encode(line)


def failure(call: Call, result: InferenceResult, number: int) -> bytes:
    """Give the error line of a result that is not completed."""
    error = result.error
    message = error.message if error else f"the request was {result.status}"
    code = _CODES.get(result.status) or (error.code.value if error else ErrorCode.INTERNAL.value)
    return _error_line(result.request_id, call.custom_id, code, message, number, error.param if error else None)


def refusal(bad: InvalidMessage, custom_id: str | None, request_id: str, number: int) -> bytes:
    """Give the error line of a line that was not sent."""
    return _error_line(request_id, custom_id, bad.code.value, bad.message, number, bad.param)


def _error_line(request_id: str, custom_id: str | None, code: str, message: str, number: int, param: str | None) -> bytes:
    error = {"code": code, "message": f"line {number}: {message}", "line": number, "param": param}
    return msgspec.json.encode({"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": None, "error": error})


def _decoded(source: InputFile, index: int) -> dict[str, Any]:
    line = source.line(index)
    if len(line) > source.line_bytes_max:
        message = f"the line has more than {source.line_bytes_max} bytes"
        raise InvalidMessage(message)
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        found = invalid(error)
        if source.is_cut_off and index == len(source) - 1:
            message = f"{found.message} (the last line has no line end: the file may be cut off)"
            raise InvalidMessage(message) from None
        raise found from None
    if not isinstance(raw, dict):
        message = "expected an object with `custom_id`, `method`, `url` and `body`"
        raise InvalidMessage(message)
    return raw


def _custom_id(raw: dict[str, Any]) -> str:
    custom_id = raw.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"`custom_id`: expected a text of 1 to {CUSTOM_ID_CHARS_MAX} characters"
        raise InvalidMessage(message, "custom_id")
    return custom_id


def _check_new(source: InputFile, index: int, custom_id: str) -> None:
    earlier = source.duplicates.get(source.numbers[index])
    if earlier is not None:
        message = f"`custom_id`: {custom_id!r} is that of line {earlier} already"
        raise InvalidMessage(message, "custom_id")


def _endpoint(raw: dict[str, Any]) -> Endpoint:
    for name in raw:
        if name not in _FIELDS:
            message = f"`{name}`: unknown field"
            raise InvalidMessage(message, name)
    if raw.get("method") != "POST":
        message = "`method`: expected POST"
        raise InvalidMessage(message, "method")
    for endpoint in openai.ENDPOINTS:
        if raw.get("url") == endpoint:
            return endpoint
    url = raw.get("url")
    if not isinstance(url, str):
        message = f"`url`: expected one of {', '.join(openai.ENDPOINTS)}"
        raise InvalidMessage(message, "url")
    message = f"`url`: not supported: {url[:100]}; served are {', '.join(openai.ENDPOINTS)}"
    raise InvalidMessage(message, "url", ErrorCode.UNSUPPORTED_FEATURE)
