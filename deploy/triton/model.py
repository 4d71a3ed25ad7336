"""The class that Triton's Python backend looks for: it passes requests to the service, and answers back."""

import json
import logging
import sys
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as triton

from deploy.triton.loading import load
from deploy.triton.options import ModelOptions
from deploy.triton.service import Answer, Service
from schemas.errors import ConfigError


class _Caller:
    """A request of Triton's; see `service.Caller`."""

    def __init__(self, request: Any) -> None:  # noqa: ANN401 - Triton has no types
        self._sender = request.get_response_sender()

    def send(self, answer: Answer, *, is_last: bool) -> None:
        """Answer."""
        tensors = [triton.Tensor("output_ids", np.array(answer.token_ids, np.int32))]
        tensors += [
            triton.Tensor(name, np.array([getattr(answer, name).encode()], np.object_))
            for name in ("text", "finish_reason", "error", "statistics")
        ]
        flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        self._sender.send(triton.InferenceResponse(tensors), flags=flags)

    def has_gone(self) -> bool:
        """Whether its stream was cancelled."""
        return bool(self._sender.is_cancelled())


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load it."""
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
        parameters = json.loads(args["model_config"])["parameters"]
        options = msgspec.json.decode(parameters["options"]["string_value"], type=ModelOptions)
        try:
            self._service = Service(load(options), options)
        except ConfigError as error:
            raise triton.TritonModelException(str(error)) from None
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests; they are answered as they go on."""
        for request in requests:
            token_ids = triton.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
            raw = triton.get_input_tensor_by_name(request, "request").as_numpy().reshape(-1)[0]
            self._service.take(token_ids, raw, _Caller(request))

    def finalize(self) -> None:
        """End it, and its threads with it."""
        self._service.close()
