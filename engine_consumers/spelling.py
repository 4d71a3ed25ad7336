"""From tokens, one after another, to the text that may be shown."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engine_consumers.core.stream import StopText
from schemas.messages import FinishReason


class Spelling:
    """Spells one answer and says where it ends.

    Args:
        tokenizer: Of the model.
        ends: Tokens that end it.
        stops: Strings that end it.
        room: Tokens that it may be given.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int], stops: list[str], room: int) -> None:
        self.room = room
        self.said = 0
        self._stop = StopText(stops)
        self._tokenizer, self._ends = tokenizer, ends
        self._decoder = DecodeStream(skip_special_tokens=True)

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """Take in the next token; gives the text that is safe to show, and whether that was all."""
        self.said += 1
        if token in self._ends:
            return self._stop.finish(), "stop"
        text = self._stop.push(self._spelled(token))
        if self._stop.hit is not None:
            return text, "stop"
        if self.said >= self.room:
            return text + self._stop.finish(), "length"
        return text, None

    def _spelled(self, token: int) -> str:
        try:
            return self._decoder.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 - a bare one, where a token changes the text before it: what follows is spelled anew
            self._decoder = DecodeStream(skip_special_tokens=True)
            return self._decoder.step(self._tokenizer, token) or ""
