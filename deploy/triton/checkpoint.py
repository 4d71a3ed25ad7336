"""What a folder of Hugging Face's layout holds of a Mixtral or Qwen2-MoE: its shape, its tensors, its tokenizer's part."""

import json
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from schemas.errors import ConfigError

KINDS = ("mixtral", "qwen2_moe")
CONTEXT_DEFAULT = 4_096
SPARSE_BLOCK = {"mixtral": "block_sparse_moe", "qwen2_moe": "mlp"}
PARTS = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}


class Shape(Struct, frozen=True):
    """The model's dimensions.

    Attributes:
        windows: Of each layer how far back it looks, in tokens; none: to the beginning.
        sparse: Of each layer whether it has experts.
        renormalise: Whether the weights of the chosen experts are made to add up to 1.
        inner: Width of an expert.
        trained_context: Length that it was made for.
    """

    kind: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_theta: float
    experts: int
    chosen: int
    inner: int
    renormalise: bool
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    is_tied: bool
    trained_context: int


def read_shape(folder: Path) -> Shape:
    """Read config.json.

    Raises:
        ConfigError: It cannot be read, or the model is none that is served.
    """
    raw = _read_json(folder / "config.json")
    kind = raw.get("model_type")
    if kind not in KINDS:
        message = f"`model_path`: {folder} holds a model of type {kind!r}: expected one of {', '.join(KINDS)}"
        raise ConfigError(message)
    try:
        return _shape(kind, raw)
    except (KeyError, TypeError, ValueError) as error:
        message = f"`model_path`: {folder / 'config.json'} is not that of a {kind} model: {type(error).__name__}: {error}"
        raise ConfigError(message) from None


def _shape(kind: str, raw: dict[str, Any]) -> Shape:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        message = f"`model_path`: rotary positions of type {rope_type!r} are not served: expected default"
        raise ConfigError(message)
    if raw.get("hidden_act", "silu") != "silu":
        message = f"`model_path`: the activation {raw['hidden_act']!r} is not served: expected silu"
        raise ConfigError(message)
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    mixtral = kind == "mixtral"
    return Shape(
        kind=kind,
        vocabulary=raw["vocab_size"],
        hidden=raw["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        epsilon=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or (1e6 if mixtral else 1e4)),
        experts=raw["num_local_experts"] if mixtral else raw["num_experts"],
        chosen=raw["num_experts_per_tok"],
        inner=raw["intermediate_size"] if mixtral else raw["moe_intermediate_size"],
        renormalise=mixtral or bool(raw.get("norm_topk_prob", False)),
        windows=_windows(kind, raw, layers),
        sparse=tuple(mixtral or _is_sparse(raw, n) for n in range(layers)),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        trained_context=raw["max_position_embeddings"],
    )


def _windows(kind: str, raw: dict[str, Any], layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window or (kind == "qwen2_moe" and not raw.get("use_sliding_window")):
        return (None,) * layers
    if kind == "mixtral":
        return (window,) * layers
    kinds = raw.get("layer_types")
    full = raw.get("max_window_layers", layers)
    return tuple(window if (kinds[n] == "sliding_attention" if kinds else n >= full) else None for n in range(layers))


def _is_sparse(raw: dict[str, Any], layer: int) -> bool:
    return layer not in raw.get("mlp_only_layers", ()) and (layer + 1) % raw.get("decoder_sparse_step", 1) == 0


class Checkpoint:
    """The tensors of a folder, read one by one.

    Args:
        folder: With one safetensors file, or several and their index.

    Raises:
        ConfigError: There are none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / "model.safetensors.index.json"
        names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        self._files: dict[str, Any] = {}
        for name in names:
            try:
                file = safe_open(str(folder / name), "pt")
            except Exception as error:  # noqa: BLE001 - it has several of its own
                message = f"`model_path`: {folder / name} cannot be read: {error}: expected safetensors"
                raise ConfigError(message) from None
            self._files.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str) -> Tensor:
        """Give a tensor.

        Raises:
            ConfigError: It is not there.
        """
        if name not in self._files:
            message = f"`model_path`: the safetensors in {self._folder} have no {name}"
            raise ConfigError(message)
        return self._files[name].get_tensor(name)

    def find(self, name: str) -> Tensor | None:
        """Give a tensor, or none."""
        return self.get(name) if name in self._files else None


def read_tokenizer(folder: Path) -> tuple[Tokenizer, frozenset[int]]:
    """Give the tokenizer, which spells tokens as they come, and the tokens that end an answer.

    Raises:
        ConfigError: There is none that can be read.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - a bare one
        message = f"`model_path`: {folder / 'tokenizer.json'} cannot be read: {error}: expected a fast tokenizer's file"
        raise ConfigError(message) from None
    ends: list[object] = []
    for name in ("config.json", "generation_config.json"):
        given = _read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ends += given if isinstance(given, list) else [given]
    told = folder / "tokenizer_config.json"
    spelled = _read_json(told).get("eos_token") if told.is_file() else None
    if isinstance(spelled, dict):
        spelled = spelled.get("content")
    if isinstance(spelled, str):
        ends.append(tokenizer.token_to_id(spelled))
    return tokenizer, frozenset(token for token in ends if isinstance(token, int))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"`model_path`: {path} cannot be read: {error}"
        raise ConfigError(message) from None
    return found if isinstance(found, dict) else {}
