"""Text and chunks of a stream, without clock or I/O.

`Utf8Text` joins bytes to whole characters, `StopText` cuts at stop strings, `Coalescer` gathers pieces into chunks.
"""

import codecs
from collections.abc import Sequence

from schemas.formats import TokenLogprob
from schemas.messages import FinishReason, TokenChunk

LOGPROB_BYTES = 64  # of one token's, in JSON


class Utf8Text:
    """Decodes bytes as they come; half a character waits for its other half. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, data: bytes) -> str:
        """Give the characters that are whole now."""
        return self._decoder.decode(data)


class StopText:
    """Ends a text at the first stop string to be completed, and gives nothing of it away, whatever the chunks' borders.

    Of several strings completed by one character the one that began first wins. What may still become a stop string is
    held back; at most the longest one's length.

    Attributes:
        hit: The stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take more text and give what is safe to show."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.hit = min(ends)
            self._held = ""
            return text[:at]
        keep = self._tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """No more text comes: give what was held back."""
        text, self._held = self._held, ""
        return text

    def _tail(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class Coalescer:
    """Gathers a run's pieces into chunks: the first at once, later ones after `chunk_ms` or `bytes_max`, in order.

    The owner calls `flush` when `due_ms` has come, and `finish` once at the end.

    Args:
        request_id: Of the chunks.
        run_id: Of the chunks.
        chunk_ms: Time that text may wait for more, in milliseconds.
        bytes_max: Bytes that may wait: of the text in UTF-8, and about those of log probabilities. A chunk is larger by at
            most one piece.
    """

    def __init__(self, request_id: str, run_id: str, chunk_ms: float, bytes_max: int) -> None:
        self._request_id = request_id
        self._run_id = run_id
        self._chunk_ms = chunk_ms
        self._bytes_max = bytes_max
        self._seq = 0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._bytes = 0
        self._sent_ms: float | None = None

    @property
    def due_ms(self) -> float | None:
        """When `flush` should be called, on the clock of `add`; None while nothing waits."""
        if self._sent_ms is None or not (self._tokens or self._bytes):
            return None
        return self._sent_ms + self._chunk_ms

    def add(self, token_ids: Sequence[int], text: str, now_ms: float, logprobs: Sequence[TokenLogprob] = ()) -> TokenChunk | None:
        """Take a piece and give a chunk where one is due."""
        self._tokens.extend(token_ids)
        if text:
            self._texts.append(text)
            self._bytes += len(text.encode())
        self._logprobs.extend(logprobs)
        if self._bytes + LOGPROB_BYTES * sum(1 + len(one.top) for one in self._logprobs) >= self._bytes_max:
            return self._chunk(now_ms)
        return self.flush(now_ms)

    def flush(self, now_ms: float) -> TokenChunk | None:
        """Give a chunk of what waits if its time has come. Tokens without any text yet wait for the first text."""
        if not self._bytes and (self._sent_ms is None or not self._tokens):
            return None
        if self._sent_ms is not None and now_ms < self._sent_ms + self._chunk_ms:
            return None
        return self._chunk(now_ms)

    def finish(self, reason: FinishReason, now_ms: float) -> TokenChunk:
        """Give the last chunk, with all that waits."""
        return self._chunk(now_ms, reason)

    def _chunk(self, now_ms: float, reason: FinishReason | None = None) -> TokenChunk:
        text = "".join(self._texts)
        chunk = TokenChunk(self._request_id, self._run_id, self._seq, self._tokens, text, reason, self._logprobs)
        self._seq += 1
        self._tokens, self._texts, self._logprobs, self._bytes = [], [], [], 0
        self._sent_ms = now_ms
        return chunk
