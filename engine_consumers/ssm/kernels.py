"""Makes mamba_ssm run where its CUDA and Triton kernels do not.

mamba_ssm imports its compiled extension whether or not it is ever called, and binds kernels by name in its modules. On a
CPU those names are bound to plain PyTorch: `on_cpu.py`, or the package's own reference where that is good. On a GPU
nothing is changed.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine_consumers.ssm import on_cpu

_EXTENSION = "selective_scan_cuda"


def prepare(device: str) -> None:
    """Import mamba_ssm so that it runs on a device. To be called before anything else of it is imported.

    Args:
        device: `cpu` or `cuda`.
    """
    if device != "cpu":
        return
    sys.modules.setdefault(_EXTENSION, ModuleType(_EXTENSION))
    from mamba_ssm.modules import mamba2, mamba_simple
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref
    from mamba_ssm.ops.triton import layer_norm, layernorm_gated

    mamba_simple.selective_scan_fn = selective_scan_ref
    mamba_simple.selective_state_update = on_cpu.update_of_channels
    mamba2.selective_state_update = on_cpu.update_of_heads
    mamba2.mamba_chunk_scan_combined = on_cpu.chunk_scan

    def rms_norm(x: Tensor, weight: Tensor, bias: Tensor, **more: Any) -> Tensor:  # noqa: ANN401 - the package's own
        kept = {name: more[name] for name in ("residual", "eps", "prenorm") if name in more}
        normed: Tensor = layer_norm.rms_norm_ref(x, weight, bias, upcast=True, **kept)
        return normed

    def gated_rms_norm(x: Tensor, weight: Tensor, bias: Tensor, **more: Any) -> Tensor:  # noqa: ANN401 - the package's own
        normed: Tensor = layernorm_gated.rms_norm_ref(x, weight, bias, upcast=True, **more)
        return normed

    layer_norm.rms_norm_fn = rms_norm
    layernorm_gated.rmsnorm_fn = gated_rms_norm


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba1's scan from a state that it begins with; gives the output and the last state, both in float32.

    `x` and `dt` are [1, channels, length], `a` [channels, n], `b` and `c` [1, n, length], `d` and `bias` [channels],
    `state` [1, channels, n].
    """
    passed = functional.softplus(dt.float() + bias.float().view(-1, 1))
    before = state.float()
    if not x.is_cuda:
        y, last = on_cpu.selective_scan(x.float(), passed, a, b.float(), c.float(), before)
        return y + x.float() * d.float().view(-1, 1), last
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    y, last = selective_scan_fn(
        x.contiguous(),
        dt.contiguous(),
        a,
        b.contiguous(),
        c.contiguous(),
        d.float(),
        z=None,
        delta_bias=bias.float(),
        delta_softplus=True,
        return_last_state=True,
    )
    added, kept = carried(passed, a, c.float(), before)
    return y.float() + added, last + kept


def carried(dt: Tensor, a: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What a state adds to the outputs and to the last state of a scan that began without it.

    The CUDA kernel takes no state to begin with. But h' = exp(dt a) h + b x is linear in h: what a state h adds to the
    output after a time t, the sum of `dt` until then, is c exp(t a) h, and exp(t a) h to the state.
    """
    passed = dt.cumsum(-1)  # [1, channels, length]
    added = torch.zeros_like(passed)
    for n in range(a.shape[1]):  # one state at a time: all at once would take n times the memory
        added += torch.exp(passed * a[:, n].view(-1, 1)) * state[:, :, n].unsqueeze(-1) * c[:, n].unsqueeze(1)
    return added, torch.exp(passed[..., -1:] * a) * state
