"""Runs models with a part of their experts resident, by our order and by the last use, and tells what was routed.

Usage: PYTHON tests/benchmarks/experts_side.py ROUNDS MODEL_FOLDER..., inside the engine's environment; the repository's root is
in PYTHONPATH. Prints a line of JSON for each model.
"""

import asyncio
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from in_environment import tell_cases
from resident_orders import LeastRecentlyUsed

from deploy.demo.passages import read_passages
from deploy.triton.checkpoint import Checkpoint
from deploy.triton.experts import Experts
from deploy.triton.loading import Loaded, load
from deploy.triton.options import ModelOptions
from engine_consumers.core.experts import Residents
from engine_consumers.stepping.loop import News, Sequence, SlotLoop
from engine_consumers.stepping.sampling import Drawing
from engine_consumers.turns import Unshared
from schemas.messages import Sampling

SLOTS = (1, 8)
SHARE = 0.58
PROMPT_TOKENS, SAID_TOKENS, PIECE, LOOKED_AT = 120, 64, 64, 16
TEMPERATURE = 0.7
LIMIT_S, CASE_S = 60.0, 1_800.0


class Recorded(Residents):
    """Ours, that writes down what it is told."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: list[list[Any]] = []

    def visit(self, layer: int, needed: Any, now_s: float, chosen: Any = ()) -> Any:
        self.events.append([layer, sorted(needed), round(now_s, 4), chosen[:LOOKED_AT]])
        return super().visit(layer, needed, now_s, chosen)

    def foresee(self, layer: int, ranked: Any) -> None:
        self.events.append([layer, ranked])
        super().foresee(layer, ranked)


def prompts(loaded: Loaded) -> list[list[int]]:
    """The passages of the demo, cut to what a tiny model can hold."""
    texts = [request.messages[-1].content for request in read_passages()]
    return [loaded.tokenizer.encode(text).ids[:PROMPT_TOKENS] for text in texts]


def run(loaded: Loaded, slots: int, seed: int) -> None:
    """Run half of the prompts, as many at once as there are slots."""
    over, left = threading.Event(), set()

    def deliver(news: list[News]) -> None:
        left.difference_update(one.sequence for one in news if one.finish is not None)
        if not left:
            over.set()

    loop = SlotLoop(loaded.network, slots, 2, PIECE, deliver, print, Unshared())
    for number, prompt in enumerate(prompts(loaded)[seed % 2 :: 2]):
        drawing = Drawing(Sampling(temperature=TEMPERATURE), 100 * seed + number)
        sequence = Sequence(prompt, SAID_TOKENS, drawing, [], loaded.tokenizer, loaded.ends)
        left.add(sequence)
        loop.join(sequence, 0)
    loop.start()
    assert over.wait(LIMIT_S), "the run did not end"
    assert loop.stop(LIMIT_S)


async def measured(folder: Path, rounds: int) -> list[dict[str, Any]]:
    loaded = load(ModelOptions(str(folder), device="cpu", dtype="float32", slots=max(SLOTS), readers=2))
    network, checkpoint, shape = loaded.network, Checkpoint(folder), loaded.network.shape
    places, told = int(SHARE * sum(shape.sparse) * shape.experts), []
    for seed in range(rounds):
        for slots in SLOTS:
            for order in (Recorded, LeastRecentlyUsed):
                experts = Experts(shape, checkpoint, "cpu", torch.float32, budget_bytes=1, order=order)
                experts.set_budget(places * experts.bytes_each)
                network.experts = experts
                run(loaded, slots, seed)
                one = {"slots": slots, "seed": seed, "order": order.__name__, "places": places, **experts.statistics()}
                if isinstance(experts.residents, Recorded):
                    sizes = {"layers": [shape.experts] * sum(shape.sparse), "chosen": shape.chosen}
                    one |= {"events": experts.residents.events, **sizes}
                told.append(one)
    return told


def main() -> None:
    torch.set_num_threads(1)
    cases = {Path(folder).name: partial(measured, Path(folder), int(sys.argv[1])) for folder in sys.argv[2:]}
    asyncio.run(tell_cases(cases, case_s=CASE_S))


if __name__ == "__main__":
    main()
