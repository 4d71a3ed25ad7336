"""Where an engine's model lies."""

from pathlib import Path

from schemas.config import EngineConfig
from schemas.errors import ConfigError


def model_folder(config: EngineConfig) -> Path:
    """Give the folder that `model_path` names.

    Raises:
        ConfigError: None is configured, or it holds no model.
    """
    if config.model_path is None:
        message = "`model_path`: required: the folder of the model, with its config.json and tokenizer"
        raise ConfigError(message)
    folder = Path(config.model_path).expanduser()
    if not (folder / "config.json").is_file():
        message = f"`model_path`: expected a folder with a model (config.json), got {config.model_path}"
        raise ConfigError(message)
    return folder
