"""Triton with a Python backend, and two tiny models of experts: Mixtral, which is served by default, and Qwen2-MoE."""

from pathlib import Path

from deploy.engines import tiny
from deploy.engines.recipes.recipe import OFFLINE, TORCH, Device, Environment, Recipe, Step
from schemas.config import EngineConfig

TRITON = "nvidia-pytriton==0.7.0"  # holds the server itself
NEEDED = (TRITON, "numpy<2", TORCH, "transformers", "safetensors", "tokenizers", "tritonclient[grpc]")
SHOWN = ("nvidia-pytriton", "tritonclient", "torch", "transformers")

ENVIRONMENT = Environment(
    name="moe",
    steps={
        "cpu": (Step("Triton and PyTorch", NEEDED, with_ours=True, torch="cpu"),),
        "gpu": (Step("Triton and PyTorch (some 6 GB)", NEEDED, with_ours=True, torch="auto"),),
    },
    overrides=(),
    shown={"cpu": SHOWN, "gpu": SHOWN},
    disk_bytes_min=9 * 10**9,
)


def _config(device: Device, python: Path, model: Path) -> EngineConfig:
    slots = 8 if device == "cpu" else 64
    run = [str(python), "-P", "-m", "deploy.triton", "--model-path", str(model), "--slots", str(slots)]
    return EngineConfig(
        kind="moe",
        model="tiny-mixtral",
        model_path=str(model),
        python=str(python),
        slots=slots,
        options={"server": [*run, "--device", "cpu" if device == "cpu" else "cuda"]},
        env=dict(OFFLINE),
    )


RECIPE = Recipe(
    kind="moe",
    environment=ENVIRONMENT,
    models=(tiny.model("tiny-mixtral"), tiny.model("tiny-qwen2-moe")),
    config=_config,
)
