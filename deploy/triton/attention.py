"""Attention over a key-value cache that has a row for each request, written with PyTorch's own kernel.

    rows   0 .. slots-1               requests that decode, without gaps
           slots .. slots+readers-1   requests whose prompts are being read

A row holds `max_context` places from the start, so a request never waits for memory, and a step writes in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deploy.triton.checkpoint import Shape


class KvCache:
    """Keys and values of all layers, [rows, places, heads, width] each.

    Args:
        shape: Of the model.
        rows: Requests.
        places: Tokens of one.
        device: Where.
        dtype: Of both.
    """

    def __init__(self, shape: Shape, rows: int, places: int, device: str, dtype: torch.dtype) -> None:
        size = (rows, places, shape.kv_heads, shape.head_dim)
        self.layers = [tuple(torch.zeros(size, device=device, dtype=dtype) for _ in "kv") for _ in range(shape.layers)]
        self.places = places
        self.lengths = [0] * rows
        self._dirty = [0] * rows  # places that may hold something

    def clear(self, row: int) -> None:
        """Zero a row: what is masked still counts where it is not finite."""
        for pair in self.layers:
            for one in pair:
                one[row, : self._dirty[row]].zero_()
        self.lengths[row] = self._dirty[row] = 0

    def move(self, source: int, target: int) -> None:
        """Copy a row onto another."""
        length = self.lengths[source]
        if length < self._dirty[target]:
            self.clear(target)
        for pair in self.layers:
            for one in pair:
                one[target, :length].copy_(one[source, :length])
        self.lengths[target], self._dirty[target] = length, max(length, self._dirty[target])

    def advance(self, row: int, tokens: int) -> None:
        """A row was given tokens."""
        self.lengths[row] += tokens
        self._dirty[row] = max(self._dirty[row], self.lengths[row])


class Place(NamedTuple):
    """Where the tokens of one pass stand.

    Attributes:
        first: The first of the rows.
        rows: [requests, 1].
        positions: [requests, tokens].
        longest: Places that any of them looks at.
    """

    first: int
    rows: Tensor
    positions: Tensor
    longest: int

    def mask(self, window: int | None) -> Tensor:
        """Which places each token sees, [requests, 1, tokens, places]."""
        keys, tokens = torch.arange(self.longest, device=self.positions.device), self.positions.unsqueeze(-1)
        seen = keys <= tokens
        return (seen if window is None else seen & (keys > tokens - window)).unsqueeze(1)


class Rotary:
    """Positions by rotation (Su et al. 2021), in Hugging Face's layout of halves.

    Args:
        shape: Of the model.
        places: Positions.
        device: Where.
    """

    def __init__(self, shape: Shape, places: int, device: str) -> None:
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float()
        speeds = 1.0 / (shape.rope_theta ** (steps / shape.head_dim))
        angles = torch.outer(torch.arange(places).float(), speeds)
        angles = torch.cat((angles, angles), -1)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def turn(self, given: Tensor, positions: Tensor) -> Tensor:
        """Turn [requests, tokens, heads, width]."""
        cos = self._cos[positions].unsqueeze(2).to(given.dtype)
        sin = self._sin[positions].unsqueeze(2).to(given.dtype)
        left, right = given.chunk(2, -1)
        return given * cos + torch.cat((-right, left), -1) * sin


def attend(queries: Tensor, cache: tuple[Tensor, ...], place: Place, mask: Tensor) -> Tensor:
    """Look at what the rows hold; the heads that share keys go as one head with more queries.

    Args:
        queries: [requests, tokens, heads, width].
        cache: Keys and values of the layer.
        place: Where the tokens stand.
        mask: Of that place.
    """
    count, tokens, heads, width = queries.shape
    keys, values = (one[place.first : place.first + count, : place.longest].transpose(1, 2) for one in cache)
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    folded = queries.view(count, tokens, kv_heads, group, width).permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, width)
    found = functional.scaled_dot_product_attention(folded, keys, values, mask.repeat(1, 1, group, 1))
    return found.view(count, kv_heads, group, tokens, width).permute(0, 3, 1, 2, 4).reshape(count, tokens, heads * width)
