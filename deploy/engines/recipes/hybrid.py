"""A tiny model of attention, states and experts, served by vLLM: the transformer's environment under another kind."""

from pathlib import Path

from deploy.engines import tiny
from deploy.engines.recipes.recipe import Device, Recipe
from deploy.engines.recipes.transformer import ENVIRONMENT, vllm_environment
from schemas.config import EngineConfig


def _config(device: Device, python: Path, model: Path) -> EngineConfig:
    return EngineConfig(
        kind="hybrid",
        backend="transformer",
        model="tiny-granite-hybrid",
        model_path=str(model),
        python=str(python),
        slots=8 if device == "cpu" else 64,
        options={"dtype": "float32", "enforce_eager": True} if device == "cpu" else {},
        env=vllm_environment(device, python),
    )


RECIPE = Recipe(kind="hybrid", environment=ENVIRONMENT, models=(tiny.model("tiny-granite-hybrid"),), config=_config)
