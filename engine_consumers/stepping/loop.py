"""The slot loop: a thread that runs the model step by step, for whoever has a place then.

A step gives a token to each request that decodes, and reads a piece of a prompt, or several short ones. Requests join and
leave between any two steps. What a step gave is handed over all at once.
"""

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine_consumers.core.schedule import Schedule
from engine_consumers.spelling import Spelling
from engine_consumers.stepping.sampling import Drawing, draw
from engine_consumers.turns import Turn
from schemas.messages import FinishReason


class Rows(Protocol):
    """The states of all requests, one row each; see `ssm/states.py`."""

    def clear(self, row: int) -> None:
        """Make a row ready for another request."""

    def move(self, source: int, target: int) -> None:
        """Put what a row holds into another."""


class Model(Protocol):
    """A model whose requests join and leave between steps; logits are [requests, vocabulary]."""

    @property
    def states(self) -> Rows:
        """Rows 0 to slots-1 decode, those above are being read."""

    def read(self, token_ids: list[int], row: int) -> Tensor:
        """Read a piece of a prompt onto a row; gives the logits [vocabulary] after its last token."""

    def step(self, token_ids: list[int]) -> Tensor:
        """Feed the first rows one token each."""


class Sequence(Spelling):
    """One request in the loop.

    Args:
        prompt: Its tokens.
        room: Tokens that it may be given.
        drawing: How it draws.
        stops: Strings that end it.
        tokenizer: Of the model.
        ends: Tokens that end it.
    """

    def __init__(
        self, prompt: list[int], room: int, drawing: Drawing, stops: list[str], tokenizer: Tokenizer, ends: frozenset[int]
    ) -> None:
        super().__init__(tokenizer, ends, stops, room)
        self.prompt, self.drawing = prompt, drawing
        self.row = -1  # while its prompt is read
        self.done = 0  # tokens of the prompt that were read
        self.last = 0

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """See `Spelling.take`."""
        self.last = token
        return super().take(token)


class News(NamedTuple):
    """What a step gave to a request.

    Attributes:
        sequence: Whose it is.
        token_ids: Its next token; none with an error, and where its prompt is read or waits to be: it only moves.
        text: What may be shown.
        finish: Whether that was all.
        error: Why it ended with an error.
    """

    sequence: Sequence
    token_ids: list[int]
    text: str = ""
    finish: FinishReason | None = None
    error: str | None = None


NOT_FINITE = "the model gave logits that are not finite: its weights, or its dtype's range, do not serve this prompt"


class SlotLoop:
    """Runs until it is stopped, or the model fails. Whoever waits to be taken out is told in either case.

    Args:
        model: The model.
        slots: Requests at once.
        readers: Prompts that are read at once.
        piece: Tokens of a prompt that a step reads.
        deliver: Told what a step gave, in the loop's thread.
        died: Told why the loop ended by itself, in the loop's thread.
        turn: Held during each step; it belongs to the loop, which lets go of it when it ends.
    """

    def __init__(
        self,
        model: Model,
        slots: int,
        readers: int,
        piece: int,
        deliver: Callable[[list[News]], None],
        died: Callable[[str], None],
        turn: Turn,
    ) -> None:
        self._model, self._deliver, self._died, self._turn = model, deliver, died, turn
        self._schedule: Schedule[Sequence] = Schedule(slots, readers, piece)
        self._rows = [slots + n for n in range(readers)]
        self._news = threading.Condition()
        self._joining: list[tuple[Sequence, int]] = []
        self._leaving: list[tuple[Sequence, Callable[[], object]]] = []
        self._is_stopped = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="forebay-steps", daemon=True)
        self.running = self.waiting = 0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, limit_s: float) -> bool:
        """End after the step that is under way; False where that takes longer."""
        with self._news:
            self._is_stopped = True
            self._news.notify()
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def join(self, sequence: Sequence, priority: int) -> None:
        """Let a request in; it has its place once there is one."""
        with self._news:
            self._joining.append((sequence, priority))
            self._news.notify()

    def leave(self, sequence: Sequence, left: Callable[[], object]) -> None:
        """Take a request out, wherever it stands; `left` is called once it is, in the loop's thread while that runs."""
        with self._news:
            if not self._has_ended:
                self._leaving.append((sequence, left))
                self._news.notify()
                return
        left()

    def _run(self) -> None:
        try:
            while self._heed():
                with self._turn:
                    news = self._step()
                self._count()
                if news:
                    self._deliver(news)
        except BaseException as error:  # noqa: BLE001 - whatever the device raises ends the backend, and is told
            self._died(f"{type(error).__name__}: {error}")
        finally:
            self._turn.close()
            self._end()

    def _end(self) -> None:
        with self._news:
            self._has_ended = True
            leaving, self._leaving = self._leaving, []
        self.running = self.waiting = 0
        for _, left in leaving:
            left()

    def _heed(self) -> bool:
        """Take in who joined and left, waiting while there is nothing to do; False to stop."""
        schedule = self._schedule
        while True:
            if schedule.is_empty and not self._joining:
                self._turn.rest()
            with self._news:
                while schedule.is_empty and not (self._joining or self._leaving or self._is_stopped):
                    self._news.wait()
                if self._is_stopped:
                    return False
                joining, self._joining = self._joining, []
                leaving = list(self._leaving)
            for sequence, priority in joining:
                schedule.add(sequence, len(sequence.prompt), priority)
            for sequence, _ in leaving:
                self._free(sequence)
            for sequence in schedule.admit():
                sequence.row = self._rows.pop()
                self._model.states.clear(sequence.row)
            self._count()
            with self._news:
                del self._leaving[: len(leaving)]
            for _, left in leaving:
                left()
            if schedule.decoding or schedule.reading:
                return True

    def _step(self) -> list[News]:
        model, schedule = self._model, self._schedule
        news: list[News] = []
        asked = list(schedule.decoding)
        if asked:
            logits = model.step([sequence.last for sequence in asked])
            news += self._taken(asked, draw(logits, [sequence.drawing for sequence in asked]))
        read = 0
        while (piece := schedule.next_piece(read)) is not None:
            news += self._read(*piece)
            read += piece[1]
        if read:
            news += [News(sequence, []) for sequence in schedule.in_line]
        self._turn.computed(len(asked) + read)
        return news

    def _read(self, sequence: Sequence, count: int) -> list[News]:
        model, schedule = self._model, self._schedule
        logits = model.read(sequence.prompt[sequence.done : sequence.done + count], sequence.row)
        sequence.done += count
        if schedule.read(sequence, count):
            model.states.move(sequence.row, len(schedule.decoding) - 1)
            self._rows.append(sequence.row)
            sequence.row = -1
            return self._taken([sequence], draw(logits.unsqueeze(0), [sequence.drawing]))
        if logits.is_cuda:
            torch.cuda.current_stream().synchronize()  # so that the step, and its turn, end when the device has done it
        return [News(sequence, [])]

    def _taken(self, sequences: Iterable[Sequence], tokens: Iterable[int | None]) -> list[News]:
        news: list[News] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            one = News(sequence, [], error=NOT_FINITE) if token is None else News(sequence, [token], *sequence.take(token))
            news.append(one)
            if one.finish is not None or one.error is not None:
                self._free(sequence)
        return news

    def _free(self, sequence: Sequence) -> None:
        moved = self._schedule.leave(sequence)
        if moved is not None:
            self._model.states.move(*moved)
        if sequence.row >= 0:
            self._rows.append(sequence.row)
            sequence.row = -1

    def _count(self) -> None:
        schedule = self._schedule
        self.running, self.waiting = len(schedule.reading) + len(schedule.decoding), schedule.waiting
