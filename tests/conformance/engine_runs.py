"""Runs of an engine under test, and what is asked of each: the words in which the cases are written."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from conformance.engine_harnesses import Harness

from engine_consumers.engine import Engine, Piece
from engine_consumers.errors import EngineError
from schemas.formats import TokenLogprob
from schemas.messages import InferenceRequest, Sampling, Usage

STORY = "Tell a very long story:"  # what no model ends before hundreds of tokens

_names = count(1)


@dataclass
class Output:
    """What one run gave."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [token for piece in self.pieces for token in piece.logprobs]

    @property
    def finish_reason(self) -> str | None:
        return self.pieces[-1].finish_reason if self.pieces else None

    @property
    def usage(self) -> Usage | None:
        return self.pieces[-1].usage if self.pieces else None


def asking(text: str, tokens: int, **sampling: Any) -> InferenceRequest:
    return InferenceRequest(prompt=text, max_output_tokens=tokens, sampling=Sampling(**{"temperature": 0.0, **sampling}))


def fresh_name() -> str:
    return f"run-{next(_names)}"


async def run(engine: Engine, request: InferenceRequest, seed: int = 1, priority: int = 0, name: str | None = None) -> Output:
    output = Output()
    async for piece in engine.generate(request, name or fresh_name(), seed, priority):
        output.pieces.append(piece)
    return output


async def refusal(engine: Engine, request: InferenceRequest) -> EngineError:
    try:
        output = await run(engine, request)
    except EngineError as error:
        return error
    message = f"{request} was not refused but answered {output.text!r}"
    raise AssertionError(message)


async def open_run(engine: Engine, request: InferenceRequest, pieces: int, priority: int = 0):
    """Start a run and read some pieces with tokens; give its generator, its name and what came."""
    name, output = fresh_name(), Output()
    generator = engine.generate(request, name, 1, priority)
    while sum(bool(piece.token_ids) for piece in output.pieces) < pieces:
        output.pieces.append(await anext(generator))
    return generator, name, output


async def rest(generator, output: Output) -> Output:
    async for piece in generator:
        output.pieces.append(piece)
    return output


def same(got: object, wanted: object, what: str = "value") -> None:
    assert got == wanted, f"{what}: expected {wanted!r}, got {got!r}"


def idle(harness: Harness) -> None:
    figures = harness.engine.status()
    same((figures.running, figures.waiting, figures.kv_cache_usage), (0, 0, 0.0), "running, waiting and cache usage when idle")
    same(harness.backend_open(), 0, "requests left in the backend")
