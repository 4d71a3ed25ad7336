"""Looking at a Triton server from outside the engine: with a client of its own, and by its processes."""

import json
import queue
from pathlib import Path
from typing import Any

LIMIT_S = 10.0


def status_of(address: str) -> dict[str, Any]:
    """The statistics that our own model gives; blocks."""
    return json.loads(
        ask(address, "forebay_moe", {"input_ids": ([0], "INT32"), "request": ([b'{"op":"status"}'], "BYTES")})["statistics"]
    )


def ask(address: str, model: str, inputs: dict[str, tuple[list[Any], str]]) -> dict[str, Any]:
    """Send one request and give the first value of each output of its only response; blocks."""
    import numpy as np  # noqa: PLC0415 - only in the engine's environment
    from tritonclient.grpc import InferenceServerClient, InferInput  # noqa: PLC0415
    from tritonclient.utils import triton_to_np_dtype  # noqa: PLC0415

    tensors, answers = [], queue.SimpleQueue()
    for name, (values, datatype) in inputs.items():
        tensors.append(InferInput(name, [len(values)], datatype))
        tensors[-1].set_data_from_numpy(np.array(values, triton_to_np_dtype(datatype)))
    with InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=LIMIT_S)
        client.async_stream_infer(model, tensors)
        result, error = answers.get(timeout=LIMIT_S)
    if error is not None:
        raise error
    arrays = {one.name: result.as_numpy(one.name).reshape(-1) for one in result.get_response().outputs}
    return {name: array[0] for name, array in arrays.items() if len(array)}


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    found = [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    return [*found, *(below for one in found for below in children(one))]


def command_of(pid: int) -> str:
    """The program that a process runs."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
