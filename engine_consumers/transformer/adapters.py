"""LoRA adapters: each is a model by a name of its own, run by the engine that runs the model it was trained for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM makes room


def lora_arguments(loras: Mapping[str, str]) -> dict[str, Any]:
    """Give those of vLLM's arguments that make room for adapters; none for none.

    Args:
        loras: Name -> folder.

    Raises:
        ConfigError: A folder holds no adapter, or one of a rank that vLLM does not take.
    """
    if not loras:
        return {}
    largest = max(_rank(name, Path(folder).expanduser()) for name, folder in loras.items())
    rank = next(rank for rank in RANKS if rank >= largest)
    return {"enable_lora": True, "max_loras": len(loras), "max_lora_rank": rank}


def _rank(name: str, folder: Path) -> int:
    field = f"`options.loras.{name}`"
    try:
        rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    except FileNotFoundError:
        message = f"{field}: expected a folder with an adapter (adapter_config.json), got {folder}"
        raise ConfigError(message) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{field}: {folder}/adapter_config.json cannot be read, or has no rank `r`: {error}"
        raise ConfigError(message) from None
    if not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        message = f"{field}: expected a rank `r` of 1 to {RANKS[-1]}, got {rank!r}"
        raise ConfigError(message)
    return rank
