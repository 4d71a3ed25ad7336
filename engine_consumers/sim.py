"""The `sim` engine: no model, only a latency profile and deterministic tokens, for dry runs, planning and tests.

It behaves as an engine does: slots with a queue in front, a context limit, stop strings, abort, and faults on demand. It
knows no time but its loop's, so it runs under a virtual loop as well. A token of a prompt is four bytes of UTF-8, rounded up.
"""

import asyncio
import heapq
import os
import signal
import struct
import zlib
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Annotated

from msgspec import Meta, Struct

from engine_consumers.core import babble
from engine_consumers.core.checks import check_features, check_sampling, check_tokens, output_room, parse_options
from engine_consumers.core.stream import StopText, Utf8Text
from engine_consumers.engine import EngineFigures, Piece
from engine_consumers.errors import EngineError
from engine_consumers.runs import Runs
from schemas.config import EngineConfig
from schemas.errors import ErrorCode
from schemas.features import CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP
from schemas.messages import InferenceRequest, Usage

FEATURES = (CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP)
TOKENS = 2**31  # any token may come in
PIECE_TOKENS_MAX = 256
PIECE_MS_MIN = 1.0  # a clock finer than this costs more than it shows

Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]


class SimOptions(Struct, frozen=True):
    """The profile; the defaults are those of a small model on one GPU.

    Attributes:
        start_ms: Time that loading takes.
        ttft_ms: Time to the first token of an empty prompt.
        prefill_tokens_per_s: Speed of reading the prompt; 0 takes no time.
        tpot_ms: Time per output token, alone.
        interference: Share by which each further running request slows the others.
        max_context: Tokens of prompt and output together.
        trained_context: Length it claims to be trained for; `max_context` by default.
        kv_tokens: Tokens that its cache holds, for the usage it reports; slots x max_context by default.
        kv_bytes_per_token: For the estimate of a request's memory.
        gpu_temperature_c: Told in its status, as a hot GPU would be; None: it has no GPU to tell of.
        gpu_mem_used_bytes: The same for memory.
        gpu_mem_total_bytes: The same for memory.
        answer_tokens: Tokens after which it ends by itself; 0: only at the request's limit.
        fail_every: Each so many-th request fails with `internal`, in mid-stream where it has a middle; 0: none.
        die_after_requests: The backend dies while it serves that request; 0: never.
        kill_on: A request whose prompt holds this text kills the whole worker process at its first token; empty: none does.
        hang_on: A request whose prompt holds this text never gets a second piece; empty: none does.
    """

    start_ms: Milliseconds = 0.0
    ttft_ms: Milliseconds = 40.0
    prefill_tokens_per_s: Annotated[float, Meta(ge=0)] = 20_000.0
    tpot_ms: Milliseconds = 10.0
    interference: Annotated[float, Meta(ge=0, le=100)] = 0.02
    max_context: Annotated[int, Meta(ge=2)] = 32_768
    trained_context: Annotated[int, Meta(ge=1)] | None = None
    kv_tokens: Annotated[int, Meta(ge=1)] | None = None
    kv_bytes_per_token: Annotated[int, Meta(ge=1)] = 131_072
    gpu_temperature_c: Annotated[float, Meta(ge=-50, le=200)] | None = None
    gpu_mem_used_bytes: Annotated[int, Meta(ge=0)] | None = None
    gpu_mem_total_bytes: Annotated[int, Meta(ge=1)] | None = None
    answer_tokens: Annotated[int, Meta(ge=0)] = 0
    fail_every: Annotated[int, Meta(ge=0)] = 0
    die_after_requests: Annotated[int, Meta(ge=0)] = 0
    kill_on: str = ""
    hang_on: str = ""


class _Run:
    """One open run; whoever wants it to wake resolves `waiter`."""

    def __init__(self, number: int, prompt_tokens: int, room: int, key: int, stops: list[str]) -> None:
        self.number = number
        self.prompt_tokens = prompt_tokens
        self.room = room
        self.key = key
        self.output_tokens = 0
        self.step_tokens = 1
        self.due = 0.0
        self.is_running = False
        self.is_aborted = self.kills = self.hangs = False
        self.waiter: asyncio.Future[None] | None = None
        self._bytes = Utf8Text()
        self._stop = StopText(stops)
        self._has_stops = bool(stops)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens)

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def take(self, token_ids: list[int]) -> tuple[list[int], str, bool]:
        """Give those of the tokens that are output, their text, and whether a stop string was met."""
        if not self._has_stops:
            self.output_tokens += len(token_ids)
            return token_ids, self._bytes.push(babble.spell(token_ids)), False
        text = ""
        for n, token in enumerate(token_ids, start=1):
            text += self._stop.push(self._bytes.push(babble.VOCABULARY[token]))
            if self._stop.hit is not None:
                self.output_tokens += n
                return token_ids[:n], text, True
        self.output_tokens += len(token_ids)
        return token_ids, text, False

    def rest(self) -> str:
        return self._stop.finish()


class SimEngine:
    """An engine without a model. See `engine.Engine` for the contract.

    Args:
        config: The engine's configuration.
        kill: Ends the worker's process, for `kill_on`.

    Raises:
        ConfigError: An option is unknown or out of bounds.
    """

    def __init__(self, config: EngineConfig, kill: Callable[[], None] | None = None) -> None:
        self._config, self._kill = config, kill or kill_process
        self._options = parse_options(SimOptions, config.options)
        self._runs: Runs[_Run] = Runs()
        self._waiting: list[tuple[int, int, _Run]] = []
        self._running = 0
        self._numbers = count(1)

    async def start(self) -> None:
        """Wait as long as the profile says."""
        if self._options.start_ms:
            await asyncio.sleep(self._options.start_ms / 1000)
        self._runs.ready()

    async def generate(self, request: InferenceRequest, run: str, seed: int, priority: int = 0) -> AsyncGenerator[Piece, None]:
        """Run a request; see `Engine.generate`."""
        self._runs.admit(run)
        check_features(request, FEATURES)
        check_sampling(request.sampling)
        check_tokens(request.input_tokens, TOKENS)
        prompt = _rendered(request)
        prompt_tokens = _prompt_tokens(request, prompt)
        room = output_room(prompt_tokens, request.max_output_tokens, self._options.max_context)
        key = zlib.crc32(prompt) ^ (seed << 32 if request.sampling.temperature > 0 else 0)
        state = _Run(next(self._numbers), prompt_tokens, room, key, request.sampling.stop)
        state.kills = _holds(prompt, self._options.kill_on)
        state.hangs = _holds(prompt, self._options.hang_on)
        self._runs.add(run, state)
        try:
            await self._enter(state, priority)
            while True:
                piece = await self._step(state)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._leave(state)
            self._runs.remove(run, state)

    async def abort(self, run: str) -> None:
        """End a run; see `Engine.abort`."""
        if state := self._runs.get(run):
            self._abort(run, state)

    def status(self) -> EngineFigures:
        """Give a snapshot; see `Engine.status`."""
        options = self._options
        capacity = options.kv_tokens or self._config.slots * options.max_context
        used = sum(state.prompt_tokens + state.output_tokens for state in self._runs.states() if state.is_running)
        return EngineFigures(
            running=self._running,
            waiting=len(self._runs) - self._running,
            kv_cache_usage=min(1.0, used / capacity),
            models=(self._config.model, *self._config.aliases),
            max_context=options.max_context,
            trained_context=options.trained_context or options.max_context,
            features=FEATURES,
            gpu_mem_used_bytes=options.gpu_mem_used_bytes,
            gpu_mem_total_bytes=options.gpu_mem_total_bytes,
            gpu_temperature_c=options.gpu_temperature_c,
        )

    def estimate_bytes(self, request: InferenceRequest) -> int:
        """Estimate memory; see `Engine.estimate_bytes`."""
        tokens = _prompt_tokens(request, _rendered(request)) + request.max_output_tokens
        return min(tokens, self._options.max_context) * self._options.kv_bytes_per_token

    async def count_tokens(self, request: InferenceRequest) -> int:
        """Count the prompt's tokens: four bytes each, rounded up."""
        return _prompt_tokens(request, _rendered(request))

    async def died(self) -> str:
        """Wait for the end of the backend; see `Engine.died`."""
        return await self._runs.died()

    async def drain(self) -> None:
        """Let open runs end; see `Engine.drain`."""
        await self._runs.drain()

    async def close(self) -> None:
        """Abort what is open; see `Engine.close`."""
        self._runs.close()
        for run, state in self._runs.items():
            self._abort(run, state)

    def kill(self, reason: str = "it was killed") -> None:
        """Let the backend die, as a crash would."""
        if self._runs.die(reason):
            for state in self._runs.states():
                state.wake()

    def _abort(self, run: str, state: _Run) -> None:
        """Free the run at once; its reader learns of it when it comes by."""
        state.is_aborted = True
        self._leave(state)
        self._runs.remove(run, state)
        state.wake()

    async def _enter(self, state: _Run, priority: int) -> None:
        if self._running < self._config.slots:
            self._begin(state)
            return
        heapq.heappush(self._waiting, (priority, state.number, state))
        while not state.is_running and not state.is_aborted:
            await self._sleep(state, None)

    def _begin(self, state: _Run) -> None:
        options = self._options
        state.is_running = True
        self._running += 1
        prefill_s = state.prompt_tokens / options.prefill_tokens_per_s if options.prefill_tokens_per_s else 0.0
        state.due = asyncio.get_running_loop().time() + options.ttft_ms / 1000 + prefill_s
        state.step_tokens = 1 if options.tpot_ms else PIECE_TOKENS_MAX

    def _leave(self, state: _Run) -> None:
        if state.is_running:
            state.is_running = False
            self._running -= 1
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not state]
            heapq.heapify(self._waiting)
        while self._waiting and self._running < self._config.slots:
            _, _, chosen = heapq.heappop(self._waiting)
            self._begin(chosen)
            chosen.wake()

    async def _step(self, state: _Run) -> Piece:
        options = self._options
        if not state.is_aborted:
            await self._sleep(state, None if state.hangs and state.output_tokens else state.due)
        if state.is_aborted:
            return Piece([], "", "abort", state.usage)
        answer = min(state.room, options.answer_tokens or state.room)
        size = min(state.step_tokens, answer - state.output_tokens)
        self._inject(state, is_first=not state.output_tokens, is_last=state.output_tokens + size == answer)
        token_ids, text, has_stopped = state.take(babble.tokens(state.key, state.output_tokens, size))
        if has_stopped:
            return Piece(token_ids, text, "stop", state.usage)
        if state.output_tokens == answer:
            return Piece(token_ids, text + state.rest(), "length" if answer == state.room else "stop", state.usage)
        if options.tpot_ms:
            step_ms = options.tpot_ms * (1 + options.interference * (self._running - 1))
            state.step_tokens = max(1, int(PIECE_MS_MIN / step_ms))
            state.due += state.step_tokens * step_ms / 1000
        return Piece(token_ids, text, None, state.usage)

    async def _sleep(self, state: _Run, until: float | None) -> None:
        """Wait until a moment of the loop's clock, or for ever, unless woken.

        Raises:
            EngineError: The backend died meanwhile.
        """
        loop = asyncio.get_running_loop()
        if until is not None and until <= loop.time():
            await asyncio.sleep(0)
        elif not state.is_aborted:
            state.waiter = loop.create_future()
            timer = None if until is None else loop.call_at(until, state.wake)
            try:
                await state.waiter
            finally:
                state.waiter = None
                if timer is not None:
                    timer.cancel()
        self._runs.check_alive()

    def _inject(self, state: _Run, *, is_first: bool, is_last: bool) -> None:
        if state.kills:
            self._kill()
        every = self._options.fail_every
        if every and state.number % every == 0 and (is_last or not is_first):
            message = f"request {state.number} was told to fail"
            raise EngineError(ErrorCode.INTERNAL, message)
        if state.number == self._options.die_after_requests:
            self.kill(f"it was told to die at request {state.number}")
            self._runs.check_alive()


def kill_process() -> None:
    """End this process at once, as a crash below Python does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _holds(prompt: bytes, text: str) -> bool:
    return bool(text) and text.encode() in prompt


def _rendered(request: InferenceRequest) -> bytes:
    if request.input_tokens is not None:
        return struct.pack(f">{len(request.input_tokens)}I", *request.input_tokens)
    if request.messages is not None:
        return "".join(f"{message.role}: {message.content}\n" for message in request.messages).encode()
    return (request.prompt or "").encode()


def _prompt_tokens(request: InferenceRequest, rendered: bytes) -> int:
    return len(request.input_tokens) if request.input_tokens is not None else -(-len(rendered) // 4)
