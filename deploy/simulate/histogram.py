"""Quantiles of any number of values in bounded memory: counts in bins that are 1 % wide each, so 0.5 % off at most."""

import math
from collections.abc import Iterable

_WIDTH = math.log(1.01)
_LEAST, _MOST = 1e-3, 1e12  # a microsecond to decades, in milliseconds


class Histogram:
    """Counts values above 0; smaller ones count as the least."""

    __slots__ = ("bins", "count", "most", "total")

    def __init__(self) -> None:
        self.bins: dict[int, int] = {}
        self.count = 0
        self.total = self.most = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        value = min(max(value, _LEAST), _MOST)
        place = int(math.log(value / _LEAST) / _WIDTH)
        bins = self.bins
        bins[place] = bins.get(place, 0) + 1
        self.count += 1
        self.total += value
        self.most = max(self.most, value)

    @property
    def mean(self) -> float:
        """Of all values; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Give the value below which that share of all lies; 0 of none."""
        wanted, seen = share * self.count, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= wanted:
                return min(self.most, _LEAST * math.exp((place + 0.5) * _WIDTH))
        return self.most

    def curve(self, points: Iterable[float]) -> list[tuple[float, float]]:
        """Give (value, share at most so large) for some shares, for a plot."""
        return [(self.quantile(share), share) for share in points]

    def merge(self, other: "Histogram") -> None:
        """Add another's counts."""
        for place, count in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + count
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
