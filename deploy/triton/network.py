"""Mixtral and Qwen2-MoE, one pass for all rows: what `stepping.loop.SlotLoop` runs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deploy.triton.attention import KvCache, Place, Rotary, attend
from deploy.triton.checkpoint import PARTS, SPARSE_BLOCK, Checkpoint, Shape
from deploy.triton.experts import Experts
from engine_consumers.core.experts import RANKS

LOOKED_AHEAD = 16  # tokens whose experts are foreseen: of a prompt's many, any few stand for the others


class Dense(NamedTuple):
    """A gated feed-forward network; `gate` is that of Qwen2-MoE's shared expert."""

    into: Tensor
    out: Tensor
    gate: Tensor | None = None

    def run(self, hidden: Tensor) -> Tensor:
        """Give what it adds to [tokens, hidden]."""
        left, right = functional.linear(hidden, self.into).chunk(2, -1)
        found = functional.linear(functional.silu(left) * right, self.out)
        return found if self.gate is None else torch.sigmoid(functional.linear(hidden, self.gate)) * found


class Layer(NamedTuple):
    """The tensors of a layer but for its experts. One without a router has a feed-forward network instead."""

    norm: Tensor
    queries: tuple[Tensor, Tensor | None]
    keys: tuple[Tensor, Tensor | None]
    values: tuple[Tensor, Tensor | None]
    out: Tensor
    second_norm: Tensor
    router: Tensor | None
    dense: Dense | None


class Network:
    """A model whose requests join and leave between steps; see `stepping.loop.Model`.

    Args:
        shape: Its dimensions.
        checkpoint: Its tensors.
        experts: Of all layers.
        rows: Requests that decode or are read.
        places: Tokens of one request.
        device: Where.
        dtype: Of weights and computing.
    """

    def __init__(
        self, shape: Shape, checkpoint: Checkpoint, experts: Experts, rows: int, places: int, device: str, dtype: torch.dtype
    ) -> None:
        def put(name: str) -> Tensor:
            return checkpoint.get(name).to(device, dtype)

        self.shape, self.experts, self.vocabulary = shape, experts, shape.vocabulary
        self.states = KvCache(shape, rows, places, device, dtype)
        self._device = device
        self._rotary = Rotary(shape, places, device)
        self._embedding = put("model.embed_tokens.weight")
        self._layers = [_layer(shape, checkpoint, n, device, dtype) for n in range(shape.layers)]
        self._norm = put("model.norm.weight")
        self._head = self._embedding if shape.is_tied else put("lm_head.weight")

    def step(self, token_ids: list[int]) -> Tensor:
        """Feed the first rows one token each; gives logits [requests, vocabulary]."""
        count, lengths = len(token_ids), self.states.lengths
        place = self._place(0, [[lengths[row]] for row in range(count)])
        logits = self._run([[token] for token in token_ids], place)
        for row in range(count):
            self.states.advance(row, 1)
        return logits

    def read(self, token_ids: list[int], row: int) -> Tensor:
        """Read a piece of a prompt onto a row; gives the logits [vocabulary] after its last token."""
        begun = self.states.lengths[row]
        place = self._place(row, [list(range(begun, begun + len(token_ids)))])
        logits = self._run([token_ids], place).squeeze(0)
        self.states.advance(row, len(token_ids))
        return logits

    def _place(self, first: int, positions: list[list[int]]) -> Place:
        rows = torch.arange(first, first + len(positions), device=self._device).unsqueeze(1)
        longest = max(one[-1] for one in positions) + 1
        return Place(first, rows, torch.tensor(positions, device=self._device), longest)

    def _run(self, token_ids: list[list[int]], place: Place) -> Tensor:
        """Feed each row its tokens; gives the logits after the last of them."""
        with torch.inference_mode():
            masks = {window: place.mask(window) for window in set(self.shape.windows)}
            hidden = self._embedding[torch.tensor(token_ids, device=self._device)]
            ahead = self._look_ahead(hidden, 0)
            if ahead is not None:
                self.experts.foresee(*ahead)
            for n, layer in enumerate(self._layers):
                hidden = hidden + self._attention(n, layer, self._normed(hidden, layer.norm), place, masks[self.shape.windows[n]])
                hidden = hidden + self._feed_forward(n, layer, hidden).view_as(hidden)
            return functional.linear(self._normed(hidden[:, -1], self._norm), self._head)

    def _look_ahead(self, hidden: Tensor, first: int) -> tuple[int, list[list[int]]] | None:
        """Ask the router of the next layer that has one what it would choose now: most of it it will choose then."""
        target = next((n for n in range(first, self.shape.layers) if self._layers[n].router is not None), None)
        if target is None or self.experts.is_whole:
            return None
        layer, some = self._layers[target], hidden.flatten(0, 1)[:LOOKED_AHEAD]
        said = functional.linear(self._normed(some, layer.second_norm), layer.router)
        ranked: list[list[int]] = said.topk(min(RANKS * self.shape.chosen, self.shape.experts), -1).indices.tolist()
        return target, ranked

    def _attention(self, n: int, layer: Layer, hidden: Tensor, place: Place, mask: Tensor) -> Tensor:
        def heads(by: tuple[Tensor, Tensor | None]) -> Tensor:
            return functional.linear(hidden, *by).unflatten(-1, (-1, self.shape.head_dim))

        keys, values = self.states.layers[n]
        keys[place.rows, place.positions] = self._rotary.turn(heads(layer.keys), place.positions)
        values[place.rows, place.positions] = heads(layer.values)
        queries = self._rotary.turn(heads(layer.queries), place.positions)
        return functional.linear(attend(queries, (keys, values), place, mask), layer.out)

    def _feed_forward(self, n: int, layer: Layer, before: Tensor) -> Tensor:
        hidden = self._normed(before, layer.second_norm).flatten(0, 1)
        found = None if layer.dense is None else layer.dense.run(hidden)
        if layer.router is None:
            assert found is not None  # noqa: S101 - it has one or the other
            return found
        chances = torch.softmax(functional.linear(hidden, layer.router), -1, dtype=torch.float32)
        weights, chosen = chances.topk(self.shape.chosen, -1)
        if self.shape.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        routed = self.experts.run(n, hidden, chosen, weights.to(hidden.dtype), self._look_ahead(before, n + 1))
        return routed if found is None else routed + found

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.epsilon)
        return weight * wide.to(hidden.dtype)


def _layer(shape: Shape, checkpoint: Checkpoint, n: int, device: str, dtype: torch.dtype) -> Layer:
    def put(name: str) -> Tensor:
        return checkpoint.get(f"model.layers.{n}.{name}").to(device, dtype)

    def find(name: str) -> Tensor | None:
        found = checkpoint.find(f"model.layers.{n}.{name}")
        return None if found is None else found.to(device, dtype)

    def linear(name: str) -> tuple[Tensor, Tensor | None]:
        return put(f"self_attn.{name}.weight"), find(f"self_attn.{name}.bias")

    block, (left, right, out) = SPARSE_BLOCK[shape.kind], PARTS[shape.kind]

    def dense(name: str, gate: Tensor | None = None) -> Dense:
        into = torch.cat((put(f"{name}.{left}.weight"), put(f"{name}.{right}.weight")))
        return Dense(into, put(f"{name}.{out}.weight"), gate)

    shared = find(f"{block}.shared_expert_gate.weight") if shape.sparse[n] else None
    return Layer(
        norm=put("input_layernorm.weight"),
        queries=linear("q_proj"),
        keys=linear("k_proj"),
        values=linear("v_proj"),
        out=put("self_attn.o_proj.weight"),
        second_norm=put("post_attention_layernorm.weight"),
        router=put(f"{block}.gate.weight") if shape.sparse[n] else None,
        dense=dense(block) if not shape.sparse[n] else None if shared is None else dense(f"{block}.shared_expert", shared),
    )
