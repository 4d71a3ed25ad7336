"""Between what makes a run's tokens and the caller, who may be slower: what came meanwhile is given in one piece."""

import asyncio
from collections.abc import Sequence

from engine_consumers.engine import Piece
from engine_consumers.errors import EngineError
from schemas.formats import TokenLogprob
from schemas.messages import ExpertFigures, FinishReason, Usage


class Mailbox:
    """The output of one run; to be used from the event loop only.

    Attributes:
        experts: What the last piece is to tell of them.
    """

    def __init__(self) -> None:
        self._prompt_tokens = self._output_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._text = ""
        self._usage: Usage | None = None
        self.experts: ExpertFigures | None = None
        self._finish: FinishReason | None = None
        self._error: EngineError | None = None
        self._news = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether the last piece is there."""
        return self._finish is not None

    def begin(self, prompt_tokens: int) -> None:
        """Tell how long the prompt is."""
        self._prompt_tokens = prompt_tokens

    def counted(self, prompt_tokens: int, output_tokens: int) -> None:
        """Tell what the backend itself has counted, where its tokens are not given; before the end."""
        self._usage = Usage(prompt_tokens, output_tokens)

    def put(self, token_ids: list[int], text: str, finish: FinishReason | None, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """More came, or only a sign that the run moves; what comes after the end is dropped."""
        if self._finish is not None:
            return
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._output_tokens += len(token_ids)
        self._text += text
        self._finish = finish
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """It ends with an error; the first one counts."""
        self._error = self._error or error
        self._news.set()

    async def take(self) -> Piece:
        """Wait for news and give all of it; an error only after everything that came before it.

        Raises:
            EngineError: What `fail` was told.
        """
        await self._news.wait()
        self._news.clear()
        if self._error is not None and self._finish is None:
            if not self._token_ids:
                raise self._error
            self._news.set()
        token_ids, text, logprobs = self._token_ids, self._text, self._logprobs
        self._token_ids, self._text, self._logprobs = [], "", []
        usage = self._usage or Usage(self._prompt_tokens, self._output_tokens)
        return Piece(token_ids, text, self._finish, usage, logprobs, self.experts if self._finish else None)
