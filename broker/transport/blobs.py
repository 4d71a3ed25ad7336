"""The claim check: what is too large for a record lies in a store that all parts reach, and the record names it.

A blob is named by its digest, so writing one again, also by a run that is repeated, changes nothing. Nothing is deleted
here: the store's own lifecycle rules do that, no sooner than results are kept in Kafka.
"""

import asyncio
import concurrent.futures
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from schemas import faults
from schemas.config import BlobsConfig
from schemas.errors import ErrorCode
from schemas.messages import BlobInput, BlobOutput, BlobRef, InferenceRequest, InferenceResult

log = logging.getLogger("forebay.blobs")
T = TypeVar("T")

_input = msgspec.json.Decoder(BlobInput)
_output = msgspec.json.Decoder(BlobOutput)
_encoder = msgspec.json.Encoder()


class BlobError(Exception):
    """A blob could not be read or written.

    Args:
        code: `invalid_request` where the reference is at fault, else one that may pass.
        message: One sentence, naming the URL.
    """

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class _Threads(concurrent.futures.Executor):
    """A thread for each call that nobody waits for at the end: a store that hangs must not keep the process from ending."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> "concurrent.futures.Future[Any]":  # noqa: ANN401
        """Begin a call."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # it cannot be called back

        def work() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:  # noqa: BLE001 - whatever it is goes to whoever waits
                future.set_exception(error)

        threading.Thread(target=work, name="forebay-blob", daemon=True).start()
        return future


_threads = _Threads()


class _Place(NamedTuple):
    """A file system of fsspec's, and a path on it."""

    files: Any
    path: str


class Blobs:
    """Reads and writes blobs, each call in a thread and within `blobs.timeout_ms`.

    Args:
        config: The store and its bounds.
    """

    def __init__(self, config: BlobsConfig) -> None:
        self._config = config

    @property
    def has_store(self) -> bool:
        """Whether there is somewhere to write."""
        return self._config.store is not None

    async def read(self, ref: BlobRef) -> bytes:
        """Read what a reference names, and check its size and digest.

        Raises:
            BlobError: It may not be read, is not there, or is not what the reference says; or the store does not answer.
        """
        refused = self._objection(ref)
        if refused:
            raise BlobError(ErrorCode.INVALID_REQUEST, f"{ref.url}: {refused}")

        def get(place: _Place) -> bytes:
            found = place.files.size(place.path)  # first: it may be too large to be read
            if found != ref.size_bytes:
                raise BlobError(ErrorCode.INVALID_REQUEST, f"{ref.url}: expected {ref.size_bytes} bytes, found {found}")
            data: bytes = place.files.cat_file(place.path)
            return data

        data: bytes = await self._within(ref.url, get)
        digest = hashlib.sha256(data).hexdigest()
        if digest != ref.sha256:
            raise BlobError(ErrorCode.INVALID_REQUEST, f"{ref.url}: expected sha256 {ref.sha256}, found {digest}")
        return data

    async def write(self, data: bytes) -> BlobRef:
        """Keep some JSON in the store.

        Raises:
            BlobError: There is no store, it is too much, or the store does not answer.
        """
        if self._config.store is None:
            message = "there is no store for what is too large for a record: set `blobs.store`"
            raise BlobError(ErrorCode.INVALID_REQUEST, message)
        if len(data) > self._config.bytes_max:
            message = f"{len(data)} bytes are more than `blobs.bytes_max` ({self._config.bytes_max})"
            raise BlobError(ErrorCode.INVALID_REQUEST, message)
        digest = hashlib.sha256(data).hexdigest()
        url = f"{self._config.store.rstrip('/')}/{digest[:2]}/{digest}.json"

        def put(place: _Place) -> None:
            place.files.makedirs(place.files._parent(place.path), exist_ok=True)  # noqa: SLF001 - fsspec has no other name
            place.files.pipe_file(place.path, data)

        await self._within(url, put)
        return BlobRef(url, len(data), digest)

    async def shrink(self, request: InferenceRequest) -> InferenceRequest:
        """Put a request's input into the store and name it instead.

        Raises:
            BlobError: As `write`.
        """
        given = BlobInput(request.prompt, request.messages, request.input_tokens)
        ref = await self.write(_encoder.encode(given))
        return structs.replace(request, prompt=None, messages=None, input_tokens=None, input_ref=ref)

    async def fill(self, request: InferenceRequest) -> InferenceRequest:
        """Put the input that a request names in its place.

        Raises:
            BlobError: As `read`; or it is no input.
        """
        ref = request.input_ref
        if ref is None:
            return request
        given = await self._message(ref, _text if ref.content_type == "text/plain" else _input.decode)
        try:
            return structs.replace(request, **structs.asdict(given), input_ref=None)
        except ValueError as error:
            raise BlobError(ErrorCode.INVALID_REQUEST, f"{ref.url}: {error}") from None

    async def put_output(self, result: InferenceResult) -> InferenceResult:
        """Put a result's output into the store and name it instead.

        Raises:
            BlobError: As `write`.
        """
        ref = await self.write(_encoder.encode(BlobOutput(result.output_text, result.output_tokens, result.logprobs)))
        return structs.replace(result, output_text="", output_tokens=[], logprobs=[], output_ref=ref)

    async def output_of(self, result: InferenceResult) -> InferenceResult:
        """Give a result with the output that it names.

        Raises:
            BlobError: As `read`; or it is no output.
        """
        ref = result.output_ref
        if ref is None:
            return result
        return structs.replace(result, **structs.asdict(await self._message(ref, _output.decode)))

    async def whole(self, result: InferenceResult) -> InferenceResult:
        """Give a result with the output that it names; as it is, with a warning, where that cannot be read."""
        try:
            return await self.output_of(result)
        except BlobError as error:
            log.warning("output_unread id=%s error=%s", result.request_id, error.message)
            return result

    async def _message(self, ref: BlobRef, decode: Callable[[bytes], T]) -> T:
        data = await self.read(ref)
        try:
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BlobError(ErrorCode.INVALID_REQUEST, f"{ref.url}: {faults.invalid(error)}") from None

    def _objection(self, ref: BlobRef) -> str | None:
        """Why a reference may not be followed, or None."""
        allowed = [url.rstrip("/") + "/" for url in (self._config.store, *self._config.readable) if url]
        if not any(ref.url.startswith(beginning) for beginning in allowed):
            return "it is outside of `blobs.store` and of whatever `blobs.readable` allows"
        if "::" in ref.url or ".." in ref.url.split("/"):
            return "a URL may neither be chained (`::`) nor step up (`..`)"
        if ref.size_bytes > self._config.bytes_max:
            return f"{ref.size_bytes} bytes are more than `blobs.bytes_max` ({self._config.bytes_max})"
        return None

    async def _within(self, url: str, act: Callable[[_Place], T]) -> T:
        try:
            async with asyncio.timeout(self._config.timeout_ms / 1000):
                return await asyncio.get_running_loop().run_in_executor(_threads, self._call, url, act)
        except TimeoutError:
            message = f"{url}: no answer within {self._config.timeout_ms} ms (`blobs.timeout_ms`)"
            raise BlobError(ErrorCode.TIMEOUT, message) from None
        except FileNotFoundError:
            raise BlobError(ErrorCode.INVALID_REQUEST, f"{url}: no such file") from None
        except BlobError:
            raise
        except Exception as error:  # each protocol's library has errors of its own
            raise BlobError(ErrorCode.INTERNAL, f"{url}: {type(error).__name__}: {error}") from error

    def _call(self, url: str, act: Callable[[_Place], T]) -> T:
        from fsspec.core import url_to_fs  # noqa: PLC0415 - most processes never need it

        return act(_Place(*url_to_fs(url, **self._config.options)))


def _text(data: bytes) -> BlobInput:
    return BlobInput(data.decode())
