"""Drawing the next token of each request, so that a request draws the same alone and in company.

Each request has a stream of uniform numbers of its own, made from its seed, and takes one for each token: the token is
the first one, from the likeliest downwards, at which the probabilities kept add up to more than that number.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from schemas.messages import Sampling


class Drawing:
    """How one request draws.

    Args:
        sampling: Its parameters, checked.
        seed: Of its numbers.
    """

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self._numbers = Random(seed)  # noqa: S311 - chance, not secrets
        self.said: Counter[int] = Counter()
        self.is_penalised = bool(sampling.presence_penalty or sampling.frequency_penalty)

    def number(self) -> float:
        """The next uniform number, of [0, 1)."""
        return self._numbers.random()

    def took(self, token: int) -> None:
        """It was given a token."""
        if self.is_penalised:
            self.said[token] += 1


@torch.inference_mode()  # type: ignore[untyped-decorator] # as the logits were made: nothing else may write to them
def draw(logits: Tensor, drawings: Sequence[Drawing]) -> list[int | None]:
    """Draw a token for each request; None where its logits are not finite, which says that its state is spoiled.

    Args:
        logits: [requests, vocabulary]; penalties are written into them.
        drawings: Theirs, in the same order.
    """
    for n, one in enumerate(drawings):
        if one.said:
            tokens = torch.tensor(list(one.said), device=logits.device)
            counts = torch.tensor(list(one.said.values()), device=logits.device, dtype=logits.dtype)
            logits[n, tokens] -= one.sampling.presence_penalty + one.sampling.frequency_penalty * counts
    greatest, likeliest = logits.max(-1)
    told = torch.where(greatest.isfinite(), likeliest, -1).tolist()  # one NaN makes the greatest one NaN
    found: list[int | None] = [None if token < 0 else token for token in told]
    warm = [n for n, one in enumerate(drawings) if one.sampling.temperature > 0 and found[n] is not None]
    if warm:
        for n, drawn in zip(warm, _drawn(logits[warm], [drawings[n] for n in warm]), strict=True):
            found[n] = drawn
    for one, token in zip(drawings, found, strict=True):
        if token is not None:
            one.took(token)
    return found


def _drawn(logits: Tensor, drawings: Sequence[Drawing]) -> list[int]:
    device, asked = logits.device, [one.sampling for one in drawings]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device, dtype=torch.float32).unsqueeze(1)

    ordered, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    chances = torch.softmax(ordered / column([max(one.temperature, 1e-3) for one in asked]), -1)
    vocabulary = logits.shape[1]
    rank = torch.arange(vocabulary, device=device)
    kept = rank < column([one.top_k or vocabulary for one in asked])
    chances = torch.where(kept, chances, 0.0)
    chances = chances / chances.sum(-1, keepdim=True)
    before = chances.cumsum(-1) - chances
    kept = (before < column([one.top_p for one in asked])) & (chances >= chances[:, :1] * column([one.min_p for one in asked]))
    chances = torch.where(kept, chances, 0.0)
    # In float32 a number next to 1 is 1, and would name what was left out; a `top_p` next to 0 is 0, and would keep nothing.
    last = ((chances > 0).sum(-1, keepdim=True) - 1).clamp_min(0)
    chances = chances.cumsum(-1)
    wanted = column([one.number() for one in drawings]) * chances[:, -1:]
    places = torch.searchsorted(chances, wanted, right=True).minimum(last)
    drawn: list[int] = tokens.gather(1, places).squeeze(1).tolist()
    return drawn
