"""Reading a checkpoint: Hugging Face's Mamba and Mamba2, and mamba_ssm's own, into mamba_ssm's model.

The weights have the same names but for the embedding. Not served, and refused by name: layers with attention, Mamba3,
activations other than SiLU, and Mamba2 with a clamped time step on one side only.
"""

import json
from pathlib import Path
from typing import Any

import torch

from schemas.errors import ConfigError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
RENAMED = {"backbone.embeddings.weight": "backbone.embedding.weight"}
SERVED = ("Mamba1", "Mamba2")


def load(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Load a model.

    Args:
        folder: With `config.json` and weights.
        device: Where to.
        dtype: Of the weights.

    Returns:
        The `MambaLMHeadModel`, and its configuration as it was read.

    Raises:
        ConfigError: The folder holds no model that is served, or its weights do not fit.
    """
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    config = _config(folder)
    given = _of_hugging_face(config, folder) if "model_type" in config else dict(config)
    _must_be_served(given, folder)
    model = MambaLMHeadModel(MambaConfig(**{**given, "fused_add_norm": False}), device=device, dtype=dtype).eval()
    if epsilon := config.get("layer_norm_epsilon"):
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = epsilon
    weights = {RENAMED.get(name, name): tensor for name, tensor in _weights(folder).items()}
    if given.get("tie_embeddings", True):
        weights.setdefault("lm_head.weight", weights.get("backbone.embedding.weight", torch.empty(0)))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        message = f"`model_path`: the weights in {folder} do not fit its config.json: {' '.join(str(error).split())[:300]}"
        raise ConfigError(message) from None
    return model, config


def trained_context(config: dict[str, Any]) -> int | None:
    """The length that a model says it was trained for."""
    for name in ("max_position_embeddings", "trained_context", "model_max_length"):
        if isinstance(found := config.get(name), int):
            return found
    return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"`model_path`: {folder}/config.json cannot be read: {error}"
        raise ConfigError(message) from None
    if not isinstance(found, dict):
        message = f"`model_path`: {folder}/config.json is no object"
        raise ConfigError(message)
    return found


def _of_hugging_face(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration as mamba_ssm has it."""
    kind = config["model_type"]
    if kind not in {"mamba", "mamba2"}:
        message = f"`model_path`: {folder} holds a model of type {kind!r}: expected mamba or mamba2"
        raise ConfigError(message)
    if config.get("hidden_act", "silu") not in {"silu", "swish"}:
        message = f"`model_path`: {folder} has the activation {config['hidden_act']!r}: expected silu"
        raise ConfigError(message)
    cell = {"d_state": config["state_size"], "d_conv": config.get("conv_kernel", 4), "expand": config.get("expand", 2)}
    cell |= {"bias": config.get("use_bias", False), "conv_bias": config.get("use_conv_bias", True)}
    if kind == "mamba":
        cell |= {"layer": "Mamba1", "dt_rank": config.get("time_step_rank", "auto")}
    else:
        low, high = config.get("time_step_limit", (0.0, float("inf")))
        cell |= {
            "layer": "Mamba2",
            "headdim": config["head_dim"],
            "ngroups": config.get("n_groups", 1),
            "chunk_size": config.get("chunk_size", 256),
            "rmsnorm": config.get("rms_norm", True),
            "norm_before_gate": config.get("norm_before_gate", False),
            "dt_limit": (_number(low), _number(high)),
        }
    return {
        "d_model": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "ssm_cfg": cell,
        "rms_norm": True,
        "residual_in_fp32": config.get("residual_in_fp32", True),
        "pad_vocab_size_multiple": 1,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _number(value: object) -> float:
    """A number, also an infinite one as newer files spell it: `{"__float__": "Infinity"}`."""
    return float(value["__float__"] if isinstance(value, dict) else value)  # type: ignore[arg-type]


def _must_be_served(given: dict[str, Any], folder: Path) -> None:
    layer = given.get("ssm_cfg", {}).get("layer", "Mamba1")
    if layer not in SERVED:
        message = f"`model_path`: {folder} has layers of kind {layer}: expected {' or '.join(SERVED)}"
        raise ConfigError(message)
    if given.get("attn_layer_idx"):
        message = f"`model_path`: {folder} has layers with attention, which this engine does not serve: vLLM serves some hybrids"
        raise ConfigError(message)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    for name in INDICES:
        if (folder / name).is_file():
            parts = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
            return {key: tensor for part in parts for key, tensor in _read(folder / part).items()}
    for name in WEIGHTS:
        if (folder / name).is_file():
            return _read(folder / name)
    message = f"`model_path`: no weights in {folder}: expected one of {', '.join((*WEIGHTS, *INDICES))}"
    raise ConfigError(message)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: dict[str, torch.Tensor] = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - each reader has its own, and a broken file is one line
        message = f"`model_path`: {path} cannot be read: {error}"
        raise ConfigError(message) from None
    return found
