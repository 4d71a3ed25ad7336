"""The engine over a Triton server's model: requests out by gRPC, tokens in, through a profile.

* Each run is read by a task that is not cancelled while the server is there: ending a run early is always said to the model,
  again and again until its stream has ended, as a cancel may overtake the run that it is for.
* Whether the server is there is asked every `WATCH_S`, and at once when a run fails. A server that somebody else runs may go
  and return: meanwhile the engine is unwell, and what was open goes back. The end of a server of our own is the engine's.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from engine_consumers.core.checks import check_features, check_sampling, output_room
from engine_consumers.engine import EngineFigures, Piece
from engine_consumers.errors import EngineError
from engine_consumers.mailbox import Mailbox
from engine_consumers.model_folder import model_folder
from engine_consumers.moe.experts import during, read_experts
from engine_consumers.moe.folder import Model, read_model
from engine_consumers.moe.options import read_options
from engine_consumers.moe.profiles import PROFILES, Asked, Names, Said
from engine_consumers.moe.server import Server
from engine_consumers.moe.tensors import Signature, check
from engine_consumers.orphans import OrphanGuard
from engine_consumers.prompts import Prompts, estimated_tokens
from engine_consumers.runs import Runs
from engine_consumers.threads import in_thread
from schemas.config import EngineConfig
from schemas.errors import ConfigError, ErrorCode
from schemas.features import CHAT
from schemas.messages import ExpertFigures, InferenceRequest

if TYPE_CHECKING:
    from engine_consumers.moe.link import Call, Link

log = logging.getLogger("forebay.engine")

WATCH_S = 0.5
MISSES_MAX = 3  # answers in a row that may be missing
ABORT_AGAIN_S = 0.05
LAST_WORD_S = 2.0
CLOSE_S = 10.0


class _Run:
    """One open run: what it gives, and the task that reads the server for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mail = Mailbox()
        self.has_begun = self.is_aborted = False
        self.call: Call | None = None
        self.experts: ExpertFigures | None = None  # as they were when it began
        self.pump: asyncio.Task[None] | None = None


class _Up(NamedTuple):
    """What is there once the engine has started."""

    link: "Link"
    model: Model
    prompts: Prompts
    found: Signature
    given: Names
    max_context: int


class MoeEngine:
    """Runs a model behind Triton. See `engine.Engine` for the contract.

    Raises:
        ConfigError: An option is wrong, there is no folder of the model, or it was to take turns.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = read_options(config.options)
        self._folder = model_folder(config)
        if config.time_slices is not None:
            message = "`time_slices`: the server steps by itself and takes no turns: give it a device of its own"
            raise ConfigError(message)
        self._profile = PROFILES[self._options.profile]
        self._triton_model = self._options.triton_model or self._profile.model
        self._runs: Runs[_Run] = Runs()
        self._prefix, self._numbers = secrets.token_hex(6), count(1)  # others may use the server
        self._server = Server(self._options.server) if self._options.server else None
        self._guard = OrphanGuard()
        self._link: Link | None = None
        self._up: _Up | None = None
        self._statistics: dict[str, Any] = {}
        self._experts: ExpertFigures | None = None
        self._doubt = asyncio.Event()
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reach the server, or start it; see `Engine.start`."""
        try:
            from engine_consumers.moe.link import Link  # noqa: PLC0415 - only where Triton's client is
        except ImportError as error:
            message = f"`kind`: Triton's client cannot be imported here: {error}: run the worker in the engine's own environment"
            raise ConfigError(message) from error
        model = await in_thread(lambda: read_model(self._folder, self._options.tokenizer))
        prompts = Prompts(model.tokenizer, model.vocabulary, self._options.chat_template)
        if self._server is not None:
            self._guard.start()
        address = await self._server.start() if self._server is not None else str(self._options.url)
        self._link = link = Link(address, self._triton_model, self._options)
        await self._wait_ready(link)
        found = await self._check(link)
        self._up = _Up(link, model, prompts, found, frozenset(found.inputs), self._options.max_context or model.trained_context)
        await self._ask_status()
        limit = self._statistics.get("max_context")
        if self._options.max_context is None and isinstance(limit, int):
            self._up = self._up._replace(max_context=limit)
        self._watchers = [asyncio.create_task(self._watch(self._up))]
        if self._server is not None:
            self._watchers.append(asyncio.create_task(self._watch_child(self._server)))
        self._runs.ready()
        log.info("engine_started kind=moe model=%s profile=%s server=%s", self._config.model, self._options.profile, address)

    async def generate(self, request: InferenceRequest, run: str, seed: int, priority: int = 0) -> AsyncGenerator[Piece, None]:
        """Run a request; see `Engine.generate`."""
        self._runs.admit(run)
        check_sampling(request.sampling)
        up = self._started()
        check_features(request, self._profile.features(up.given))  # of `chat` the prompts say more
        state = _Run(f"{self._prefix}.{next(self._numbers)}.{run}")
        self._runs.add(run, state)
        state.pump = asyncio.create_task(self._pump(up, state, run, request, seed, priority))
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
        up = self._up
        if up is None:
            return EngineFigures(is_healthy=False)
        running = sum(state.has_begun for state in self._runs.states())
        knows_slots = bool(self._statistics)
        return EngineFigures(
            is_healthy=self._runs.away is None and self._runs.death is None,
            running=running,
            waiting=len(self._runs) - running,
            kv_cache_usage=min(running / self._config.slots, 1.0) if knows_slots else None,
            models=(self._config.model, *self._config.aliases),
            max_context=up.max_context,
            trained_context=up.model.trained_context,
            features=self._features(up),
            experts=self._experts,
        )

    def estimate_bytes(self, request: InferenceRequest) -> int:
        """Estimate the bytes of keys and values; see `Engine.estimate_bytes`."""
        up = self._started()
        return min(estimated_tokens(request) + request.max_output_tokens, up.max_context) * up.model.kv_bytes_per_token

    async def count_tokens(self, request: InferenceRequest) -> int:
        """Count the prompt's tokens; see `Engine.count_tokens`."""
        return len(await self._started().prompts.tokens(request))

    async def died(self) -> str:
        """Wait for the end of the server; see `Engine.died`."""
        return await self._runs.died()

    async def drain(self) -> None:
        """Let open runs end; see `Engine.drain`."""
        await self._runs.drain()

    async def close(self) -> None:
        """Abort what is open, and let go of the server; see `Engine.close`."""
        self._runs.close()
        for watcher in self._watchers:
            watcher.cancel()
        up, self._up = self._up, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(self._stop(state) for state in self._runs.states()))
        for state in self._runs.states():
            state.mail.put([], "", "abort")
        link, self._link = self._link, None
        if link is not None:
            if self._options.load and up is not None and self._runs.death is None:
                with contextlib.suppress(ConfigError):
                    await link.unload()
            await link.close()
        if self._server is not None:
            await self._server.stop()
            await in_thread(self._guard.release)
        if up is not None:
            up.prompts.close()

    # -- the server -------------------------------------------------------------------------------------------------------

    async def _wait_ready(self, link: "Link") -> None:
        """Wait for the model, and no longer than a server of our own lives."""
        limit_s = self._options.start_timeout_s
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(link.wait_ready())]
        if self._server is not None:
            tasks.append(asyncio.create_task(self._server.ended()))
        try:
            done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        if not done:
            message = (
                f"{link.what} had its model {self._triton_model!r} not ready within {limit_s:g} s (`options.start_timeout_s`)"
            )
            raise EngineError(ErrorCode.UNHEALTHY, message)
        if tasks[0] in done:
            await tasks[0]
            return
        raise EngineError(ErrorCode.UNHEALTHY, await tasks[1])

    async def _check(self, link: "Link") -> Signature:
        found = await link.signature()
        check(self._options.profile, self._triton_model, found, self._profile.inputs, self._profile.outputs)
        return found

    async def _watch(self, up: _Up) -> None:
        """Look after the server, as long as the engine lives."""
        misses = 0
        while self._runs.death is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._doubt.wait()
            is_doubted = self._doubt.is_set()
            self._doubt.clear()
            why = await up.link.absence()
            misses = misses + 1 if why else 0
            if why is None and self._runs.away is not None:
                await self._welcome(up)
            elif why is None:
                await self._ask_status()
            elif (is_doubted or misses >= MISSES_MAX) and self._runs.away is None:
                await self._lose(why)

    async def _watch_child(self, server: Server) -> None:
        self._die(await server.ended())

    async def _lose(self, why: str) -> None:
        """The server is gone: for good where it is our own, which may say more by how it ended."""
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    why = await self._server.ended()
            self._die(why)
            return
        log.warning("server_away kind=moe reason=%s", why)
        self._runs.away = why
        self._fail_all(why)

    async def _welcome(self, up: _Up) -> None:
        """The server is back: it is used again if it is still the one that it was."""
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await up.link.wait_ready()
                await self._check(up.link)
        except ConfigError as error:
            self._die(str(error))
        except (EngineError, TimeoutError):
            return  # gone again
        else:
            log.info("server_back kind=moe model=%s", self._config.model)
            self._runs.away = None

    def _die(self, reason: str) -> None:
        if self._runs.die(reason):
            log.error("engine_dead kind=moe reason=%s", reason)
            self._fail_all(f"the engine is dead: {reason}")

    def _fail_all(self, why: str) -> None:
        for state in self._runs.states():
            state.mail.fail(EngineError(ErrorCode.UNHEALTHY, why))
            if state.call is not None:
                state.call.cancel()

    async def _operate(self, op: str, **fields: object) -> bool:
        """Ask the model for something beside the runs; whether it knows that, and has answered."""
        link, up, values = self._link, self._up, self._profile.operation(op, **fields)
        if values is None or link is None or up is None:
            return False
        try:
            async for response in link.call(values, self._profile.inputs, up.found, self._options.call_timeout_s).responses():
                said = self._profile.reader(_NOTHING, up.model.words).read(response.values, is_final=False)
                self._take_in(said)
        except EngineError as error:
            log.warning("operation_failed kind=moe op=%s reason=%s", op, error.message)
            return False
        return True

    async def _ask_status(self) -> None:
        await self._operate("status")

    # -- runs -------------------------------------------------------------------------------------------------------------

    async def _pump(self, up: _Up, state: _Run, run: str, request: InferenceRequest, seed: int, priority: int) -> None:
        """Read the server's responses into the run's mailbox; the run is open as long as this task."""
        try:
            token_ids = await up.prompts.tokens(request)
            text = await up.prompts.text(request) if self._profile.takes_text else ""
            state.mail.begin(len(token_ids))
            room = output_room(len(token_ids), request.max_output_tokens, up.max_context)
            asked = Asked(state.name, token_ids, text, room, seed, priority, request.sampling)
            values = self._profile.ask(asked, up.given, up.model.words)
            self._runs.check_alive()
            if not state.is_aborted:
                await self._read(up, state, run, asked, values)
        except EngineError as error:
            if error.code in {ErrorCode.UNHEALTHY, ErrorCode.INTERNAL}:
                self._doubt.set()
            state.mail.fail(error)
        except Exception as error:
            log.exception("run_failed kind=moe")
            state.mail.fail(EngineError(ErrorCode.INTERNAL, f"the answer cannot be read: {error or type(error).__name__}"))
        else:
            if state.is_aborted:
                state.mail.put([], "", "abort")
        finally:
            self._runs.remove(run, state)

    async def _read(self, up: _Up, state: _Run, run: str, asked: Asked, values: dict[str, list[Any]]) -> None:
        limit_s = self._options.run_timeout_s
        state.experts = self._experts
        state.call = call = up.link.call(values, self._profile.inputs, up.found, limit_s, state.name)
        reader = self._profile.reader(asked, up.model.words)
        async for response in call.responses():
            said = reader.read(response.values, is_final=response.is_final)
            if response.is_final:
                self._runs.remove(run, state)  # before whoever reads it learns of its end
            self._deliver(state, said)
            if said.finish is not None and not response.is_final:
                call.cancel()  # cut here, so it need not go on there

    def _deliver(self, state: _Run, said: Said) -> None:
        state.has_begun = state.has_begun or bool(said.token_ids or said.text)
        self._take_in(said)
        if state.is_aborted:  # what was on its way is dropped: the run ends where it was when it was told to
            said = Said([], "", said.finish and "abort")
        if said.finish is not None:
            state.mail.experts = during(state.experts, self._experts)
        if said.counted is not None:
            state.mail.counted(*said.counted)
        state.mail.put(said.token_ids, said.text, said.finish)

    def _take_in(self, said: Said) -> None:
        if said.statistics is not None:
            self._statistics, self._experts = said.statistics, read_experts(said.statistics)

    async def _stop(self, state: _Run) -> None:
        """Wait until the server has let a run go, telling it to, unless the run has ended by itself."""
        state.is_aborted = True
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._options.call_timeout_s
        while state.pump is not None and not state.pump.done():
            if state.call is not None and not state.mail.is_finished:
                told = await self._operate("cancel", run=state.name)
                if not told or loop.time() > give_up_s:
                    state.call.cancel()
            await asyncio.wait({state.pump}, timeout=ABORT_AGAIN_S)

    # -- what it can do ---------------------------------------------------------------------------------------------------

    def _features(self, up: _Up) -> tuple[str, ...]:
        found = self._profile.features(up.given)
        return found if up.prompts.has_template else tuple(feature for feature in found if feature != CHAT)

    def _started(self) -> _Up:
        if self._up is None:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is not started, or closed")
        return self._up


_NOTHING = Asked("", [], "", 1, 0, 0, InferenceRequest(prompt="-").sampling)
