"""From a folder to a model that is ready to run."""

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from deploy.triton.checkpoint import CONTEXT_DEFAULT, Checkpoint, read_shape, read_tokenizer
from deploy.triton.experts import Experts
from deploy.triton.network import Network
from deploy.triton.options import ModelOptions
from engine_consumers.stepping.device import use_device
from schemas.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    """What a loaded model consists of.

    Attributes:
        network: On its device.
        tokenizer: It spells tokens as they come.
        ends: Tokens that end an answer.
        max_context: Tokens of prompt and output together.
    """

    network: Network
    tokenizer: Tokenizer
    ends: frozenset[int]
    max_context: int


def load(options: ModelOptions) -> Loaded:
    """Load a model, and try it.

    Raises:
        ConfigError: It cannot be read, or there is no such device.
    """
    device = use_device(options.device, options.threads, "device")
    folder = Path(options.model_path).expanduser()
    shape = read_shape(folder)
    context = options.max_context or min(shape.trained_context, CONTEXT_DEFAULT)
    if context > shape.trained_context:
        message = f"`max_context`: the model was made for {shape.trained_context} tokens, got {context}"
        raise ConfigError(message)
    dtype = DTYPES[options.dtype or ("bfloat16" if device == "cuda" else "float32")]
    tokenizer, ends = read_tokenizer(folder)
    checkpoint = Checkpoint(folder)
    experts = Experts(shape, checkpoint, device, dtype, options.cold, options.expert_budget_bytes)
    network = Network(shape, checkpoint, experts, options.slots + options.readers, context, device, dtype)
    if not _warm_up(network, options.slots):
        message = f"`model_path`: the weights in {folder} give no finite numbers in {str(dtype).removeprefix('torch.')}"
        raise ConfigError(message)
    return Loaded(network, tokenizer, ends, context)


def _warm_up(network: Network, row: int) -> bool:
    """Read and step once; whether that gave numbers."""
    read = network.read([0], row)
    network.states.move(row, 0)
    step = network.step([0])
    for used in (row, 0):
        network.states.clear(used)
    return bool(read.isfinite().all() and step.isfinite().all())
