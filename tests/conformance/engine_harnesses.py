"""What the suite has to know of each kind of engine: how to make it, to look into it, and to kill it.

Nothing here imports pytest or an engine's libraries: an engine is imported when it is made, in whatever environment that is.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from behind_triton.client import children, command_of, status_of

from engine_consumers.core import babble
from engine_consumers.engine import Engine
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest, Sampling

SLOTS = 4
CONTEXT = 512  # tokens that each engine must hold for each of its slots
GREEDY = Sampling(temperature=0.0)
COPY_ME = "💧🌊水車 река мост 💧🌊水車 река мост 💧🌊水車 река мост 💧🌊"


@dataclass(frozen=True)
class Kind:
    """A kind of engine, seen by the suite.

    Attributes:
        kind: Of its configuration.
        options: Of its configuration. The suite compares what requests say alone and in company: float32, where it matters.
        decode: The text of tokens, by the engine's own vocabulary.
        kill: Ends the backend as a crash would.
        backend_open: Requests that the backend itself still holds.
        multibyte: A request whose greedy answer has characters of several tokens.
        has_model: Whether a model draws the tokens.
        memory_grows: Whether a longer request takes more memory; else all take the same.
        options_of: Options that depend on the model's folder.
    """

    kind: str
    options: dict[str, Any]
    decode: Callable[[Any, list[int]], str]
    kill: Callable[[Any], None]
    backend_open: Callable[[Any], int]
    multibyte: InferenceRequest = field(
        default_factory=lambda: InferenceRequest(prompt=COPY_ME, max_output_tokens=24, sampling=GREEDY)
    )
    has_model: bool = True
    memory_grows: bool = True
    options_of: Callable[[str], dict[str, Any]] = lambda _: {}


class Harness:
    """An engine under test; `engine` is replaced by a fresh one where a case has killed it.

    Args:
        kind: Its name in `KINDS`.
        model: Folder of its model; None where it needs none.
    """

    def __init__(self, kind: str, model: str | None = None) -> None:
        self.kind = KINDS[kind]
        self._model = model
        self.engine = self.make()

    def make(self) -> Engine:
        """Give a fresh engine of the same configuration."""
        kind = self.kind
        options = {**kind.options, **kind.options_of(self._model or "")}
        config = EngineConfig(kind=kind.kind, model="under-test", model_path=self._model, slots=SLOTS, options=options)
        return load(config)

    def decode(self, tokens: list[int]) -> str:
        return self.kind.decode(self.engine, tokens)

    def kill(self) -> None:
        self.kind.kill(self.engine)

    def backend_open(self) -> int:
        return self.kind.backend_open(self.engine)


def _decode_loaded(engine: Any, tokens: list[int]) -> str:
    return engine._loaded.tokenizer.decode(tokens, skip_special_tokens=True)


def _kill_vllm(engine: Any) -> None:
    for process in engine._loaded.llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, 9)


def _kill_model(engine: Any) -> None:
    """The model runs in a thread of our own process: what ends it is an error of the device."""

    def fail(*_: object) -> None:
        message = "the device is gone"
        raise RuntimeError(message)

    engine._loaded.model.step = engine._loaded.model.read = fail


def triton_of(model: str) -> list[str]:
    """The command of a Triton with our model, as the cases need it."""
    command = [sys.executable, "-m", "deploy.triton", "--model-path", model, "--dtype", "float32", "--threads", "1"]
    return [*command, "--slots", str(SLOTS), "--max-context", str(CONTEXT), "--prefill-chunk", "64"]


def _kill_triton(engine: Any) -> None:
    """Kill the server itself, which is a child of the command that the engine has started."""
    os.kill(next(pid for pid in children(engine._server.process.pid) if command_of(pid).endswith("tritonserver")), 9)


def _open_in_triton(engine: Any) -> int:
    """Ask the server itself, over a connection of our own; a dead one holds nothing."""
    if engine._up is None:
        return 0
    figures = status_of(engine._link.address)
    return figures["running"] + figures["waiting"]


SIM = Kind(
    kind="sim",
    options={"ttft_ms": 20, "tpot_ms": 5, "max_context": CONTEXT, "answer_tokens": 350},
    decode=lambda _, tokens: babble.spell(tokens).decode("utf-8", "replace"),
    kill=lambda engine: engine.kill(),
    backend_open=lambda engine: len(engine._runs),
    multibyte=InferenceRequest(prompt="Water", max_output_tokens=200, sampling=GREEDY),
    has_model=False,
)
TRANSFORMER = Kind(
    kind="transformer",
    options={"dtype": "float32", "max_model_len": CONTEXT, "enforce_eager": True, "max_num_batched_tokens": CONTEXT},
    decode=_decode_loaded,
    kill=_kill_vllm,
    backend_open=lambda engine: engine._loaded.llm.output_processor.get_num_unfinished_requests(),
)
SSM = Kind(
    kind="ssm",
    options={"device": "cpu", "dtype": "float32", "max_context": CONTEXT, "prefill_chunk": 64},
    decode=_decode_loaded,
    kill=_kill_model,
    backend_open=lambda engine: engine._loop.running + engine._loop.waiting if engine._loop else 0,
    memory_grows=False,
)
MOE = Kind(
    kind="moe",
    options={"max_context": CONTEXT},
    options_of=lambda model: {"server": triton_of(model)},
    decode=lambda engine, tokens: engine._up.model.tokenizer.decode(tokens, skip_special_tokens=True),
    kill=_kill_triton,
    backend_open=_open_in_triton,
)
KINDS = {"sim": SIM, "transformer": TRANSFORMER, "ssm": SSM, "moe": MOE}
