"""The engine over mamba_ssm: requests in, pieces out; the model runs in a thread of its own (`loop.py`)."""

import asyncio
import logging
from collections.abc import AsyncGenerator

from engine_consumers.core.checks import check_features, check_sampling, output_room, parse_options
from engine_consumers.engine import EngineFigures, Piece
from engine_consumers.errors import EngineError
from engine_consumers.gpu import GpuFigures, GpuProbe, first_visible
from engine_consumers.mailbox import Mailbox
from engine_consumers.model_folder import model_folder
from engine_consumers.prompts import Prompts
from engine_consumers.runs import Runs
from engine_consumers.ssm.loading import Loaded, load
from engine_consumers.ssm.options import SsmOptions
from engine_consumers.stepping.loop import News, Sequence, SlotLoop
from engine_consumers.stepping.sampling import Drawing
from engine_consumers.threads import in_thread
from engine_consumers.turns import turn_of
from schemas.config import EngineConfig
from schemas.errors import ErrorCode
from schemas.features import CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP
from schemas.messages import InferenceRequest

log = logging.getLogger("forebay.engine")

FEATURES = (CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP)
CLOSE_S = 20.0
PIECES = {"cpu": 64, "cuda": 256}  # tokens of a prompt that a step reads


class _Run:
    """One open run."""

    def __init__(self) -> None:
        self.mail = Mailbox()
        self.sequence: Sequence | None = None
        self.is_aborted = False


class SsmEngine:
    """Runs a Mamba or Mamba2 model. See `engine.Engine` for the contract.

    Raises:
        ConfigError: An option is unknown or out of bounds, or the model's folder is not there.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = parse_options(SsmOptions, config.options)
        self._folder = model_folder(config)
        self._runs: Runs[_Run] = Runs()
        self._of: dict[Sequence, _Run] = {}
        self._loaded: Loaded | None = None
        self._prompts: Prompts | None = None
        self._loop: SlotLoop | None = None
        self._probe: GpuProbe | None = None

    async def start(self) -> None:
        """Load the model; see `Engine.start`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                loaded = await in_thread(lambda: load(self._folder, self._options, self._config.slots))
        except TimeoutError:
            message = f"the model was not loaded within {self._options.start_timeout_s:g} s (`options.start_timeout_s`)"
            raise EngineError(ErrorCode.UNHEALTHY, message) from None
        self._loaded = loaded
        self._prompts = Prompts(loaded.tokenizer, loaded.model.vocabulary, self._options.chat_template)

        def deliver(news: list[News]) -> None:
            loop.call_soon_threadsafe(self._deliver, news)

        def died(reason: str) -> None:
            loop.call_soon_threadsafe(self._die, reason)

        options, turn = self._options, await asyncio.to_thread(turn_of, self._config)
        piece = options.prefill_chunk or PIECES[loaded.device]
        self._loop = SlotLoop(loaded.model, self._config.slots, options.readers, piece, deliver, died, turn)
        self._loop.start()
        device = first_visible() if loaded.is_cuda else None
        self._probe = None if device is None else GpuProbe(device)
        self._runs.ready()
        log.info("engine_started kind=ssm model=%s device=%s", self._config.model, loaded.device)

    async def generate(self, request: InferenceRequest, run: str, seed: int, priority: int = 0) -> AsyncGenerator[Piece, None]:
        """Run a request; see `Engine.generate`."""
        self._runs.admit(run)
        check_features(request, FEATURES)
        check_sampling(request.sampling)
        state = _Run()
        self._runs.add(run, state)
        try:
            await self._enter(state, request, seed, priority)
            while True:
                piece = await state.mail.take()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            await self._stop(run, state)

    async def abort(self, run: str) -> None:
        """End a run; see `Engine.abort`."""
        if state := self._runs.get(run):
            await self._stop(run, state)

    def status(self) -> EngineFigures:
        """Give a snapshot; see `Engine.status`."""
        loaded, loop = self._loaded, self._loop
        if loaded is None or loop is None or self._prompts is None:
            return EngineFigures()
        gpu = self._probe.read() if self._probe else GpuFigures()
        running = min(loop.running, len(self._runs))
        return EngineFigures(
            running=running,
            waiting=len(self._runs) - running,
            kv_cache_usage=running / self._config.slots,
            models=(self._config.model, *self._config.aliases),
            max_context=self._options.max_context,
            trained_context=loaded.trained_context or self._options.max_context,
            features=FEATURES if self._prompts.has_template else tuple(f for f in FEATURES if f != CHAT),
            gpu=gpu.gpu,
            gpu_mem_used_bytes=gpu.mem_used_bytes,
            gpu_mem_total_bytes=gpu.mem_total_bytes,
            gpu_temperature_c=gpu.temperature_c,
            gpu_utilization=gpu.utilization,
        )

    def estimate_bytes(self, request: InferenceRequest) -> int:  # noqa: ARG002 - however long it is
        """The bytes of one request's states; see `Engine.estimate_bytes`."""
        asked: int = self._started().model.states.bytes_per_request
        return asked

    async def count_tokens(self, request: InferenceRequest) -> int:
        """Count the prompt's tokens; see `Engine.count_tokens`."""
        self._started()
        return len(await self._rendered(request))

    async def died(self) -> str:
        """Wait for the end of the backend; see `Engine.died`."""
        return await self._runs.died()

    async def drain(self) -> None:
        """Let open runs end; see `Engine.drain`."""
        await self._runs.drain()

    async def close(self) -> None:
        """Abort what is open and let go of the model; see `Engine.close`."""
        self._runs.close()
        for state in self._runs.states():
            state.is_aborted = True
            state.mail.put([], "", "abort")
        if self._loop is not None:
            loop, self._loop = self._loop, None
            if not await asyncio.to_thread(loop.stop, CLOSE_S):
                log.error("loop_still_runs kind=ssm limit_s=%g", CLOSE_S)
        if self._prompts is not None:
            self._prompts.close()
        self._loaded = None

    async def _enter(self, state: _Run, request: InferenceRequest, seed: int, priority: int) -> None:
        loaded = self._started()
        token_ids = await self._rendered(request)
        state.mail.begin(len(token_ids))
        if state.is_aborted:
            return  # meanwhile, and was told so
        room = output_room(len(token_ids), request.max_output_tokens, self._options.max_context)
        self._runs.check_alive()
        if self._loop is None:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is closed")
        drawing = Drawing(request.sampling, seed)
        sequence = Sequence(token_ids, room, drawing, request.sampling.stop, loaded.backend_tokenizer, loaded.ends)
        state.sequence = sequence
        self._of[sequence] = state
        self._loop.join(sequence, priority)

    async def _stop(self, run: str, state: _Run) -> None:
        """Take a run out of the loop unless it has ended, and wait until it is."""
        state.is_aborted = True
        sequence = state.sequence
        try:
            if sequence is not None and self._of.pop(sequence, None) is not None and self._loop is not None:
                loop, left = asyncio.get_running_loop(), asyncio.Event()
                self._loop.leave(sequence, lambda: loop.call_soon_threadsafe(left.set))
                await left.wait()
        finally:  # cancelled or not, the loop knows that it leaves
            state.mail.put([], "", "abort")
            self._runs.remove(run, state)

    def _deliver(self, news: list[News]) -> None:
        for one in news:
            state = self._of.get(one.sequence)
            if state is None:
                continue  # it was aborted meanwhile
            if one.finish is not None or one.error is not None:
                del self._of[one.sequence]
            if one.error is not None:
                state.mail.fail(EngineError(ErrorCode.INTERNAL, one.error))
            else:
                state.mail.put(one.token_ids, one.text, one.finish)

    def _die(self, reason: str) -> None:
        if not self._runs.die(reason):
            return
        log.error("engine_dead kind=ssm reason=%s", reason)
        self._of.clear()
        for state in self._runs.states():
            state.mail.fail(EngineError(ErrorCode.UNHEALTHY, f"the engine is dead: {reason}"))

    async def _rendered(self, request: InferenceRequest) -> list[int]:
        if self._prompts is None:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is not started, or closed")
        return await self._prompts.tokens(request)

    def _started(self) -> Loaded:
        if self._loaded is None:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is not started, or closed")
        return self._loaded
