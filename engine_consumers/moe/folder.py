"""What the worker itself needs of the model that the server runs: its tokenizer, and the sizes in its configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from engine_consumers.tokenizer import ends_of, read_tokenizer
from schemas.errors import ConfigError
from schemas.messages import FinishReason

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class Model(NamedTuple):
    """The model's own side.

    Attributes:
        tokenizer: Of Hugging Face's kind.
        words: The same, for what comes back.
        trained_context: Length that it was made for.
        kv_bytes_per_token: Of keys and values in the configuration's dtype; the server may keep them otherwise.
    """

    tokenizer: Any
    words: "Tokens"
    vocabulary: int
    trained_context: int
    kv_bytes_per_token: int


class Tokens:
    """See `profiles.Words`."""

    def __init__(self, tokenizer: Any, ends: frozenset[int]) -> None:  # noqa: ANN401
        self._tokenizer, self.ends = tokenizer, ends

    def encode(self, text: str) -> list[int]:
        """See `profiles.Words.encode`."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def speller(self, stops: list[str], room: int) -> Callable[[int], tuple[str, FinishReason | None]]:
        """See `profiles.Words.speller`."""
        from engine_consumers.spelling import Spelling  # noqa: PLC0415 - `tokenizers` is only in the engine's environment

        return Spelling(self._tokenizer.backend_tokenizer, self.ends, stops, room).take


def read_model(folder: Path, tokenizer: str | None) -> Model:
    """Read tokenizer and configuration; the weights are the server's.

    Args:
        folder: The model's.
        tokenizer: `options.tokenizer`.

    Raises:
        ConfigError: They cannot be read.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        config = {**raw, **raw.get("text_config", {})}
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        width = WIDTHS.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
        head = config.get("head_dim") or config["hidden_size"] // heads
        kv_bytes = 2 * layers * (config.get("num_key_value_heads") or heads) * head * width
        vocabulary, trained = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        message = f"`model_path`: {path} does not describe a model: {what}"
        raise ConfigError(message) from None
    found = read_tokenizer(folder, tokenizer)
    return Model(found, Tokens(found, ends_of(folder, config, found)), vocabulary, trained, kv_bytes)
