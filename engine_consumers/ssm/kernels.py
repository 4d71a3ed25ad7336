"""Makes mamba_ssm run where its CUDA and Triton kernels do not: through the package's own reference functions.

mamba_ssm imports its compiled extension whether or not it is ever called, and binds kernels by name in its modules. On a
CPU those names are bound to the references that the package tests its kernels against. On a GPU nothing is changed.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_EXTENSION = "selective_scan_cuda"
_NO_STEP = -1e4  # softplus of it is 0: such a step leaves the state as it is


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
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update_ref

    mamba_simple.selective_scan_fn = selective_scan_ref
    mamba_simple.selective_state_update = mamba2.selective_state_update = selective_state_update_ref
    mamba2.mamba_chunk_scan_combined = _chunk_scan

    def rms_norm(x: Tensor, weight: Tensor, bias: Tensor, **more: Any) -> Tensor:  # noqa: ANN401 - the package's own
        kept = {name: more[name] for name in ("residual", "eps", "prenorm") if name in more}
        normed: Tensor = layer_norm.rms_norm_ref(x, weight, bias, upcast=True, **kept)
        return normed

    def gated_rms_norm(x: Tensor, weight: Tensor, bias: Tensor, **more: Any) -> Tensor:  # noqa: ANN401 - the package's own
        normed: Tensor = layernorm_gated.rms_norm_ref(x, weight, bias, upcast=True, **more)
        return normed

    layer_norm.rms_norm_fn = rms_norm
    layernorm_gated.rmsnorm_fn = gated_rms_norm


def _chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803 - mamba_ssm's names
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    **_none: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scan a sequence chunk by chunk; the references want whole chunks, so it is filled up with steps that do nothing.

    `x` is [batch, length, heads, head size], `dt` [batch, length, heads], `a` [heads], `b` and `c` [batch, length, groups, N],
    `initial_states` [batch, heads, head size, N].
    """
    from mamba_ssm.ops.triton.ssd_chunk_scan import chunk_scan_ref
    from mamba_ssm.ops.triton.ssd_chunk_state import chunk_state_ref
    from mamba_ssm.ops.triton.ssd_state_passing import state_passing_ref

    length, state_size = x.shape[1], b.shape[-1]
    fill = -length % chunk_size
    dt = functional.pad(dt, (0, 0, 0, fill), value=_NO_STEP if dt_softplus else 0.0)
    x, b, c = (functional.pad(one, (0, 0, 0, 0, 0, fill)) for one in (x, b, c))
    z = None if z is None else functional.pad(z, (0, 0, 0, 0, 0, fill))
    steps = dt.float().unflatten(1, (-1, chunk_size)).permute(0, 3, 1, 2)  # [batch, heads, chunks, chunk size]
    if dt_bias is not None:
        steps = steps + dt_bias.view(-1, 1, 1)
    if dt_softplus:
        steps = functional.softplus(steps)
    if dt_limit != (0.0, float("inf")):
        steps = steps.clamp(*dt_limit)
    decays = torch.cumsum(steps * a.view(-1, 1, 1), dim=-1)
    states = chunk_state_ref(b, x, steps, decays).flatten(-2)
    first = None if initial_states is None else initial_states.flatten(-2)
    states, last = state_passing_ref(states, decays[..., -1], first)
    out = chunk_scan_ref(b, c, x, steps, decays, states.unflatten(-1, (-1, state_size)), D=D, z=z)[:, :length]
    return (out, last.unflatten(-1, (-1, state_size))) if return_final_states else out
