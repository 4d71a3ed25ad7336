"""A stand-in for the backends that cannot run here: it takes and gives what vLLM's and TensorRT-LLM's models do, and no more.

Triton loads it as a model of its Python backend. It runs no model: it says, in pieces, what it was asked, as JSON. A prompt
with `sing` in it is answered with `la` until that is enough or nobody listens; one with `fail` in it with an error.
"""

import json
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as triton
from tokenizers import Tokenizer

PIECE = 8  # characters that count as one token
PAUSE_S = 0.005


class TritonPythonModel:
    """One of `vllm`, `tensorrt_llm` and `tensorrt_llm_bls`."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        given = {name: value["string_value"] for name, value in config["parameters"].items()}
        self.kind, self.log = given["kind"], Path(given["log"])
        self.tokenizer = Tokenizer.from_file(given["tokenizer"])
        self.inputs = [one["name"] for one in config["input"]]
        self.is_batched = config["max_batch_size"] > 0

        self.is_over = threading.Event()

    def finalize(self):
        self.is_over.set()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,), daemon=True).start()

    def answer(self, request):
        sender, asked = request.get_response_sender(), {}
        for name in self.inputs:
            if (tensor := triton.get_input_tensor_by_name(request, name)) is not None:
                flat = tensor.as_numpy().reshape(-1).tolist()
                asked[name] = [one.decode() if isinstance(one, bytes) else one for one in flat]
        tokens = self.tokenizer.decode(asked["input_ids"]) if "input_ids" in asked else asked["text_input"][0]
        limit = self.limit(asked)
        if "fail" in tokens:
            error = triton.TritonError("Error generating stream: it was asked to fail")
            sender.send(triton.InferenceResponse([], error), flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        text = "la " * (limit * PIECE) if "sing" in tokens else json.dumps(asked)
        self.speak(sender, text, limit, len(asked.get("input_ids") or tokens.split()))

    def limit(self, asked):
        if self.kind == "vllm":
            return json.loads(asked["sampling_parameters"][0])["max_tokens"]
        return asked["max_tokens" if self.kind == "tensorrt_llm_bls" else "request_output_len"][0]

    def speak(self, sender, text, limit, prompt_tokens):
        if self.kind == "tensorrt_llm":
            units = [[token] for token in self.tokenizer.encode(text, add_special_tokens=False).ids]
        else:
            units = [text[n : n + PIECE] for n in range(0, len(text), PIECE)]
        said = units[:limit]
        for n, unit in enumerate(said, 1):
            if sender.is_cancelled() or self.is_over.is_set():
                with self.log.open("a") as log:
                    log.write(f"cancelled after {n - 1}\n")
                sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            is_last = n == len(said)
            reason = "None" if not is_last else "length" if len(units) > limit else "stop"
            flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
            sender.send(triton.InferenceResponse(self.tensors(unit, reason, prompt_tokens)), flags=flags)
            self.is_over.wait(PAUSE_S)

    def tensors(self, unit, reason, prompt_tokens):
        batch = (1,) if self.is_batched else ()
        if self.kind == "tensorrt_llm":
            ids = np.array(unit, np.int32).reshape(*batch, 1, -1)
            return [triton.Tensor("output_ids", ids), triton.Tensor("sequence_length", np.full((*batch, 1), len(unit), np.int32))]
        found = [triton.Tensor("text_output", np.array([unit.encode()], np.object_).reshape(*batch, 1))]
        if self.kind == "vllm":
            found.append(triton.Tensor("finish_reason", np.array([reason.encode()], np.object_)))
            found.append(triton.Tensor("num_input_tokens", np.array([prompt_tokens], np.uint32)))
            found.append(triton.Tensor("num_output_tokens", np.array([1], np.uint32)))
        return found
