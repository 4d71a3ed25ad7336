"""The experts of all layers: those that are resident, and the way of the others to the device and back.

Who is resident is decided in `engine_consumers/core/experts.py`; here are the tensors. A layer's experts that are resident
and needed are computed while the absent ones come; one that has to give way is computed first. Results are added in the
experts' order, so they are the same to the bit whatever is resident.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from deploy.triton.checkpoint import PARTS, SPARSE_BLOCK, Checkpoint, Shape
from deploy.triton.cold import AsItIs, Cold, Copier, Copy, InEightBits, StreamCopier, ThreadCopier, Weights
from engine_consumers.core.experts import Key, Residents

HOTTEST = 8
COLD: dict[str, Callable[..., Cold]] = {"host": AsItIs, "int8": InEightBits}


class _Work:
    """What one layer computes for its tokens."""

    def __init__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> None:
        self._hidden, self._chosen, self._weights = hidden, chosen, weights
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def compute(self, expert: int, by: Weights) -> None:
        """Run one expert once for all tokens that were routed to it."""
        tokens, place = (self._chosen == expert).nonzero(as_tuple=True)
        left, right = functional.linear(self._hidden[tokens], by.into).chunk(2, -1)
        found = functional.linear(functional.silu(left) * right, by.out)
        self._found[expert] = tokens, found * self._weights[tokens, place].unsqueeze(1)

    def total(self) -> Tensor:
        """Add up."""
        total = torch.zeros_like(self._hidden)
        for _, (tokens, found) in sorted(self._found.items()):
            total.index_add_(0, tokens, found)
        return total


class Experts:
    """Runs experts, resident or not.

    Args:
        shape: Of the model.
        checkpoint: Its tensors.
        device: Where experts are computed.
        dtype: Of computing.
        cold: How they are kept in host memory.
        budget_bytes: That resident ones may take; none: all are resident.
        clock: Gives seconds.
        order: Says who is resident.
    """

    def __init__(
        self,
        shape: Shape,
        checkpoint: Checkpoint,
        device: str,
        dtype: torch.dtype,
        cold: Literal["host", "int8"] = "host",
        budget_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        order: type[Residents] = Residents,
    ) -> None:
        self._device, self._clock = device, clock
        self.layers = [n for n in range(shape.layers) if shape.sparse[n]]
        self._number = {layer: number for number, layer in enumerate(self.layers)}
        self._cold: dict[Key, Cold] = {}
        for number, layer in enumerate(self.layers):
            for expert in range(shape.experts):
                weights = _read(shape, checkpoint, layer, expert, dtype)
                self._cold[number, expert] = COLD[cold](weights, is_pinned=device == "cuda")
                self._like = weights
        self.bytes_each = self._like.bytes if self._cold else 1
        self._budget_bytes = budget_bytes
        self.residents = order([shape.experts] * len(self.layers), shape.chosen, self._places(budget_bytes))
        self._copier: Copier = StreamCopier() if device == "cuda" else ThreadCopier()
        self._at: dict[Key, Weights] = {}
        self._coming: dict[Key, Copy] = {}
        self._ahead: set[Key] = set()  # fetched ahead and not needed yet
        self._lock = threading.Lock()  # held for a layer, and while the budget changes
        self._hits = self._misses = self._evicted = self._fetched_ahead = self._used_ahead = 0
        self._stall_s = 0.0
        for key in list(self._cold)[: self.residents.places]:
            self._let_in(key, {}, None)
        self._copier.settle()

    @property
    def is_whole(self) -> bool:
        """Whether all are resident, so that nothing has to be foreseen."""
        return len(self.residents) == len(self._cold)

    def foresee(self, layer: int, ranked: Sequence[Sequence[int]]) -> None:
        """Fetch ahead what tokens are likely to need of a layer; each token has the experts ranked, the likeliest first."""
        with self._lock:
            self._foresee(self._number[layer], ranked, {}, None)

    def run(
        self,
        layer: int,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
        ahead: tuple[int, Sequence[Sequence[int]]] | None = None,
    ) -> Tensor:
        """Give what the chosen experts add.

        Args:
            layer: Of the model.
            hidden: [tokens, hidden].
            chosen: [tokens, experts of each].
            weights: The same.
            ahead: A later layer, and what is foreseen of it; see `foresee`.
        """
        number, rows, work = self._number[layer], chosen.tolist(), _Work(hidden, chosen, weights)
        needed = {expert for row in rows for expert in row}
        with self._lock:
            absent = self.residents.visit(number, needed, self._clock(), rows)
            waiting = self._present(number, needed.difference(expert for _, expert in absent))
            self._misses += len(absent)
            for key in absent:
                self._let_in(key, waiting, work)
                waiting[key] = None
            if ahead is not None:
                self._foresee(self._number[ahead[0]], ahead[1], waiting, work)
            for key in waiting:
                self._compute(key, work)
        return work.total()

    def set_budget(self, budget_bytes: int | None) -> None:
        """Set how many bytes resident experts may take, at least one expert's; none: no bound. Who has to go goes now."""
        with self._lock:
            self._budget_bytes = budget_bytes
            gone = self.residents.resize(self._places(budget_bytes))
            if gone:
                self._copier.settle()  # nothing writes any more to what is let go of
                for key in gone:
                    self._forget(key)
                self._copier.release()
            self._evicted += len(gone)

    def statistics(self) -> dict[str, Any]:
        """Give the figures. A hit is an expert that was there when it was needed; one that was still coming is none."""
        asked = self._hits + self._misses
        hottest = self.residents.hottest(HOTTEST)
        return {
            "hits": self._hits,
            "misses": self._misses,
            "hit_rate": round(self._hits / asked, 4) if asked else 1.0,
            "stall_ms": round(self._stall_s * 1000, 3),
            "resident": len(self.residents),
            "resident_bytes": len(self.residents) * self.bytes_each,
            "budget_bytes": self._budget_bytes,
            "prefetched": self._fetched_ahead,
            "prefetch_used": self._used_ahead,
            "evicted": self._evicted,
            "hottest": [[self.layers[number], expert, round(heat, 3)] for number, expert, heat in hottest],
        }

    def _present(self, number: int, experts: set[int]) -> dict[Key, None]:
        """Book those that are there, or coming; gives them in the order in which they can be computed."""
        keys = [(number, expert) for expert in sorted(experts)]
        for key in keys:
            if key in self._coming and self._coming[key].is_done():
                del self._coming[key]
            if key in self._coming:
                self._misses += 1
            else:
                self._hits += 1
            if key in self._ahead:
                self._ahead.remove(key)
                self._used_ahead += 1
        return dict.fromkeys(sorted(keys, key=lambda key: key in self._coming))

    def _foresee(self, number: int, ranked: Sequence[Sequence[int]], waiting: dict[Key, None], work: _Work | None) -> None:
        self.residents.foresee(number, ranked)
        for key in self.residents.fetch_ahead(number):
            if not self.residents.is_worth(key):
                break
            self._let_in(key, waiting, work)
            self._ahead.add(key)
            self._fetched_ahead += 1

    def _let_in(self, key: Key, waiting: dict[Key, None], work: _Work | None) -> None:
        """Begin to bring one in; who gives way for it is computed before, where it still has to be."""
        gone = self.residents.admit(key)
        if gone is not None:
            if work is not None and gone in waiting:
                del waiting[gone]
                self._compute(gone, work)
            place = self._forget(gone)
            self._evicted += 1
        else:
            with torch.inference_mode(mode=False):  # else only that mode could write to it
                place = Weights(*(torch.empty_like(one, device=self._device) for one in self._like))
        self._at[key] = place
        self._coming[key] = self._copier.begin(lambda: self._cold[key].write(place))

    def _forget(self, key: Key) -> Weights:
        self._coming.pop(key, None)
        self._ahead.discard(key)
        return self._at.pop(key)

    def _compute(self, key: Key, work: _Work) -> None:
        copy = self._coming.pop(key, None)
        if copy is not None:
            begun_s = time.perf_counter()
            copy.wait()
            self._stall_s += time.perf_counter() - begun_s
        work.compute(key[1], self._at[key])

    def _places(self, budget_bytes: int | None) -> int:
        every = len(self._cold)
        return max(1, every if budget_bytes is None else min(every, budget_bytes // self.bytes_each))


def _read(shape: Shape, checkpoint: Checkpoint, layer: int, expert: int, dtype: torch.dtype) -> Weights:
    name = f"model.layers.{layer}.{SPARSE_BLOCK[shape.kind]}.experts.{expert}"
    left, right, out = (checkpoint.get(f"{name}.{part}.weight").to(dtype) for part in PARTS[shape.kind])
    return Weights(torch.cat((left, right)), out.contiguous())
