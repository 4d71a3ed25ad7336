"""mamba_ssm and two tiny models: Mamba2, which is served by default, and Mamba."""

from pathlib import Path

from deploy.engines import tiny
from deploy.engines.recipes.recipe import OFFLINE, TORCH, Device, Environment, Recipe, Step
from schemas.config import EngineConfig

MAMBA = "mamba-ssm==2.3.2.post1"
NEEDED = (TORCH, "einops", "triton", "transformers", "safetensors", "numpy", "huggingface_hub")
BUILDERS = ("setuptools", "wheel", "ninja", "packaging")
TRAINERS = ("mambapy==1.2.0",)  # transformers' own scan of Mamba is twenty times slower to train on a CPU
_ALONE = ("--no-deps", "--no-build-isolation")  # built against the torch that is there; what it pins beside it is not used

ENVIRONMENT = Environment(
    name="ssm",
    steps={
        "cpu": (
            Step("PyTorch and transformers", (*NEEDED, *BUILDERS), with_ours=True, torch="cpu"),
            Step(
                "mamba_ssm without its CUDA kernels",
                (MAMBA, *TRAINERS),
                _ALONE,
                {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "MAMBA_FORCE_BUILD": "TRUE"},
            ),
        ),
        "gpu": (
            Step("PyTorch and transformers (some 6 GB)", (*NEEDED, *BUILDERS), with_ours=True, torch="auto"),
            Step("mamba_ssm and its CUDA kernels", (MAMBA, "causal-conv1d>=1.4", *TRAINERS), _ALONE),
        ),
    },
    overrides=(),
    shown={"cpu": ("mamba-ssm", "torch", "transformers"), "gpu": ("mamba-ssm", "causal-conv1d", "torch", "transformers")},
    disk_bytes_min=9 * 10**9,
)


def _config(device: Device, python: Path, model: Path) -> EngineConfig:
    return EngineConfig(
        kind="ssm",
        model="tiny-mamba2",
        model_path=str(model),
        python=str(python),
        slots=8 if device == "cpu" else 64,
        options={"device": "cpu" if device == "cpu" else "cuda", "max_context": 4_096},
        env=dict(OFFLINE),
    )


RECIPE = Recipe(
    kind="ssm",
    environment=ENVIRONMENT,
    models=(tiny.model("tiny-mamba2"), tiny.model("tiny-mamba")),
    config=_config,
)
