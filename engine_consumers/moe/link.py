"""The way to a Triton server: one channel, a deadline on every call. The only place that imports Triton's client.

gRPC itself brings a lost connection back, after pauses that grow; until then its calls fail at once. Each run has a stream of
its own, so that cancelling it tells the server which one; the server needs no more than one connection for all of them.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from engine_consumers.errors import EngineError
from engine_consumers.moe.options import MoeOptions
from engine_consumers.moe.tensors import Signature, Tensor, Values, shape_of, signature
from schemas.errors import ConfigError, ErrorCode

POLL_S = 0.1
RECONNECT_S = (0.1, 5.0)  # the first pause, and the longest
FINAL = "triton_final_response"
REFUSED = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "OUT_OF_RANGE"})
OVERHEAD_BYTES = 2_048  # of names and shapes around the tensors


class Response(NamedTuple):
    """One answer of the server to a request that has several."""

    values: Values
    is_final: bool


class Call:
    """A request on its way, until its last response."""

    def __init__(self, responses: Any, what: str) -> None:  # noqa: ANN401 - Triton's client has no types
        self._responses, self._what = responses, what
        self.is_cancelled = False

    def cancel(self) -> None:
        """Tell the server that nobody waits any more."""
        self.is_cancelled = True
        self._responses.cancel()

    async def responses(self) -> AsyncIterator[Response]:
        """Give the responses to the last one; none more after `cancel`.

        Raises:
            EngineError: `unhealthy` where the connection is lost, `timeout` after the deadline, else as the server says.
        """
        try:
            async for result, error in self._responses:
                if error is not None:
                    raise _judged(error, self._what)
                response = result.get_response()
                values = {one.name: result.as_numpy(one.name).reshape(-1).tolist() for one in response.outputs}
                is_final = response.parameters[FINAL].bool_param
                yield Response(values, is_final)
                if is_final:
                    return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if not self.is_cancelled:  # gRPC says so of what ends with its channel
                raise EngineError(ErrorCode.UNHEALTHY, f"the connection to {self._what} was closed") from None
            return
        except grpc.RpcError as error:
            if self.is_cancelled:
                return
            raise _judged(error, self._what) from None
        if not self.is_cancelled:
            raise EngineError(ErrorCode.UNHEALTHY, f"{self._what} ended its answer too early")


class Link:
    """A server's model, by its address. To be made within the loop that uses it.

    Args:
        address: `host:port`.
        model: The model's name there.
        options: Deadlines and limits.
    """

    def __init__(self, address: str, model: str, options: MoeOptions) -> None:
        self._model, self._options = model, options
        self.address = address
        self.what = f"the Triton server at {address}"
        limits = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
        keepalive_ms = int(options.keepalive_s * 1000)
        self._client = InferenceServerClient(
            address,
            channel_args=[
                *((name, options.message_bytes_max) for name in limits),
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", int(options.call_timeout_s * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.initial_reconnect_backoff_ms", int(RECONNECT_S[0] * 1000)),
                ("grpc.min_reconnect_backoff_ms", int(RECONNECT_S[0] * 1000)),
                ("grpc.max_reconnect_backoff_ms", int(RECONNECT_S[1] * 1000)),
            ],
        )

    async def close(self) -> None:
        """Let go of the connection; what is open on it ends."""
        await self._client.close()

    async def absence(self) -> str | None:
        """Ask whether the model is there to be used; gives why not."""
        try:
            if await self._client.is_model_ready(self._model, client_timeout=self._options.call_timeout_s):
                return None
        except InferenceServerException as error:
            return _judged(error, self.what).message
        return f"{self.what} has its model {self._model!r} not ready"

    async def wait_ready(self) -> None:
        """Wait until the model can be used, and load it first where that is wanted. The caller bounds the wait.

        Raises:
            ConfigError: The server does not know the model, or cannot load it.
        """
        while not await self._is_live():  # noqa: ASYNC110 - it is somewhere else
            await asyncio.sleep(POLL_S)
        if self._options.load:
            await self._control("load", self._client.load_model)
        while await self.absence() is not None:
            await self._check_comes()
            await asyncio.sleep(POLL_S)

    async def unload(self) -> None:
        """Take the model out of the server's memory.

        Raises:
            ConfigError: The server does not let itself be told.
        """
        await self._control("unload", self._client.unload_model)

    async def signature(self) -> Signature:
        """Ask what the model takes and gives.

        Raises:
            EngineError: As the server says.
        """
        limit = self._options.call_timeout_s
        try:
            metadata = await self._client.get_model_metadata(self._model, as_json=True, client_timeout=limit)
            config = await self._client.get_model_config(self._model, as_json=True, client_timeout=limit)
        except InferenceServerException as error:
            raise _judged(error, self.what) from None
        return signature(metadata, config.get("config", {}))

    def call(self, values: Values, tensors: Mapping[str, Tensor], found: Signature, limit_s: float, name: str = "") -> Call:
        """Send a request.

        Args:
            values: What is sent.
            tensors: Their types, as the profile knows them.
            found: Their shapes, as the server does.
            limit_s: Until the last response.
            name: Of the request, for the server's log.

        Raises:
            EngineError: `invalid_request` for more than a message may hold, which gRPC would only call an internal error.
        """
        inputs = [_tensor(name, value, tensors[name], found) for name, value in values.items()]
        size, size_max = sum(map(_size, values.values())), self._options.message_bytes_max - OVERHEAD_BYTES
        if size > size_max:
            message = f"the request takes {size} bytes and the server is sent {size_max} at most (`options.message_bytes_max`)"
            raise EngineError(ErrorCode.INVALID_REQUEST, message)
        request = {"model_name": self._model, "inputs": inputs, "request_id": name, "enable_empty_final_response": True}

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield request

        return Call(self._client.stream_infer(requests(), stream_timeout=limit_s), self.what)

    async def _is_live(self) -> bool:
        try:
            return bool(await self._client.is_server_live(client_timeout=self._options.call_timeout_s))
        except InferenceServerException:
            return False

    async def _control(self, verb: str, call: Any) -> None:  # noqa: ANN401
        limit = self._options.start_timeout_s if verb == "load" else self._options.call_timeout_s
        try:
            await call(self._model, client_timeout=limit)
        except InferenceServerException as error:
            message = f"`options.load`: {self.what} does not {verb} its model {self._model!r}: {_one_line(error)}"
            raise ConfigError(message) from None

    async def _check_comes(self) -> None:
        """Raise where there is nothing to wait for."""
        try:
            index = await self._client.get_model_repository_index(as_json=True, client_timeout=self._options.call_timeout_s)
        except InferenceServerException:
            return
        models = {one["name"]: one for one in index.get("models", [])}
        found = models.get(self._model)
        if found is None:
            known = ", ".join(sorted(models)) or "none"
            message = f"`options.triton_model`: {self.what} has no model {self._model!r}: expected one of {known}"
            raise ConfigError(message)
        if found.get("state", "") in {"", "UNAVAILABLE"}:
            why = found.get("reason") or "it is not loaded: load it there, or set `options.load`"
            message = (
                f"`options.triton_model`: {self.what} has its model {self._model!r} not ready: {' '.join(why.split())[:300]}"
            )
            raise ConfigError(message)


def _tensor(name: str, value: list[Any], tensor: Tensor, found: Signature) -> Any:  # noqa: ANN401
    shape = shape_of(len(value), tensor.dims, found.inputs[name].shape)
    made = InferInput(name, shape, tensor.datatype)
    made.set_data_from_numpy(np.array(value, triton_to_np_dtype(tensor.datatype)).reshape(shape))
    return made


def _size(value: list[Any]) -> int:
    """Bytes that a tensor takes in a message, or a few more."""
    return sum(len(one) + 4 if isinstance(one, bytes) else 8 for one in value)


def _judged(error: Any, what: str) -> EngineError:  # noqa: ANN401 - gRPC's error, or Triton's client's
    """Tell by an error of gRPC whose fault it is."""
    code = error.code().name if isinstance(error, grpc.RpcError) else str(error.status() or "").rpartition(".")[2]
    said = _one_line(error)
    if code == "RESOURCE_EXHAUSTED":
        return EngineError(ErrorCode.INTERNAL, f"{what} answers with more than `options.message_bytes_max`: {said}")
    if code in REFUSED:
        return EngineError(ErrorCode.INTERNAL, f"{what} refuses the request: {said}")
    if code == "DEADLINE_EXCEEDED":
        return EngineError(ErrorCode.TIMEOUT, f"{what} did not answer in time")
    if code in {"UNAVAILABLE", "CANCELLED"}:
        return EngineError(ErrorCode.UNHEALTHY, f"{what} does not answer: {said}")
    return EngineError(ErrorCode.INTERNAL, f"{what} failed: {said}")


def _one_line(error: Any) -> str:  # noqa: ANN401
    said = error.details() if isinstance(error, grpc.RpcError) else error.message()
    return " ".join(str(said or type(error).__name__).split())[:300]
