"""What one run has produced so far, and when."""

from collections.abc import Callable

from engine_consumers.engine import Piece
from schemas.formats import TokenLogprob
from schemas.messages import ExpertFigures, FinishReason, Timing, Usage

MS_PER_S = 1000.0


class Generation:
    """Gathers a run's pieces.

    Args:
        received_at_ms: When the client's record was written (Unix time); latencies count from there.
        clock: Unix time in milliseconds.
    """

    def __init__(self, received_at_ms: int, clock: Callable[[], int]) -> None:
        self._received_at_ms, self._clock = received_at_ms, clock
        self._started_ms = clock()
        self._first_ms: int | None = None
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.usage = Usage()
        self.experts: ExpertFigures | None = None

    @property
    def text(self) -> str:
        """The whole output."""
        return "".join(self._texts)

    def add(self, piece: Piece) -> None:
        """Take in the next piece."""
        if self._first_ms is None and piece.token_ids:
            self._first_ms = self._clock()
        self._texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage
        self.experts = piece.experts or self.experts

    @property
    def started_ms(self) -> int:
        """When it began (Unix time)."""
        return self._started_ms

    def timing(self) -> Timing:
        """Where the time went until now."""
        now = self._clock()
        run_ms = now - self._started_ms
        return Timing(
            queued_ms=max(self._started_ms - self._received_at_ms, 0),
            ttft_ms=None if self._first_ms is None else max(self._first_ms - self._received_at_ms, 0),
            latency_ms=max(now - self._received_at_ms, 0),
            tokens_per_second=round(len(self.token_ids) * MS_PER_S / run_ms, 2) if run_ms and self.token_ids else None,
        )
