"""What the next step of a slot loop does: a token for all that decode, and beside it a piece of a prompt, or several short ones.

A step reads no more tokens than one piece has, and no piece is cut to fit: where a prompt is cut does not depend on company.
Prompts take turns by what is left of them, the shortest first, so that a short one does not wait for a long one; but of
`FAIR_EVERY` pieces in a row one goes to whoever came first, so that a long one ends however many short ones come. Of the
readers' places one is kept for prompts of a single piece. No request holds more than one place.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)
FAIR_EVERY = 4


class Schedule(Generic[T]):
    """Requests by where they stand: waiting, being read, decoding.

    Args:
        slots: Requests that may be read or decode at once.
        readers: That may be read at once.
        piece: Tokens of one piece.
    """

    def __init__(self, slots: int, readers: int, piece: int) -> None:
        self._slots, self._readers, self._piece = slots, readers, piece
        self._waiting: list[tuple[int, int, T]] = []
        self._lengths: dict[T, int] = {}  # of prompts that wait
        self._count = self._passed = 0  # `_passed`: pieces since the oldest one's last
        self.reading: dict[T, int] = {}  # tokens left, the oldest first
        self.decoding: list[T] = []  # by row

    @property
    def waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._lengths)

    @property
    def in_line(self) -> list[T]:
        """Those that have no place yet."""
        return list(self._lengths)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do: those that wait have their places as soon as the others are gone."""
        return not (self._lengths or self.reading or self.decoding)

    def add(self, run: T, tokens: int, priority: int = 0) -> None:
        """A request came."""
        self._count += 1
        self._lengths[run] = tokens
        heapq.heappush(self._waiting, (priority, self._count, run))

    def admit(self) -> list[T]:
        """Give places to those that wait, in order, while there are any; gives who begins to be read."""
        begun, passed = [], []
        while self._waiting and len(self.reading) + len(self.decoding) < self._slots and len(self.reading) < self._readers:
            entry = heapq.heappop(self._waiting)
            run = entry[2]
            if run not in self._lengths:
                continue  # it left
            tokens = self._lengths[run]
            if tokens > self._piece and self._long() >= self._readers - 1:
                passed.append(entry)  # shorter ones behind it may pass
                continue
            del self._lengths[run]
            self.reading[run] = tokens
            begun.append(run)
        for entry in passed:
            heapq.heappush(self._waiting, entry)
        return begun

    def next_piece(self, read: int = 0) -> tuple[T, int] | None:
        """Say whose prompt is read next, and how many tokens of it.

        Args:
            read: Tokens that this step has read already.

        Returns:
            None where nothing is to be read, or the next piece belongs to the next step.
        """
        if not self.reading:
            return None
        oldest = next(iter(self.reading))
        run = oldest if self._passed >= FAIR_EVERY - 1 else min(self.reading, key=self.reading.__getitem__)
        tokens = min(self._piece, self.reading[run])
        if read + tokens > self._piece:
            return None
        self._passed = 0 if run == oldest else self._passed + 1
        return run, tokens

    def read(self, run: T, tokens: int) -> bool:
        """A piece was read; whether that was all. It then decodes, in the row behind the others."""
        self.reading[run] -= tokens
        if self.reading[run]:
            return False
        del self.reading[run]
        self.decoding.append(run)
        return True

    def leave(self, run: T) -> tuple[int, int] | None:
        """A request ends, wherever it stands.

        Returns:
            Where it decoded and was not the last: from which row to which a state has to move.
        """
        if self._lengths.pop(run, None) is not None or self.reading.pop(run, None) is not None:
            return None
        if run not in self.decoding:
            return None
        row, last = self.decoding.index(run), len(self.decoding) - 1
        self.decoding[row] = self.decoding[last]
        self.decoding.pop()
        return (last, row) if row != last else None

    def _long(self) -> int:
        return sum(left > self._piece for left in self.reading.values())
