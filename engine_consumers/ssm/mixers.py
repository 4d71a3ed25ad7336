"""One layer's work on states that are carried on: reading a piece of a prompt, and one step of many requests.

mamba_ssm reads a prompt in one go only. Here a piece is read from where the last one ended:

* the convolution sees the last inputs before the piece;
* the scan begins with the state that was left; Mamba1's kernel takes none, see `kernels.carried`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine_consumers.ssm import kernels


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
    x, z = mixer.in_proj(u).transpose(1, 2).chunk(2, dim=1)  # [1, d_inner, length]
    x = _convolved(mixer, x, conv_state)
    dt, b, c = mixer.x_proj(x.transpose(1, 2)).split([mixer.dt_rank, mixer.d_state, mixer.d_state], dim=-1)
    dt = functional.linear(dt, mixer.dt_proj.weight).transpose(1, 2)
    b, c = b.transpose(1, 2), c.transpose(1, 2)  # [1, d_state, length]
    y, last = kernels.selective_scan(x, dt, -torch.exp(mixer.A_log.float()), b, c, mixer.D, mixer.dt_proj.bias, ssm_state)
    ssm_state.copy_(last)
    out: Tensor = mixer.out_proj((y.to(z.dtype) * functional.silu(z)).transpose(1, 2))
    return out
