"""The device that a model runs on."""

import torch

from schemas.errors import ConfigError


def use_device(asked: str, threads: int | None, field: str) -> str:
    """Give the device's name for PyTorch, and limit the threads.

    Args:
        asked: `cuda`, `cpu`, or `auto`: a GPU where there is one.
        threads: Of an operation on a CPU; None leaves them as they are.
        field: The setting's name, for the error.

    Raises:
        ConfigError: There is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    device = ("cuda" if has_gpu else "cpu") if asked == "auto" else asked
    if device == "cuda" and not has_gpu:
        message = f"`{field}`: there is no GPU that PyTorch can use: expected cpu"
        raise ConfigError(message)
    if threads is not None:
        torch.set_num_threads(threads)
    return device
