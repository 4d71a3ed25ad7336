"""A real Triton with stand-ins for the models that cannot run here: their names, inputs and outputs, as their authors give them.

The tables hold what vLLM's backend and TensorRT-LLM's two models ask for and give, and some of what they take besides;
`model.py` is what stands behind them. To be used in the engine's environment.
"""

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from deploy.triton import server

# name -> type and dims; a trailing ? says that the input may be left out
VLLM_IN = {
    "text_input": "STRING 1",
    "image": "STRING -1 ?",
    "stream": "BOOL 1 ?",
    "sampling_parameters": "STRING 1 ?",
    "exclude_input_in_output": "BOOL 1 ?",
    "return_finish_reason": "BOOL 1 ?",
    "return_cumulative_logprob": "BOOL 1 ?",
    "return_logprobs": "BOOL 1 ?",
    "return_num_input_tokens": "BOOL 1 ?",
    "return_num_output_tokens": "BOOL 1 ?",
}
VLLM_OUT = {
    "text_output": "STRING -1",
    "finish_reason": "STRING -1",
    "cumulative_logprob": "FP32 -1",
    "logprobs": "STRING -1",
    "num_input_tokens": "UINT32 1",
    "num_output_tokens": "UINT32 -1",
}
DRAWING = {
    "temperature": "FP32 1 ?",
    "repetition_penalty": "FP32 1 ?",
    "presence_penalty": "FP32 1 ?",
    "frequency_penalty": "FP32 1 ?",
    "random_seed": "UINT64 1 ?",
    "end_id": "INT32 1 ?",
    "pad_id": "INT32 1 ?",
    "beam_width": "INT32 1 ?",
}
CORE_IN = {
    "input_ids": "INT32 -1",
    "input_lengths": "INT32 1",
    "request_output_len": "INT32 1",
    "streaming": "BOOL 1 ?",
    "runtime_top_k": "INT32 1 ?",
    "runtime_top_p": "FP32 1 ?",
    "stop_words_list": "INT32 2,-1 ?",
    **DRAWING,
}
CORE_OUT = {"output_ids": "INT32 -1,-1", "sequence_length": "INT32 -1", "cum_log_probs": "FP32 -1"}
BLS_IN = {
    "text_input": "STRING 1",
    "max_tokens": "INT32 1",
    "stream": "BOOL 1 ?",
    "stop_words": "STRING -1 ?",
    "bad_words": "STRING -1 ?",
    "top_k": "INT32 1 ?",
    "top_p": "FP32 1 ?",
    **DRAWING,
}
BLS_OUT = {"text_output": "STRING -1", "cum_log_probs": "FP32 -1"}
MODELS = {
    "vllm_model": ("vllm", 0, VLLM_IN, VLLM_OUT),
    "tensorrt_llm": ("tensorrt_llm", 4, CORE_IN, CORE_OUT),
    "tensorrt_llm_bls": ("tensorrt_llm_bls", 4, BLS_IN, BLS_OUT),
}
UP_S = 60.0


class Triton:
    """A server that may be killed and started again at the same address.

    Args:
        model: Folder of a model, for its tokenizer.
        *arguments: More of them for the server.
    """

    def __init__(self, model: str, *arguments: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-doubles-"))
        self.log = self.folder / "log"
        self.log.touch()
        self.repository = self.folder / "models"
        self._tokenizer = str(Path(model) / "tokenizer.json")
        for name, (kind, batch, inputs, outputs) in MODELS.items():
            self.write(name, kind, batch, inputs, outputs)
        triton = server.triton_folder()
        backends = server.write_backend(self.folder, triton)
        with socket.socket() as tried:
            tried.bind(("127.0.0.1", 0))
            self.port = tried.getsockname()[1]
        self._environment = server.environment(triton)
        self._argv = server.command(triton, self.repository, backends, "127.0.0.1", self.port, None)
        self._argv = [one for one in self._argv if not one.startswith("--load-model")] + list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def write(self, name: str, kind: str, batch: int, inputs: dict[str, str], outputs: dict[str, str]) -> None:
        """Put a model into the repository."""
        version = self.repository / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("model.py"), version / "model.py")
        parameters = {"kind": kind, "log": str(self.log), "tokenizer": self._tokenizer}
        lines = [f'name: "{name}"', 'backend: "python"', f"max_batch_size: {batch}"]
        lines += ["model_transaction_policy { decoupled: true }", "instance_group [ { kind: KIND_CPU count: 1 } ]"]
        lines += [_tensor("input", one, told) for one, told in inputs.items()]
        lines += [_tensor("output", one, told) for one, told in outputs.items()]
        lines += [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()]
        (version.parent / "config.pbtxt").write_text("\n".join(lines))

    def start(self) -> None:
        """Start it; it answers after some seconds."""
        self._process = subprocess.Popen(self._argv, env=self._environment, stdout=sys.stderr, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it as a crash would."""
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(UP_S)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _tensor(kind: str, name: str, told: str) -> str:
    datatype, dims, *optional = told.split()
    more = "optional: true" if optional else ""
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [ {dims.replace(",", ", ")} ] {more} }}'
