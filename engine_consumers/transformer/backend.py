"""The engine over vLLM's `AsyncLLM`, which runs the model in processes of its own.

What is done here because of how vLLM behaves:

* Each run gets an id of its own within vLLM that never comes back: a recycled one breaks its bookkeeping.
* vLLM's generator is read by a task that is never cancelled while vLLM lives: a cancelled `add_request` leaks its request.
  Ending a run early is always an abort, repeated until vLLM's generator has ended, as one that comes too early is lost.
* vLLM only learns that its core is dead on the next call; a watcher looks every `WATCH_S` and fails what is open.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any, cast

from engine_consumers.core.checks import check_features, check_sampling, output_room, parse_options
from engine_consumers.engine import EngineFigures, Piece
from engine_consumers.errors import EngineError
from engine_consumers.gpu import GpuFigures, GpuProbe, first_visible
from engine_consumers.mailbox import Mailbox
from engine_consumers.orphans import OrphanGuard
from engine_consumers.prompts import Prompts, estimated_tokens
from engine_consumers.runs import Runs
from engine_consumers.transformer.asking import format_fields, sampling_fields, told
from engine_consumers.transformer.loading import CLOSE_S, Loaded, load, one_line
from engine_consumers.transformer.options import TransformerOptions, model_source, sliced
from schemas.config import EngineConfig
from schemas.errors import ErrorCode
from schemas.features import CHAT, FIELDS, INPUT_TOKENS, JSON_SCHEMA, LOGPROBS, PENALTIES, PRIORITY, REGEX, SEED, STOP
from schemas.messages import FinishReason, InferenceRequest

log = logging.getLogger("forebay.engine")

FEATURES = (CHAT, INPUT_TOKENS, JSON_SCHEMA, LOGPROBS, PENALTIES, PRIORITY, REGEX, SEED, STOP)
WATCH_S = 0.1
ABORT_AGAIN_S = 0.02
DEATH = "vLLM's core process ended"

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}


class _Run:
    """One open run: what it gives, and the task that reads vLLM for it."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.mail = Mailbox()
        self.is_aborted = self.has_begun = self.has_moved = False
        self.pump: asyncio.Task[None] | None = None


class TransformerEngine:
    """Runs a model on vLLM. See `engine.Engine` for the contract.

    Raises:
        ConfigError: An option is unknown or out of bounds, or the model's folder is not there.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = parse_options(TransformerOptions, config.options)
        self._arguments = sliced(self._options.arguments(model_source(config), config.slots), config.time_slices)
        self._runs: Runs[_Run] = Runs()
        self._numbers = count(1)
        self._loaded: Loaded | None = None
        self._prompts: Prompts | None = None
        self._probe: GpuProbe | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._guard = OrphanGuard()

    async def start(self) -> None:
        """Load the model; see `Engine.start`."""
        self._guard.start()
        self._loaded = loaded = await load(self._arguments, self._options.loras, self._options.start_timeout_s)
        self._prompts = Prompts(loaded.tokenizer, loaded.vocabulary, self._options.chat_template)
        device = first_visible() if loaded.is_cuda else None
        self._probe = None if device is None else GpuProbe(device)
        self._watcher = asyncio.create_task(self._watch(loaded))
        self._runs.ready()
        log.info("engine_started kind=transformer model=%s max_context=%d", self._config.model, loaded.max_context)

    async def generate(self, request: InferenceRequest, run: str, seed: int, priority: int = 0) -> AsyncGenerator[Piece, None]:
        """Run a request; see `Engine.generate`."""
        self._runs.admit(run)
        check_features(request, FEATURES)
        check_sampling(request.sampling)
        state = _Run(f"{run}#{next(self._numbers)}")
        self._runs.add(run, state)
        state.pump = asyncio.create_task(self._pump(state, run, request, seed, priority))
        state.pump.add_done_callback(lambda _: self._runs.remove(run, state))  # where it was cancelled before it began
        try:
            while True:
                piece = await state.mail.take()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if not state.pump.done():
                await asyncio.shield(asyncio.create_task(self._stop(state)))

    async def abort(self, run: str) -> None:
        """End a run; see `Engine.abort`."""
        if state := self._runs.get(run):
            await self._stop(state)

    def status(self) -> EngineFigures:
        """Give a snapshot; see `Engine.status`."""
        loaded = self._loaded
        if loaded is None or self._prompts is None:
            return EngineFigures()
        # vLLM tells its figures after each step and never that it became idle: what is open here bounds what it says.
        running = min(loaded.stats.running, len(self._runs))
        features = FEATURES if self._prompts.has_template else tuple(f for f in FEATURES if f != CHAT)
        gpu = self._probe.read() if self._probe else GpuFigures()
        return EngineFigures(
            running=running,
            waiting=len(self._runs) - running,
            kv_cache_usage=loaded.stats.kv_cache_usage if len(self._runs) else 0.0,
            models=tuple(sorted(self._config.names | self._config.loras)),
            max_context=loaded.max_context,
            trained_context=loaded.trained_context,
            features=features,
            gpu=gpu.gpu,
            gpu_mem_used_bytes=gpu.mem_used_bytes,
            gpu_mem_total_bytes=gpu.mem_total_bytes,
            gpu_temperature_c=gpu.temperature_c,
            gpu_utilization=gpu.utilization,
        )

    def estimate_bytes(self, request: InferenceRequest) -> int:
        """Estimate the bytes of key-value cache; see `Engine.estimate_bytes`."""
        loaded = self._started()
        return min(estimated_tokens(request) + request.max_output_tokens, loaded.max_context) * loaded.kv_bytes_per_token

    async def count_tokens(self, request: InferenceRequest) -> int:
        """Count the prompt's tokens; see `Engine.count_tokens`."""
        self._started()
        return len(await cast("Prompts", self._prompts).tokens(request))

    async def died(self) -> str:
        """Wait for the end of the backend; see `Engine.died`."""
        return await self._runs.died()

    async def drain(self) -> None:
        """Let open runs end; see `Engine.drain`."""
        await self._runs.drain()

    async def close(self) -> None:
        """Abort what is open and stop vLLM's processes; see `Engine.close`."""
        self._runs.close()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_AGAIN_S * 50):
                await asyncio.gather(*(self._stop(state) for state in self._runs.states()))
        if self._prompts is not None:
            self._prompts.close()
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            await loaded.shutdown(CLOSE_S)
        await asyncio.to_thread(self._guard.release)

    def _started(self) -> Loaded:
        if self._loaded is None:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is not started, or closed")
        return self._loaded

    async def _pump(self, state: _Run, run: str, request: InferenceRequest, seed: int, priority: int) -> None:
        """Read vLLM's outputs into the run's mailbox; the run is open as long as this task."""
        loaded = self._started()
        try:
            token_ids = await cast("Prompts", self._prompts).tokens(request)
            state.mail.begin(len(token_ids))
            room = output_room(len(token_ids), request.max_output_tokens, loaded.max_context)
            if state.is_aborted:
                state.mail.put([], "", "abort")
                return
            form = request.output_format
            sampling = loaded.sampling_params(
                **sampling_fields(request.sampling, seed, room),
                structured_outputs=None if form is None else loaded.output_format(**format_fields(form)),
            )
            named = {"request_id": state.engine_id, "priority": priority, "lora_request": loaded.loras.get(request.model)}
            async for output in loaded.llm.generate(loaded.prompt(token_ids), sampling, **named):
                self._deliver(state, request, output)
        except EngineError as error:
            state.mail.fail(error)
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises ends this run, told by its kind
            state.mail.fail(self._judge(error, request, loaded))
        finally:
            self._runs.remove(run, state)

    def _deliver(self, state: _Run, request: InferenceRequest, output: Any) -> None:  # noqa: ANN401 - vLLM's RequestOutput
        completion = output.outputs[0]
        reason, token_ids = completion.finish_reason, list(completion.token_ids)
        if reason is not None and reason not in _FINISH:
            if request.output_format is not None and not state.has_begun:  # its core could not make a grammar of it
                state.mail.fail(_bad_format(request, "it is too much for it, or holds what it does not know"))
            else:
                message = f"vLLM ended the request with {reason!r}"
                state.mail.fail(EngineError(ErrorCode.INTERNAL, message))
            return
        state.has_begun, state.has_moved = state.has_begun or bool(token_ids), True
        logprobs = told(token_ids, completion.logprobs, request.sampling.logprobs)
        state.mail.put(token_ids, completion.text, _FINISH[reason] if reason else None, logprobs)

    def _judge(self, error: Exception, request: InferenceRequest, loaded: Loaded) -> EngineError:
        if isinstance(error, loaded.dead_errors) or loaded.llm.errored:
            self._fail_all(DEATH)
            return EngineError(ErrorCode.UNHEALTHY, f"the engine is dead: {self._runs.death}")
        if isinstance(error, loaded.full_errors):
            return EngineError(ErrorCode.CAPACITY_EXCEEDED, f"vLLM's queue is full: {error}")
        if isinstance(error, loaded.client_errors):
            if request.output_format is not None:  # the rest was checked before
                return _bad_format(request, one_line(error))
            return EngineError(ErrorCode.INVALID_REQUEST, f"vLLM refuses the request: {one_line(error)}")
        log.error("run_failed kind=transformer error=%r cause=%r", error, error.__cause__)
        return EngineError(ErrorCode.INTERNAL, f"vLLM failed: {error or type(error).__name__}")

    async def _stop(self, state: _Run) -> None:
        """Wait until vLLM has let a run go, aborting it unless it has ended by itself."""
        state.is_aborted = True
        while state.pump is not None and not state.pump.done():
            if self._loaded is not None and not state.mail.is_finished:
                await self._loaded.llm.abort(state.engine_id)
            await asyncio.wait({state.pump}, timeout=ABORT_AGAIN_S)

    async def _watch(self, loaded: Loaded) -> None:
        steps = 0
        while not loaded.llm.errored:
            await asyncio.sleep(WATCH_S)
            if loaded.stats.steps != steps:
                steps = loaded.stats.steps
                self._stir()
        self._fail_all(DEATH)

    def _stir(self) -> None:
        """VLLM made steps: runs that got nothing by them wait for their place or are being read, and do not hang."""
        for state in self._runs.states():
            if not state.has_moved:
                state.mail.put([], "", None)
            state.has_moved = False

    def _fail_all(self, reason: str) -> None:
        if not self._runs.die(reason):
            return
        log.error("engine_dead kind=transformer reason=%s", reason)
        for state in self._runs.states():
            state.mail.fail(EngineError(ErrorCode.UNHEALTHY, f"the engine is dead: {reason}"))
            if state.pump is not None and state.pump is not asyncio.current_task():
                state.pump.cancel()


def _bad_format(request: InferenceRequest, why: str) -> EngineError:
    field = FIELDS[REGEX if request.output_format is None or request.output_format.json_schema is None else JSON_SCHEMA]
    return EngineError(ErrorCode.INVALID_REQUEST, f"`{field}`: vLLM makes no grammar of it: {why}", field)
