"""From a folder to a model that is ready to run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_consumers.ssm import kernels
from engine_consumers.ssm.options import SsmOptions
from schemas.config import EngineConfig
from schemas.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    """What a loaded model consists of.

    Attributes:
        model: On its device.
        tokenizer: Of Hugging Face's kind.
        backend_tokenizer: The one inside it, that spells tokens as they come.
        ends: Tokens that end an answer.
        trained_context: Where the model says.
    """

    model: Any
    tokenizer: Any
    backend_tokenizer: Any
    ends: frozenset[int]
    trained_context: int | None
    device: str

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"


def model_folder(config: EngineConfig) -> Path:
    """Give the folder of the model.

    Raises:
        ConfigError: None is configured, or it holds no model.
    """
    if config.model_path is None:
        message = "`model_path`: required: the folder of a Mamba or Mamba2 model"
        raise ConfigError(message)
    folder = Path(config.model_path).expanduser()
    if not (folder / "config.json").is_file():
        message = f"`model_path`: expected a folder with a model (config.json), got {config.model_path}"
        raise ConfigError(message)
    return folder


def load(folder: Path, options: SsmOptions, slots: int) -> Loaded:
    """Load model and tokenizer, and warm up; takes as long as it takes.

    Raises:
        ConfigError: They cannot be read, or there is no such device.
    """
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        message = "`options.device`: there is no GPU that PyTorch can use: expected cpu"
        raise ConfigError(message)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        kernels.prepare(device)
        from engine_consumers.ssm import checkpoints
        from engine_consumers.ssm.model import Model
    except ImportError as error:
        message = f"`kind`: mamba_ssm cannot be imported here: {error}: run the worker in the engine's own environment"
        raise ConfigError(message) from error
    dtype = DTYPES[options.dtype or ("bfloat16" if device == "cuda" else "float32")]
    lm, config = checkpoints.load(folder, device, dtype)  # first: reading a tokenizer trips over a bad config.json, too
    tokenizer = _tokenizer(Path(options.tokenizer).expanduser() if options.tokenizer else folder, options)
    model = Model(lm, slots, options.readers)
    if not model.warm_up():
        named = str(dtype).removeprefix("torch.")
        mend = "set another `options.dtype`, or fetch it again"
        message = f"`model_path`: the weights in {folder} give no finite numbers in {named}: {mend}"
        raise ConfigError(message)
    trained = options.trained_context or checkpoints.trained_context(config)
    ends = _ends(config.get("eos_token_id"), _generation(folder).get("eos_token_id"), tokenizer.eos_token_id)
    return Loaded(model, tokenizer, tokenizer.backend_tokenizer, ends, trained, device)


def _ends(*given: object) -> frozenset[int]:
    flat = [token for one in given for token in (one if isinstance(one, list) else [one])]
    return frozenset(token for token in flat if isinstance(token, int))


def _generation(folder: Path) -> dict[str, Any]:
    """What the model's authors say of its answers, where they do."""
    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _tokenizer(folder: Path, options: SsmOptions) -> Any:  # noqa: ANN401 - transformers has no types
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        found.backend_tokenizer  # noqa: B018 - only fast ones have it
        if not found.encode("a"):  # of a folder without one it may make an empty one
            raise ValueError("it has no words")  # noqa: EM101, TRY003, TRY301 - told below
    except Exception as error:  # noqa: BLE001 - whatever it raises, the folder is at fault
        field = "`options.tokenizer`" if options.tokenizer else "`model_path`"
        mend = "" if options.tokenizer else ": name the folder of one that has it in `options.tokenizer`"
        message = f"{field}: the tokenizer in {folder} cannot be read: {' '.join(str(error).split())[:300]}{mend}"
        raise ConfigError(message) from None
    return found
