"""The whole model on carried states: a piece of a prompt, or one token for each of many requests.

On a GPU a step is captured as a CUDA graph for each number of requests in `BUCKETS` and kept for life: the states lie
where they lay, so a graph stays right. A step of fewer requests runs the next larger graph on the rows that follow,
which belong to nobody.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine_consumers.ssm import mixers
from engine_consumers.ssm.states import States

Mix = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
WARM_UPS = 3  # before a capture, as PyTorch asks


class Model:
    """A Mamba or Mamba2 model of mamba_ssm, and the states of its requests.

    Args:
        lm: A `MambaLMHeadModel`.
        slots: Requests that decode at once.
        readers: Prompts that are read at once.
    """

    def __init__(self, lm: Any, slots: int, readers: int) -> None:  # noqa: ANN401 - mamba_ssm has no types
        self._lm, self._device = lm, lm.lm_head.weight.device
        self.vocabulary: int = lm.config.vocab_size  # the rows above are padding, and name no token
        allocated = lm.allocate_inference_cache(slots + readers, 0)
        self.states = States([allocated[n] for n in range(len(lm.backbone.layers))], slots)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(self, token_ids: list[int], row: int) -> Tensor:
        """Read a piece of a prompt onto a row's state.

        Returns:
            [vocabulary], the logits after its last token.
        """
        ids = torch.tensor([token_ids], device=self._device)
        hidden = self._through(ids, self.states.rows(row, 1), mixers.read)
        return self._logits(hidden)[0]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def step(self, token_ids: list[int]) -> Tensor:
        """Feed the first rows one token each.

        Returns:
            [requests, vocabulary], logits.
        """
        count = len(token_ids)
        ids = torch.tensor(token_ids, device=self._device).unsqueeze(1)
        if self._device.type != "cuda":
            return self._step(ids, self.states.rows(0, count))
        size = bucket(count, self.states.slots)
        graph, fed, logits = self._graphs.get(size) or self._capture(size)
        fed[:count].copy_(ids)
        graph.replay()
        return logits[:count]

    def warm_up(self) -> bool:
        """Read and step once, and capture all graphs, where there are any; whether what came out is finite."""
        if self._device.type == "cuda":
            for size in sorted({bucket(n, self.states.slots) for n in range(1, self.states.slots + 1)}, reverse=True):
                self._capture(size)
        found = self.read([0], self.states.slots).isfinite().all() and self.step([0]).isfinite().all()
        self.states.clear(self.states.slots)
        self.states.clear(0)
        return bool(found)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Capture a step of so many requests; what it does to their states meanwhile must matter to nobody."""
        fed = torch.zeros((size, 1), dtype=torch.long, device=self._device)
        rows = self.states.rows(0, size)
        kept = [(conv.clone(), ssm.clone()) for conv, ssm in rows]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._step(fed, rows)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step(fed, rows)
        for (conv, ssm), (old_conv, old_ssm) in zip(rows, kept, strict=True):
            conv.copy_(old_conv)
            ssm.copy_(old_ssm)
        self._graphs[size] = graph, fed, logits
        return self._graphs[size]

    def _step(self, ids: Tensor, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
        return self._logits(self._through(ids, rows, mixers.step))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[requests, vocabulary] after the last of [requests, length, d_model]."""
        logits: Tensor = self._lm.lm_head(hidden[:, -1])
        return logits[:, : self.vocabulary].float()

    def _through(self, ids: Tensor, rows: list[tuple[Tensor, Tensor]], mix: Mix) -> Tensor:
        """[requests, length] token ids through all layers: [requests, length, d_model]."""
        backbone = self._lm.backbone
        hidden, residual = backbone.embedding(ids), None
        for layer, (conv, ssm) in zip(backbone.layers, rows, strict=True):
            residual = hidden if residual is None else hidden + residual
            hidden = layer.norm(residual.to(layer.norm.weight.dtype))
            if layer.residual_in_fp32:
                residual = residual.float()
            hidden = mix(layer.mixer, hidden, conv, ssm)
            if layer.mlp is not None:
                residual = hidden + residual
                hidden = layer.mlp(layer.norm2(residual.to(layer.norm2.weight.dtype)))
        residual = hidden if residual is None else hidden + residual
        normed: Tensor = backbone.norm_f(residual.to(backbone.norm_f.weight.dtype))
        return normed


def bucket(count: int, most: int) -> int:
    """The size of the graph for so many requests: powers of two, up to all slots."""
    return min(1 << (count - 1).bit_length(), most)
