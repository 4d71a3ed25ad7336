"""Reading a checkpoint: Hugging Face's Mamba and Mamba2, and mamba_ssm's own, into mamba_ssm's model.

The weights have the same names but for the embedding. Not served, and refused by name: layers with attention, Mamba3,
activations other than SiLU, quantized weights, and Mamba2 with a bounded time step, which mamba_ssm's step leaves out.
Hugging Face's `norm_before_gate` is not read, there as here: the gate comes first.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from schemas.errors import ConfigError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
RENAMED = {"backbone.embeddings.weight": "backbone.embedding.weight"}
SERVED = ("Mamba1", "Mamba2")
UNBOUND = (0.0, float("inf"))


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
    try:
        given = _of_hugging_face(config, folder) if "model_type" in config else _own(config, MambaConfig)
        _must_be_served(given, folder)
        model = MambaLMHeadModel(MambaConfig(**{**given, "fused_add_norm": False}), device=device, dtype=dtype).eval()
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
        message = f"`model_path`: {folder}/config.json does not describe a model: {missing or type(error).__name__}"
        raise ConfigError(message) from None
    if epsilon := config.get("layer_norm_epsilon"):
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = epsilon
    weights = {RENAMED.get(name, name): tensor for name, tensor in _weights(folder).items()}
    _must_be_plain(weights, config, folder)
    if given.get("tie_embeddings", True) and "backbone.embedding.weight" in weights:
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
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
            "norm_before_gate": False,
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
        "tie_embeddings": config.get("tie_word_embeddings", kind == "mamba"),
    }


def _own(config: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The configuration of mamba_ssm's own format, without what others have added."""
    return {field.name: config[field.name] for field in dataclasses.fields(kind) if field.name in config}


def _must_be_plain(weights: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Quantized weights would load and mean something else."""
    method = (config.get("quantization_config") or {}).get("quant_method", "a quantization of its own")
    odd = [name for name, tensor in weights.items() if not tensor.is_floating_point() or tensor.element_size() < 2]
    if odd or config.get("quantization_config"):
        what = f"{odd[0]} is {str(weights[odd[0]].dtype).removeprefix('torch.')}" if odd else f"they have {method}"
        message = f"`model_path`: the weights in {folder} are quantized ({what}): expected float32, bfloat16 or float16"
        raise ConfigError(message)


def _number(value: object) -> float:
    """A number, also an infinite one as newer files spell it: `{"__float__": "Infinity"}`."""
    return float(value["__float__"] if isinstance(value, dict) else value)  # type: ignore[arg-type]


def _must_be_served(given: dict[str, Any], folder: Path) -> None:
    limit = tuple(given.get("ssm_cfg", {}).get("dt_limit", UNBOUND))
    if limit != UNBOUND:
        message = f"`model_path`: {folder} bounds its time step to {list(limit)}, which this engine does not serve"
        raise ConfigError(message)
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
            try:
                parts = sorted(set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                message = f"`model_path`: {folder / name} is no index of weights: {type(error).__name__}: {error}"
                raise ConfigError(message) from None
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
        message = f"`model_path`: {path} cannot be read: {' '.join(str(error).split())[:300]}: fetch it again"
        raise ConfigError(message) from None
    return found
