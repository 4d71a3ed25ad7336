"""Which experts of a mixture stay on the device, where not all of them have room: the least urgent one gives way.

Layers are visited in turn, so an expert is next needed when its layer comes round: after `d` layers with the chance `p`, else
some rounds later. Belady's rule (1966) has the one go whose next use is farthest; the future not being known, its expectation
stands in: `d + (1 - p) L / h`, for `L` layers. The heat `h` is the share of its layer's visits that needed it, where older
visits count less: after `window_s` a visit counts 1/e. For `p` it is the heat as well, unless the visit was foreseen.

A layer's router, given what the layer before it was given, names most of the experts that it will choose a moment later. How
often it is right is learned, for each layer and each rank. What is foreseen is fetched ahead where it is likely, and needed
sooner by a margin than what would give way: two of the same heat do not chase each other out. An expert that is needed and
absent comes in whatever its heat; if it is cold it is also the next to go, and the hot ones stay.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from math import exp

Key = tuple[int, int]  # layer, expert

LEARNING = 0.01  # how much one token changes what is known of a router's foresight
LIKELY = 0.5
RIGHT_AT_FIRST, WRONG_AT_FIRST = 0.5, 0.1  # of experts that the router would choose, and of others
PRIOR_VISITS = 2.0
RANKS = 2  # so many times the experts of a token are ranked
FETCHED_AHEAD = 2  # experts that a layer may have fetched ahead: more copies than that are hardly made in time


class _Layer:
    """The experts of one layer.

    Args:
        experts: How many.
        chosen: Of them, by each token.
    """

    def __init__(self, experts: int, chosen: int) -> None:
        self.heat = [chosen / experts] * experts
        self.resident: set[int] = set()
        self.chances: list[float] | None = None  # of its next visit, where that is foreseen
        self.ranked: Sequence[Sequence[int]] = ()
        self._chosen = chosen
        self._uses = [PRIOR_VISITS * chosen / experts] * experts
        self._visits = PRIOR_VISITS
        self._seen_s: float | None = None
        ranks = min(RANKS * chosen, experts)
        self._right = [RIGHT_AT_FIRST if rank < chosen else WRONG_AT_FIRST for rank in range(ranks)]
        self._missed = WRONG_AT_FIRST

    def visit(self, needed: Collection[int], chosen: Sequence[Sequence[int]], now_s: float, window_s: float) -> None:
        fade = 1.0 if self._seen_s is None else exp(-max(0.0, now_s - self._seen_s) / window_s)
        self._seen_s = now_s
        self._visits = self._visits * fade + 1
        for expert in range(len(self._uses)):
            self._uses[expert] = self._uses[expert] * fade + (expert in needed)
            self.heat[expert] = self._uses[expert] / self._visits
        for ranked, real in zip(self.ranked, chosen, strict=False):
            self._learn(ranked, set(real))
        self.chances, self.ranked = None, ()

    def foresee(self, ranked: Sequence[Sequence[int]]) -> None:
        self.ranked = ranked
        spared = [(1 - self._missed) ** len(ranked)] * len(self._uses)
        for one in ranked:
            for expert, right in zip(one, self._right, strict=False):
                spared[expert] *= (1 - right) / (1 - self._missed)
        self.chances = [1 - one for one in spared]

    def chance(self, expert: int) -> float:
        return (self.chances or self.heat)[expert]

    def _learn(self, ranked: Sequence[int], real: set[int]) -> None:
        for rank, expert in zip(range(len(self._right)), ranked, strict=False):
            self._right[rank] += LEARNING * ((expert in real) - self._right[rank])
        rest = len(self._uses) - len(ranked)
        if rest:
            self._missed += LEARNING * (len(real.difference(ranked)) / rest - self._missed)
            self._missed = min(self._missed, 0.9)


class Residents:
    """The experts that are resident, in so many places.

    Args:
        layers: Of each layer that has experts how many.
        chosen: Of them, by each token.
        places: Experts that may be resident, at least one.
        window_s: Time after which an activation counts 1/e.
        margin: Layers by which what is fetched ahead must be needed sooner than what gives way.
    """

    def __init__(self, layers: Sequence[int], chosen: int, places: int, window_s: float = 300.0, margin: float = 1.0) -> None:
        self._layers = [_Layer(experts, chosen) for experts in layers]
        self._places, self._window_s, self._margin = max(1, places), window_s, margin
        self._at = len(layers) - 1  # the layer that was visited last
        self._count = 0
        self._order: list[list[int] | None] = [None] * len(layers)  # residents, the least urgent first

    def __len__(self) -> int:
        """How many are resident."""
        return self._count

    def __contains__(self, key: Key) -> bool:
        """Whether one is."""
        return key[1] in self._layers[key[0]].resident

    def __iter__(self) -> Iterator[Key]:
        """Which."""
        for layer, one in enumerate(self._layers):
            for expert in sorted(one.resident):
                yield layer, expert

    @property
    def places(self) -> int:
        """Experts that may be resident."""
        return self._places

    def visit(self, layer: int, needed: Collection[int], now_s: float, chosen: Sequence[Sequence[int]] = ()) -> list[Key]:
        """A layer is visited.

        Args:
            layer: Which.
            needed: The experts that any token chose.
            now_s: The time.
            chosen: Those of the tokens that were foreseen, in that order.

        Returns:
            Those that are needed and not resident; they are not yet admitted.
        """
        self._at = layer
        self._layers[layer].visit(needed, chosen, now_s, self._window_s)
        self._order[layer] = None
        return [(layer, expert) for expert in sorted(needed) if expert not in self._layers[layer].resident]

    def foresee(self, layer: int, ranked: Sequence[Sequence[int]]) -> None:
        """Say what the tokens of the next visit will choose, each of them the likeliest first."""
        self._layers[layer].foresee(ranked)
        self._order[layer] = None

    def distance(self, key: Key) -> float:
        """Give after how many layers an expert will be needed, to all expectation."""
        layer, (number, expert) = self._layers[key[0]], key
        rounds = (1 - layer.chance(expert)) / max(layer.heat[expert], 1e-6)
        return (number - self._at - 1) % len(self._layers) + len(self._layers) * rounds

    def admit(self, key: Key) -> Key | None:
        """Let an expert in; gives the one that gave way."""
        gone = self._evict_one() if self._count >= self._places else None
        self._layers[key[0]].resident.add(key[1])
        self._order[key[0]] = None
        self._count += 1
        return gone

    def fetch_ahead(self, layer: int, limit: int = FETCHED_AHEAD) -> list[Key]:
        """Give what is foreseen for a layer, likely and absent, the likeliest first, at most so many; they are not admitted."""
        one = self._layers[layer]
        if one.chances is None:
            return []
        likely = [expert for expert, chance in enumerate(one.chances) if chance > LIKELY and expert not in one.resident]
        return [(layer, expert) for expert in sorted(likely, key=lambda e: (-one.chance(e), e))[:limit]]

    def is_worth(self, key: Key) -> bool:
        """Whether there is room for an absent expert, or it is needed sooner by the margin than what would give way."""
        if self._count < self._places:
            return True
        return self.distance(self._least_urgent()) >= self.distance(key) + self._margin

    def resize(self, places: int) -> list[Key]:
        """Change how many may be resident, at least one; gives those that had to go."""
        self._places = max(1, places)
        return [self._evict_one() for _ in range(self._count - self._places)]

    def hottest(self, number: int) -> list[tuple[int, int, float]]:
        """Give layer, expert and heat of those that are needed most often."""
        every = [(n, e, heat) for n, layer in enumerate(self._layers) for e, heat in enumerate(layer.heat)]
        return sorted(every, key=lambda one: (-one[2], one))[:number]

    def _least_urgent(self) -> Key:
        def distance(expert: int, layer: int) -> tuple[float, int]:
            return -self.distance((layer, expert)), expert

        last: list[tuple[float, Key]] = []
        for number, layer in enumerate(self._layers):
            order = self._order[number]
            if order is None:
                order = self._order[number] = sorted(layer.resident, key=partial(distance, layer=number))
            if order:
                last.append((self.distance((number, order[0])), (number, order[0])))
        return max(last)[1]

    def _evict_one(self) -> Key:
        key = self._least_urgent()
        self._layers[key[0]].resident.discard(key[1])
        self._order[key[0]] = None
        self._count -= 1
        return key
