"""The experts of all layers."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deploy.triton.checkpoint import PARTS, SPARSE_BLOCK, Checkpoint, Shape


class Experts:
    """Runs each expert once for all tokens that were routed to it."""

    def __init__(self, shape: Shape, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
        block, (left, right, out) = SPARSE_BLOCK[shape.kind], PARTS[shape.kind]
        self._of: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._hits = 0
        for layer in range(shape.layers):
            for expert in range(shape.experts if shape.sparse[layer] else 0):
                name = f"model.layers.{layer}.{block}.experts.{expert}"
                into = torch.cat([checkpoint.get(f"{name}.{part}.weight") for part in (left, right)])
                self._of[layer, expert] = into.to(device, dtype), checkpoint.get(f"{name}.{out}.weight").to(device, dtype)

    def run(self, layer: int, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Give what the chosen experts add to [tokens, hidden]; `chosen` and `weights` are [tokens, experts of each]."""
        found = torch.zeros_like(hidden)
        for expert in sorted({one for row in chosen.tolist() for one in row}):
            self._hits += 1
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            into, out = self._of[layer, expert]
            left, right = functional.linear(hidden[tokens], into).chunk(2, -1)
            added = functional.linear(functional.silu(left) * right, out)
            found.index_add_(0, tokens, added * weights[tokens, place].unsqueeze(1))
        return found

    def set_budget(self, budget_bytes: int | None) -> None:
        """Set how many bytes may be resident; none: all."""

    def statistics(self) -> dict[str, Any]:
        """Give the figures."""
        return {"hits": self._hits, "misses": 0, "hit_rate": 1.0, "stall_ms": 0.0, "resident": len(self._of)}
