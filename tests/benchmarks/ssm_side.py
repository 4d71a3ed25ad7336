"""Row 15's measuring, inside the SSM engine's environment: our engine and mamba_ssm's own `generate` in turns.

Usage: PYTHON tests/benchmarks/ssm_side.py FOLDER ROUNDS; the repository's root is in PYTHONPATH. Tells two cases:

    throughput   tokens/s that were asked for, of 16 requests: mixed lengths, and equal ones
    first_token  ms to the first token of short requests, alone and beside a prompt of 32,768 tokens

`generate` demands one batch of equal lengths: prompts are padded to the longest, and all answers are as long as the
longest. It runs the same kernels as our engine does on a CPU, which are faster than the package's own references.
"""

import asyncio
import contextlib
import sys
import time
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from byte_tokenizer import byte_tokenizer
from in_environment import tell_cases

from engine_consumers.engine import Piece
from engine_consumers.ssm import SsmEngine, kernels, on_cpu
from schemas.config import EngineConfig
from schemas.messages import InferenceRequest, Sampling

SIZES = {"d_model": 384, "n_layer": 4, "vocab_size": 512, "rms_norm": True, "fused_add_norm": False}
LAYER = {"layer": "Mamba2", "headdim": 64, "d_state": 64, "chunk_size": 256, "use_mem_eff_path": False}
MIXED = tuple(
    zip((5, 3000, 7, 64, 2047, 16, 31, 1024, 100, 255, 256, 777, 257, 300, 511, 1000), (32, 64, 96, 128) * 4, strict=True)
)
EQUAL = ((600, 80),) * len(MIXED)
SHORTS, SHORT, ANSWER, LONG = 24, (20, 40, 60, 80), 4, 32_768
CASE_S = 1_500.0

Lengths = tuple[tuple[int, int], ...]


def prompt(length: int, seed: int) -> list[int]:
    dice = Random(seed)
    return [dice.randrange(3, 259) for _ in range(length)]


def make_model(folder: Path) -> Any:
    from mamba_ssm.models.config_mamba import MambaConfig  # noqa: PLC0415 - `kernels.prepare` comes first
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel  # noqa: PLC0415

    torch.manual_seed(3)
    model = MambaLMHeadModel(MambaConfig(**SIZES, ssm_cfg=LAYER), device="cpu", dtype=torch.float32).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def let_generate_run() -> None:
    """Bind our scan for the package's own `forward`, too, which names what no batch of equal lengths needs."""
    from mamba_ssm.modules import mamba2  # noqa: PLC0415

    def scan(*given: Any, **named: Any) -> Any:
        unequal = [named.pop(name, None) for name in ("seq_idx", "cu_seqlens", "return_varlen_states")]
        assert not any(unequal), unequal
        return on_cpu.chunk_scan(*given, **named)

    mamba2.mamba_chunk_scan_combined = scan


async def run(engine: SsmEngine, name: str, token_ids: list[int], answer: int) -> list[tuple[float, Piece]]:
    request = InferenceRequest(input_tokens=token_ids, max_output_tokens=answer, sampling=Sampling(temperature=0.0))
    return [(time.perf_counter(), piece) async for piece in engine.generate(request, name, 1) if piece.token_ids]


async def ours(engine: SsmEngine, lengths: Lengths) -> float:
    began = time.perf_counter()
    outputs = await asyncio.gather(*(run(engine, f"r{n}", prompt(asked, n), said) for n, (asked, said) in enumerate(lengths)))
    seconds = time.perf_counter() - began
    said = [sum(len(piece.token_ids) for _, piece in output) for output in outputs]
    assert said == [wanted for _, wanted in lengths], said
    return sum(said) / seconds


def theirs(model: Any, lengths: Lengths) -> float:
    longest, answer = (max(column) for column in zip(*lengths, strict=True))
    began = time.perf_counter()
    ids = torch.tensor([[0] * (longest - asked) + prompt(asked, n) for n, (asked, _) in enumerate(lengths)])
    found = model.generate(ids, max_length=longest + answer, top_k=1)
    seconds = time.perf_counter() - began
    assert found.shape == (len(lengths), longest + answer), found.shape
    return sum(said for _, said in lengths) / seconds


async def throughput(engine: SsmEngine, model: Any, rounds: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {}
    for name, lengths in (("mixed", MIXED), ("equal", EQUAL)):
        await ours(engine, lengths[:2])
        await asyncio.to_thread(theirs, model, ((40, 4),) * 2)
        for _ in range(rounds):
            figures.setdefault(f"{name} ours", []).append(await ours(engine, lengths))
            figures.setdefault(f"{name} theirs", []).append(await asyncio.to_thread(theirs, model, lengths))
    return figures


async def shorts(engine: SsmEngine) -> float:
    """The median time to the first token of short requests, one after another, in ms."""
    found = []
    for n in range(SHORTS):
        began = time.perf_counter()
        output = await run(engine, f"short-{n}", prompt(SHORT[n % len(SHORT)], n), ANSWER)
        found.append((next(at for at, piece in output if piece.token_ids) - began) * 1000)
    return median(found)


async def first_token(engine: SsmEngine, rounds: int) -> dict[str, list[float]]:
    """The long prompt is given up once the short ones are through; that it was being read all the while is looked at."""
    figures: dict[str, list[float]] = {"alone": [], "beside": [], "whole prompt": []}
    await shorts(engine)
    for n in range(rounds):
        figures["alone"].append(await shorts(engine))
        began = time.perf_counter()
        long = asyncio.create_task(run(engine, "long", prompt(LONG, n), 1))
        await run(engine, "first", prompt(SHORT[0], n), 1)  # the long one is being read by now
        figures["beside"].append(await shorts(engine))
        (sequence,) = engine._loop._schedule.reading  # else the long one was through before them
        seconds = time.perf_counter() - began
        figures["whole prompt"].append(seconds * 1000 * LONG / sequence.done)
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
    return figures


async def main(folder: Path, rounds: int) -> None:
    kernels.prepare("cpu")
    model = make_model(folder)
    options = {"device": "cpu", "dtype": "float32"}
    engine = SsmEngine(EngineConfig(kind="ssm", model="measured", model_path=str(folder), slots=len(MIXED), options=options))
    await engine.start()
    let_generate_run()
    engine._loaded = engine._loaded._replace(ends=frozenset())  # random weights: each answer is as long as was asked for
    cases = {"throughput": partial(throughput, engine, model, rounds), "first_token": partial(first_token, engine, rounds)}
    await tell_cases(cases, case_s=CASE_S)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
