"""The deadlines of the requests in hand, the nearest first.

Requests leave the hand without a word to the heap, so most of what lies in it may be gone; it is rebuilt once that is
more than half, which costs each request a constant on average. A request without a deadline never enters.
"""

import heapq
from collections.abc import Mapping

from dispatcher.core.item import NEVER_MS, Item, Work
from schemas.messages import Envelope

SPARE = 64  # so many that are gone are never worth a rebuild


class Deadlines:
    """Knows who expires when.

    Args:
        in_hand: The requests that wait; one that is not in it any more does not expire.
    """

    def __init__(self, in_hand: Mapping[Work, Item]) -> None:
        self._in_hand = in_hand
        self._heap: list[tuple[int, int, Work, Envelope]] = []  # not the item: its bytes may go
        self._count = 0
        self._rebuild_at = SPARE

    def __len__(self) -> int:
        """Entries held, those of requests that are gone included."""
        return len(self._heap)

    def push(self, item: Item) -> None:
        """A request came into hand."""
        if item.deadline_ms >= NEVER_MS:
            return
        if len(self._heap) >= self._rebuild_at:
            self._heap = [entry for entry in self._heap if self._find(entry) is not None]
            heapq.heapify(self._heap)
            self._rebuild_at = 2 * len(self._heap) + SPARE
        self._count += 1
        heapq.heappush(self._heap, (item.deadline_ms, self._count, item.work, item.envelope))

    def passed(self, now_ms: int) -> list[Item]:
        """Take out the requests in hand whose deadline has passed, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_ms:
            item = self._find(heapq.heappop(self._heap))
            if item is not None:
                found.append(item)
        return found

    def _find(self, entry: tuple[int, int, Work, Envelope]) -> Item | None:
        item = self._in_hand.get(entry[2])
        return item if item is not None and item.envelope is entry[3] else None  # the record may have come again
