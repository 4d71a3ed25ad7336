"""Runs the engines' cases on the transformer engine, inside that engine's own environment.

Usage: PYTHON tests/conformance/run_engine_cases.py MODEL_FOLDER [CASE ...]; the repository's root is in PYTHONPATH.
Prints one line of JSON for each case.
"""

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_cases import CASES, GREEDY, SLOTS, Harness, run_cases

from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest

COPY_ME = "💧🌊水車 река мост 💧🌊水車 река мост 💧🌊水車 река мост 💧🌊"


def make(model: str):
    # float32: in bfloat16 the same request rounds differently in a batch, and greedy tokens with it.
    options = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_batched_tokens": 512}
    return load(EngineConfig(kind="transformer", model="smollm2", model_path=model, slots=SLOTS, options=options))


def kill(engine) -> None:
    for process in engine._loaded.llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, 9)


def backend_open(engine) -> int:
    return engine._loaded.llm.output_processor.get_num_unfinished_requests()


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    model, *names = sys.argv[1:]
    tokenizers = {}

    def decode(tokens: list[int]) -> str:
        tokenizer = tokenizers.setdefault("one", harness.engine._loaded.tokenizer)
        return tokenizer.decode(tokens, skip_special_tokens=True)

    harness = Harness(
        engine=make(model),
        make=lambda: make(model),
        decode=decode,
        kill=kill,
        backend_open=backend_open,
        multibyte=InferenceRequest(prompt=COPY_ME, max_output_tokens=24, sampling=GREEDY),
    )
    asyncio.run(run_cases(harness, names or list(CASES), tell))


if __name__ == "__main__":
    main()
