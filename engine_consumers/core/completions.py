"""What a worker tells of the runs that ended, on its status. Pure, like all of core.

A reader may miss a snapshot, so each carries the ends of runs that earlier ones told, too, and counts all there were.
"""

from collections import deque
from itertools import islice

from schemas.messages import Completion

AGAIN_MAX = 64
HELD_MAX = 1_024


class Completions:
    """The last ends of runs: all that were not told yet, and of those before them at most `AGAIN_MAX` once more.

    Together no more than `HELD_MAX`: while nobody can be told, the oldest are forgotten.

    Attributes:
        count: Runs that ended since the start.
    """

    def __init__(self) -> None:
        self.count = 0
        self._told = 0
        self._last: deque[Completion] = deque(maxlen=HELD_MAX)

    def add(self, completion: Completion) -> None:
        """A run ended."""
        self._last.append(completion)
        self.count += 1

    def to_tell(self) -> list[Completion]:
        """What the next snapshot carries, the oldest first."""
        skipped = len(self._last) - (self.count - self._told) - AGAIN_MAX
        return list(islice(self._last, max(skipped, 0), None))

    def told(self, count: int) -> None:
        """A snapshot was published in which `count` was this."""
        self._told = count
