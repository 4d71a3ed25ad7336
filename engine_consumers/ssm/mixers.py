"""One layer's work on states that are carried on: reading a piece of a prompt, and one step of many requests.

mamba_ssm reads a prompt in one go only. Here a piece is read from where the last one ended:

* the convolution sees the last inputs before the piece;
* Mamba2's scan takes the state it begins with (Dao, Gu 2024);
* Mamba1's takes none. But the state obeys h' = a h + b x, which is linear in h: what the state before the piece adds is
  exp(A * sum of dt) h, to the output through C and to the last state as it is. So it is added beside the scan.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def read(mixer: Any, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:  # noqa: ANN401 - a module of the package
    """Read a piece of one prompt; the states move on in place.

    Args:
        mixer: Mamba or Mamba2.
        u: [1, length, d_model].
        conv_state: [1, channels, d_conv].
        ssm_state: [1, ...] of the layer.

    Returns:
        [1, length, d_model].
    """
    is_second = type(mixer).__name__ == "Mamba2"
    return _read2(mixer, u, conv_state, ssm_state) if is_second else _read1(mixer, u, conv_state, ssm_state)


def step(mixer: Any, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:  # noqa: ANN401 - a module of the package
    """Give each request its next output; the states move on in place.

    Args:
        mixer: Mamba or Mamba2.
        u: [requests, 1, d_model].
        conv_state: [requests, channels, d_conv].
        ssm_state: [requests, ...] of the layer.
    """
    out: Tensor = mixer.step(u, conv_state, ssm_state)[0]
    return out


def _convolved(mixer: Any, x: Tensor, conv_state: Tensor) -> Tensor:  # noqa: ANN401
    """[1, channels, length] through the convolution and its activation."""
    before = torch.cat([conv_state, x.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(before[..., -mixer.d_conv :])
    conv = mixer.conv1d
    return functional.silu(functional.conv1d(before[..., 1:].to(x.dtype), conv.weight, conv.bias, groups=conv.groups))


def _read2(mixer: Any, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:  # noqa: ANN401
    from mamba_ssm.modules.mamba2 import mamba_chunk_scan_combined  # as `kernels.prepare` left it

    d_ssm, groups, d_state, head = mixer.d_ssm, mixer.ngroups, mixer.d_state, mixer.headdim
    projected = mixer.in_proj(u)
    d_mlp = (projected.shape[-1] - 2 * d_ssm - 2 * groups * d_state - mixer.nheads) // 2
    z0, x0, z, xbc, dt = projected.split([d_mlp, d_mlp, d_ssm, d_ssm + 2 * groups * d_state, mixer.nheads], dim=-1)
    xbc = _convolved(mixer, xbc.transpose(1, 2), conv_state).transpose(1, 2)
    x, b, c = xbc.split([d_ssm, groups * d_state, groups * d_state], dim=-1)
    y, last = mamba_chunk_scan_combined(
        x.unflatten(-1, (-1, head)),
        dt,
        -torch.exp(mixer.A_log.float()),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
        chunk_size=mixer.chunk_size,
        D=mixer.D.unflatten(0, (-1, head)) if mixer.D_has_hdim else mixer.D,
        z=None if mixer.rmsnorm else z.unflatten(-1, (-1, head)),
        dt_bias=mixer.dt_bias,
        initial_states=ssm_state,
        dt_softplus=True,
        dt_limit=mixer.dt_limit,
        return_final_states=True,
    )
    ssm_state.copy_(last)
    y = y.flatten(-2)
    if mixer.rmsnorm:
        y = mixer.norm(y, z)
    if d_mlp > 0:
        y = torch.cat([functional.silu(z0) * x0, y], dim=-1)
    out: Tensor = mixer.out_proj(y)
    return out


def _read1(mixer: Any, u: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:  # noqa: ANN401
    from mamba_ssm.modules.mamba_simple import selective_scan_fn  # as `kernels.prepare` left it

    x, z = mixer.in_proj(u).transpose(1, 2).chunk(2, dim=1)  # [1, d_inner, length]
    x = _convolved(mixer, x, conv_state)
    dt, b, c = mixer.x_proj(x.transpose(1, 2)).split([mixer.dt_rank, mixer.d_state, mixer.d_state], dim=-1)
    dt = functional.linear(dt, mixer.dt_proj.weight).transpose(1, 2)
    b, c = b.transpose(1, 2).contiguous(), c.transpose(1, 2).contiguous()  # [1, d_state, length]
    a, bias = -torch.exp(mixer.A_log.float()), mixer.dt_proj.bias.float()
    y, last = selective_scan_fn(
        x.contiguous(),
        dt.contiguous(),
        a,
        b,
        c,
        mixer.D.float(),
        z=None,
        delta_bias=bias,
        delta_softplus=True,
        return_last_state=True,
    )
    passed = functional.softplus(dt.float() + bias.view(-1, 1)).cumsum(-1)  # [1, d_inner, length]
    before = ssm_state.float()
    added = torch.zeros_like(passed)
    for n in range(mixer.d_state):  # one state at a time: all at once would take d_state times the memory
        added += torch.exp(passed * a[:, n].view(-1, 1)) * before[:, :, n].unsqueeze(-1) * c[:, n].float().unsqueeze(1)
    ssm_state.copy_(last + torch.exp(passed[..., -1:] * a) * before)
    out: Tensor = mixer.out_proj(((y.float() + added).to(z.dtype) * functional.silu(z)).transpose(1, 2))
    return out
