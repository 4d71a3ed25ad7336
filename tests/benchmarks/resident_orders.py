"""Other orders in which experts give way, beside ours: what was used longest ago, least often, or will be farthest from now."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from engine_consumers.core.experts import Key, Residents


class LeastRecentlyUsed(Residents):
    """The one whose last use lies longest ago gives way; nothing is foreseen."""

    def __init__(self, layers: Sequence[int], chosen: int, places: int) -> None:
        super().__init__(layers, chosen, places)
        self._uses, self._number = dict[Key, int](), 0

    def visit(self, layer: int, needed: Collection[int], now_s: float, chosen: Sequence[Sequence[int]] = ()) -> list[Key]:
        for expert in sorted(needed):
            self._number += 1
            self._book((layer, expert))
        return super().visit(layer, needed, now_s, chosen)

    def foresee(self, layer: int, ranked: Sequence[Sequence[int]]) -> None:
        """Nothing is."""

    def distance(self, key: Key) -> float:
        return -self._uses.get(key, 0)

    def _book(self, key: Key) -> None:
        self._uses[key] = self._number


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """The one that was used least often gives way."""

    def _book(self, key: Key) -> None:
        self._uses[key] = self._uses.get(key, 0) + 1


class Belady(LeastRecentlyUsed):
    """The one that will be used last gives way: it knows all visits beforehand (Belady 1966)."""

    def __init__(self, layers: Sequence[int], chosen: int, places: int, visits: Sequence[tuple[int, Collection[int]]]) -> None:
        super().__init__(layers, chosen, places)
        self._ahead: dict[Key, list[int]] = defaultdict(list)
        for number in range(len(visits) - 1, -1, -1):
            layer, needed = visits[number]
            for expert in needed:
                self._ahead[layer, expert].append(number)
        self._never = len(visits)

    def distance(self, key: Key) -> float:
        ahead = self._ahead[key]
        return ahead[-1] if ahead else self._never

    def _book(self, key: Key) -> None:
        self._ahead[key].pop()
