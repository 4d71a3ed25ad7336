"""The one interface of every engine, and what passes through it.

An engine runs inside one worker process and serves one model. It owns its queue and its batches; the worker owns the
requests. Names of runs are given by the worker and are unique among the runs that are open.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from msgspec import Struct, field

from schemas.formats import TokenLogprob
from schemas.messages import ExpertFigures, FinishReason, InferenceRequest, Usage


class Piece(Struct, frozen=True):
    """What came since the last piece.

    The texts of all pieces together are the whole output. A piece's text may lag behind its tokens: half a character and
    what may become a stop string are held back. Only the last piece has a finish reason. One without tokens says that the run
    moves: its prompt is being read, or its turn comes nearer. A run that gives no piece for long is taken to hang.

    Attributes:
        token_ids: The new tokens; those of a stop string count although its text is never given.
        text: The new text, whole characters only.
        finish_reason: `stop`, `length` or `abort`.
        usage: Tokens of the prompt, and of the output so far.
        logprobs: Of the new tokens, one each, where they were asked for.
        experts: With the last piece, where the engine is a mixture of experts that tells.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    experts: ExpertFigures | None = None


class EngineFigures(Struct, frozen=True):
    """A snapshot of an engine; what it cannot know is None, never zero.

    Attributes:
        is_healthy: Whether it can run requests now; one that is not, and is not dead, comes back by itself.
        running: Requests in the batch.
        waiting: Requests taken in and not yet running.
        kv_cache_usage: Share of the memory for context that is in use, 0 to 1.
        models: Names it answers to.
        max_context: Tokens of prompt and output together that it takes.
        trained_context: Length the model was trained for.
        gpu: Index of the GPU on this host.
        gpu_utilization: Share of the last second in which a kernel ran, 0 to 1.
        experts: Of a mixture of experts.
    """

    is_healthy: bool = True
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float | None = None
    models: tuple[str, ...] = ()
    max_context: int | None = None
    trained_context: int | None = None
    features: tuple[str, ...] = ()
    gpu: int | None = None
    gpu_mem_used_bytes: int | None = None
    gpu_mem_total_bytes: int | None = None
    gpu_temperature_c: float | None = None
    gpu_utilization: float | None = None
    experts: ExpertFigures | None = None


class Engine(Protocol):
    """Runs a model. All calls are made from one event loop."""

    async def start(self) -> None:
        """Load the model and be ready. A start that failed or was cancelled is followed by `close`, too.

        Raises:
            ConfigError: An option or the model's path is wrong.
            EngineError: `unhealthy` where the backend does not come up.
        """

    def generate(self, request: InferenceRequest, run: str, seed: int, priority: int = 0) -> AsyncGenerator[Piece, None]:
        """Run a request and give its output as it comes.

        An output limit beyond what the context leaves is cut to that (`finish_reason` is then `length`). Closing the generator,
        or cancelling the task that reads it, frees the run as `abort` does.

        Args:
            request: What to run.
            run: Name of this run, unique among open runs.
            seed: Of the random draws; the same seed gives the same tokens. Taken instead of `request.sampling.seed`.
            priority: The request's class, 0 for interactive and 1 for batch. A smaller one is run sooner among those that
                wait in the engine; nothing that runs makes way for it.

        Raises:
            EngineError: On the first step `context_overflow`, `invalid_request`, `unsupported_feature`, or
                `capacity_exceeded` while the engine drains; on any step `unhealthy` while the backend is away or dead, and
                `internal`.
        """

    async def abort(self, run: str) -> None:
        """End a run within a step: its generator gives a last piece with `abort`. An unknown run is passed over."""

    def status(self) -> EngineFigures:
        """Give a snapshot, at once."""

    def estimate_bytes(self, request: InferenceRequest) -> int:
        """Estimate the bytes of cache and state that a request takes at its longest."""

    async def count_tokens(self, request: InferenceRequest) -> int:
        """Count the tokens of the rendered prompt, with the model's own tokenizer and template.

        Raises:
            EngineError: `unsupported_feature` or `invalid_request` where the prompt cannot be rendered.
        """

    async def died(self) -> str:
        """Wait until the backend is dead and give the reason; the worker then exits with `ENGINE_DEAD`."""

    async def drain(self) -> None:
        """Take no more requests and wait until the open ones have ended. The caller bounds the wait."""

    async def close(self) -> None:
        """Abort what is open and let go of everything, within a bounded time. May be called in any state, also twice."""
