"""What is behind the model `forebay_moe`: requests in, answers out; the network runs in the slot loop's thread.

One thread owns the runs and everything that is sent: requests, what a step gave and who has left come to it by one queue,
and between them it looks which callers have gone.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from deploy.triton.loading import Loaded
from deploy.triton.options import Budget, Cancel, Generate, ModelOptions, Operation
from engine_consumers.core.checks import check_sampling, check_tokens, output_room
from engine_consumers.errors import EngineError
from engine_consumers.stepping.loop import News, Sequence, SlotLoop
from engine_consumers.stepping.sampling import Drawing
from engine_consumers.turns import Unshared
from schemas.codecs import invalid
from schemas.errors import ErrorCode

log = logging.getLogger("forebay.triton")

WATCH_S = 0.05  # how often callers are looked after
CLOSE_S = 10.0

_decode = msgspec.json.Decoder(Operation).decode


class Answer(NamedTuple):
    """One response.

    Attributes:
        finish_reason: Empty until the last.
        error: Empty, or a JSON object with code and message.
        statistics: A JSON object.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    error: str
    statistics: str


class Caller(Protocol):
    """Whoever sent a request; used by the service's thread only."""

    def send(self, answer: Answer, *, is_last: bool) -> None:
        """Answer."""

    def has_gone(self) -> bool:
        """Whether nobody waits for answers any more."""


class _Run:
    """One open run."""

    def __init__(self, sequence: Sequence, caller: Caller) -> None:
        self.sequence, self.caller = sequence, caller
        self.is_leaving = False


class Service:
    """Answers requests until it is closed.

    Args:
        loaded: The model.
        options: How it runs.
    """

    def __init__(self, loaded: Loaded, options: ModelOptions) -> None:
        self._loaded = loaded
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._runs: dict[str, _Run] = {}
        self._of: dict[Sequence, str] = {}
        self._death: str | None = None
        self._loop = SlotLoop(
            loaded.network,
            options.slots,
            options.readers,
            options.prefill_chunk,
            lambda news: self._inbox.put(lambda: self._deliver(news)),
            lambda reason: self._inbox.put(lambda: self._die(reason)),
            Unshared(),
        )
        self._thread = threading.Thread(target=self._work, name="forebay-answers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop.start()
        self._thread.start()

    def take(self, token_ids: list[int], raw: bytes, caller: Caller) -> None:
        """Take a request, from any thread."""
        self._inbox.put(lambda: self._begin(token_ids, raw, caller))

    def close(self) -> None:
        """Answer what is open, and end."""
        if not self._loop.stop(CLOSE_S):
            log.error("loop_still_runs limit_s=%g", CLOSE_S)
        self._inbox.put(None)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        looked_s = time.monotonic()
        while True:
            try:
                item = self._inbox.get(timeout=WATCH_S if self._runs else None)
                if item is None:
                    break
                item()
            except queue.Empty:
                pass
            if time.monotonic() - looked_s >= WATCH_S:
                looked_s = time.monotonic()
                for name, run in list(self._runs.items()):
                    if not run.is_leaving and run.caller.has_gone():
                        self._leave(name, run, None)
        for name in list(self._runs):
            self._end(name, finish_reason="abort")

    def _begin(self, token_ids: list[int], raw: bytes, caller: Caller) -> None:
        try:
            self._serve(token_ids, _decoded(raw), caller)
        except EngineError as error:
            self._send(caller, error=_told(error.code, error.message))

    def _serve(self, token_ids: list[int], operation: Operation, caller: Caller) -> None:
        if self._death is not None:
            raise EngineError(ErrorCode.UNHEALTHY, f"the model is dead: {self._death}")
        if isinstance(operation, Generate):
            self._generate(token_ids, operation, caller)
            return
        if isinstance(operation, Cancel) and (run := self._runs.get(operation.run)) is not None:
            self._leave(operation.run, run, caller)
            return
        if isinstance(operation, Budget):
            self._loaded.network.experts.set_budget(operation.bytes)
        self._send(caller)

    def _generate(self, token_ids: list[int], asked: Generate, caller: Caller) -> None:
        if asked.run in self._runs:
            raise EngineError(ErrorCode.INVALID_REQUEST, f"`run`: {asked.run} is open already", "run")
        check_sampling(asked.sampling)
        check_tokens(token_ids, self._loaded.network.vocabulary)
        room = output_room(len(token_ids), asked.max_output_tokens, self._loaded.max_context)
        drawing = Drawing(asked.sampling, asked.seed)
        sequence = Sequence(token_ids, room, drawing, asked.sampling.stop, self._loaded.tokenizer, self._loaded.ends)
        self._runs[asked.run] = _Run(sequence, caller)
        self._of[sequence] = asked.run
        self._loop.join(sequence, asked.priority)

    def _leave(self, name: str, run: _Run, canceller: Caller | None) -> None:
        """Take a run out of the loop; it and whoever asked for that are answered once it is out."""

        def left() -> None:
            if self._runs.get(name) is run:
                self._end(name, finish_reason="abort")
            if canceller is not None:
                self._send(canceller)

        run.is_leaving = True
        self._loop.leave(run.sequence, lambda: self._inbox.put(left))

    def _deliver(self, news: list[News]) -> None:
        statistics = self._statistics()
        for one in news:
            name = self._of.get(one.sequence)
            if name is None or self._runs[name].is_leaving:
                continue
            if one.error is not None:
                self._end(name, error=_told(ErrorCode.INTERNAL, one.error))
            elif one.finish is not None:
                self._end(name, one.token_ids, one.text, one.finish)
            else:
                self._send(self._runs[name].caller, one.token_ids, one.text, is_last=False, statistics=statistics)

    def _die(self, reason: str) -> None:
        log.error("model_dead reason=%s", reason)
        self._death = reason
        for name in list(self._runs):
            self._end(name, error=_told(ErrorCode.UNHEALTHY, f"the model is dead: {reason}"))

    def _end(
        self, name: str, token_ids: list[int] | None = None, text: str = "", finish_reason: str = "", error: str = ""
    ) -> None:
        run = self._runs.pop(name)
        del self._of[run.sequence]
        self._send(run.caller, token_ids, text, finish_reason, error)

    def _send(
        self,
        caller: Caller,
        token_ids: list[int] | None = None,
        text: str = "",
        finish_reason: str = "",
        error: str = "",
        *,
        is_last: bool = True,
        statistics: str | None = None,
    ) -> None:
        answer = Answer(token_ids or [], text, finish_reason, error, statistics or self._statistics())
        try:
            caller.send(answer, is_last=is_last)
        except Exception as failure:  # noqa: BLE001 - whatever became of it, the others are served
            log.warning("answer_lost reason=%s", failure)

    def _statistics(self) -> str:
        told = {
            "running": self._loop.running,
            "waiting": self._loop.waiting,
            "max_context": self._loaded.max_context,
            "experts": self._loaded.network.experts.statistics(),
        }
        return json.dumps(told, separators=(",", ":"))


def _decoded(raw: bytes) -> Operation:
    try:
        return _decode(raw)
    except msgspec.ValidationError as error:
        found = invalid(error)
        raise EngineError(ErrorCode.INVALID_REQUEST, f"`request`: {found.message}", found.param) from None
    except msgspec.DecodeError as error:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"`request`: expected a JSON object: {error}", "request") from None


def _told(code: ErrorCode, message: str) -> str:
    return json.dumps({"code": code.value, "message": message})
