"""Environments of the engines, one per kind and device, and the model that comes with them."""

from deploy.engines.environments import (
    DEVICES,
    LATER,
    TRANSFORMER,
    Device,
    Installed,
    install,
    installed,
    transformer_engine_config,
    worker_environment,
)
from deploy.engines.packages import packages_folder

__all__ = [
    "DEVICES",
    "LATER",
    "TRANSFORMER",
    "Device",
    "Installed",
    "install",
    "installed",
    "packages_folder",
    "transformer_engine_config",
    "worker_environment",
]
