"""From a folder to a model that is ready to run."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_consumers.ssm import kernels
from engine_consumers.ssm.options import SsmOptions
from engine_consumers.stepping.device import use_device
from engine_consumers.tokenizer import ends_of, read_tokenizer
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


def load(folder: Path, options: SsmOptions, slots: int) -> Loaded:
    """Load model and tokenizer, and warm up; takes as long as it takes.

    Raises:
        ConfigError: They cannot be read, or there is no such device.
    """
    device = use_device(options.device, options.threads, "options.device")
    try:
        kernels.prepare(device)
        from engine_consumers.ssm import checkpoints
        from engine_consumers.ssm.model import Model
    except ImportError as error:
        message = f"`kind`: mamba_ssm cannot be imported here: {error}: run the worker in the engine's own environment"
        raise ConfigError(message) from error
    dtype = DTYPES[options.dtype or ("bfloat16" if device == "cuda" else "float32")]
    lm, config = checkpoints.load(folder, device, dtype)  # first: reading a tokenizer trips over a bad config.json, too
    tokenizer = read_tokenizer(folder, options.tokenizer)
    model = Model(lm, slots, options.readers)
    if not model.warm_up():
        named = str(dtype).removeprefix("torch.")
        mend = "set another `options.dtype`, or fetch it again"
        message = f"`model_path`: the weights in {folder} give no finite numbers in {named}: {mend}"
        raise ConfigError(message)
    trained = options.trained_context or checkpoints.trained_context(config)
    ends = ends_of(folder, config, tokenizer)
    return Loaded(model, tokenizer, tokenizer.backend_tokenizer, ends, trained, device)
