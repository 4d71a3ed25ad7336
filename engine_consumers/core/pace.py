"""How fast a worker has been lately. Pure, like all of core."""

from collections import deque

WINDOW_S = 10


class _Second:
    """What fell into one second."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = self.runs = 0
        self.latency_ms = 0.0


class Pace:
    """Moving figures over the second that runs and the `WINDOW_S` before it, or since the first token came."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._seconds: deque[_Second] = deque()

    def produced(self, tokens: int, now_s: float) -> None:
        """Tokens of an answer came."""
        self._began_s = now_s if self._began_s is None else self._began_s
        self._at(now_s).tokens += tokens

    def completed(self, latency_ms: float, now_s: float) -> None:
        """A run came to its end, so long after it was read."""
        second = self._at(now_s)
        second.runs += 1
        second.latency_ms += latency_ms

    def latency_ms(self, now_s: float) -> float | None:
        """Mean of the runs that ended, from being read to the end; None where there was none."""
        self._forget(now_s)
        runs = sum(second.runs for second in self._seconds)
        return sum(second.latency_ms for second in self._seconds) / runs if runs else None

    def tokens_per_s(self, now_s: float) -> float:
        """Tokens of all answers together, counted as they come."""
        self._forget(now_s)
        since_s = int(now_s) - WINDOW_S if self._began_s is None else max(self._began_s, int(now_s) - WINDOW_S)
        return sum(second.tokens for second in self._seconds) / max(now_s - since_s, 1.0)

    def _at(self, now_s: float) -> _Second:
        if not self._seconds or self._seconds[-1].number != int(now_s):
            self._forget(now_s)
            self._seconds.append(_Second(int(now_s)))
        return self._seconds[-1]

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0].number < int(now_s) - WINDOW_S:
            self._seconds.popleft()
