"""What mamba_ssm's kernels compute, in plain PyTorch, for CPUs.

The package's own references are written to be compared with: they expand what all states of a head share, and go through
Python for each token. These give the same numbers in a fraction of the time and take the state that they begin with.
Arguments have mamba_ssm's names. Source: Gu, Dao 2023 (`selective_scan`); Dao, Gu 2024, section 6 (`chunk_scan`).
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64  # least work for usual sizes: within a chunk it grows with the length, between chunks with the state


def selective_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba's scan: h = exp(dt a) h + dt b x, y = c h; gives all y and the last h.

    `x` and `dt` (after its softplus) are [1, d, length], `a` [d, n], `b` and `c` [1, n, length], `state` [1, d, n].
    """
    steps = dt[0].t()  # [length, d]
    decays = torch.exp(steps.unsqueeze(-1) * a)
    states = (steps * x[0].t()).unsqueeze(-1) * b[0].t().unsqueeze(1)  # [length, d, n]: inputs, then one by one the states
    last = state[0]
    for decay, held in zip(decays, states, strict=True):
        last = held.addcmul_(decay, last)
    y = _read_out(c[0].t(), states).t()
    return y.unsqueeze(0), last.unsqueeze(0)


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - mamba_ssm's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    dt_softplus: bool = False,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's scan, as `mamba_chunk_scan_combined`.

    `x` is [batch, length, heads, head size], `dt` [batch, length, heads], `A` [heads], `B` and `C` [batch, length, groups, n],
    `initial_states` [batch, heads, head size, n].
    """
    batch, length, heads, size = x.shape
    groups, n = B.shape[2:]
    by_group = (groups, heads // groups)
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    steps = (functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    first = x.new_zeros((batch, heads, size, n)) if initial_states is None else initial_states
    state = first.float().unflatten(1, by_group)  # [batch, groups, heads of one, head size, n], and so below
    weighted = (x.float() * steps.unsqueeze(-1)).unflatten(2, by_group).permute(0, 2, 3, 1, 4)
    passed = (steps * A.float()).unflatten(2, by_group).permute(0, 2, 3, 1)
    b, c = (one.float().transpose(1, 2).unsqueeze(2) for one in (B, C))
    outs = []
    for begin in range(0, length, min(chunk_size, CHUNK)):
        part = slice(begin, begin + min(chunk_size, CHUNK))
        sums = passed[..., part].cumsum(-1)
        xs, bs, cs = weighted[..., part, :], b[..., part, :], c[..., part, :]
        later = torch.ones((sums.shape[-1],) * 2, dtype=torch.bool, device=x.device).triu(1)
        decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
        outs.append((cs @ bs.mT * decays) @ xs + (cs @ state.mT) * sums.exp().unsqueeze(-1))
        left = (sums[..., -1:] - sums).exp().unsqueeze(-1)
        state = state * sums[..., -1, None, None].exp() + (xs * left).mT @ bs
    y = torch.cat(outs, dim=-2).permute(0, 3, 1, 2, 4).flatten(2, 3)
    if D is not None:
        y = y + x.float() * (D if D.dim() > 1 else D.unsqueeze(-1))
    y = (y if z is None else y * functional.silu(z.float())).to(x.dtype)
    return (y, state.flatten(1, 2)) if return_final_states else y


def update_of_heads(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - mamba_ssm's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor | None,
    dt_bias: Tensor,
    *,
    dt_softplus: bool,
) -> Tensor:
    """Mamba2's step, as `selective_state_update` is called for it: all states of a head have the same `dt` and `A`.

    `state` [requests, heads, head size, n] moves on in place; `x` and `dt` are [requests, heads, head size],
    `A` [heads, head size, n], `B` and `C` [requests, groups, n], `D` and `dt_bias` [heads, head size].
    """
    steps = (dt[..., 0] + dt_bias[:, 0]).float()
    steps = functional.softplus(steps) if dt_softplus else steps  # [requests, heads]
    b, c = (one.repeat_interleave(state.shape[1] // one.shape[1], dim=1).to(state.dtype) for one in (B, C))
    state.mul_(torch.exp(steps * A[:, 0, 0])[..., None, None].to(state.dtype))
    state.addcmul_((x * steps.unsqueeze(-1)).unsqueeze(-1).to(state.dtype), b.unsqueeze(-2))
    y = _read_out(c, state) + x * D
    return (y if z is None else y * functional.silu(z)).to(x.dtype)


def update_of_channels(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 - mamba_ssm's names
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor,
    dt_bias: Tensor,
    *,
    dt_softplus: bool,
) -> Tensor:
    """Mamba's step, as `selective_state_update` is called for it.

    `state` [requests, channels, n] moves on in place; `x`, `dt` and `z` are [requests, channels], `A` [channels, n],
    `B` and `C` [requests, n], `D` and `dt_bias` [channels].
    """
    steps = (dt + dt_bias).float()
    steps = functional.softplus(steps) if dt_softplus else steps
    state.mul_(torch.exp(steps.unsqueeze(-1) * A).to(state.dtype))
    state.addcmul_((x * steps).unsqueeze(-1).to(state.dtype), B.unsqueeze(1).to(state.dtype))
    y = _read_out(C.to(state.dtype), state) + x * D
    return (y * functional.silu(z)).to(x.dtype)


def _read_out(c: Tensor, state: Tensor) -> Tensor:
    """[..., n] by [..., channels, n]: [..., channels]. A row times a matrix takes a sixth of the time of its mirror image."""
    return (c.unsqueeze(-2) @ state.mT).squeeze(-2)
