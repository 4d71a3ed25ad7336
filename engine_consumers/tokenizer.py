"""Reading a model's tokenizer, and the tokens that end its answers, from its folder."""

import json
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError


def read_tokenizer(folder: Path, option: str | None) -> Any:  # noqa: ANN401 - transformers has no types
    """Read a fast tokenizer of Hugging Face's kind.

    Args:
        folder: The model's.
        option: `options.tokenizer`: the folder of another one.

    Raises:
        ConfigError: It cannot be read.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - only in an engine's own environment

    place = Path(option).expanduser() if option else folder
    try:
        found = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
        found.backend_tokenizer  # noqa: B018 - only fast ones have it
        if not found.encode("a"):  # of a folder without one it may make an empty one
            raise ValueError("it has no words")  # noqa: EM101, TRY003, TRY301 - told below
    except Exception as error:  # noqa: BLE001 - whatever it raises, the folder is at fault
        field = "`options.tokenizer`" if option else "`model_path`"
        mend = "" if option else ": name the folder of one that has it in `options.tokenizer`"
        message = f"{field}: the tokenizer in {place} cannot be read: {' '.join(str(error).split())[:300]}{mend}"
        raise ConfigError(message) from None
    return found


def ends_of(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:  # noqa: ANN401
    """Give the tokens that end an answer: those of the model's configuration, of its authors' advice, and the tokenizer's."""
    given = config.get("eos_token_id"), _generation(folder).get("eos_token_id"), tokenizer.eos_token_id
    flat = [token for one in given for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in flat if isinstance(token, int))


def _generation(folder: Path) -> dict[str, Any]:
    """What the model's authors say of its answers, where they do."""
    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
