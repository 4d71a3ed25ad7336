"""Environments of the engines, one per kind and device, and the models that come with them."""

from deploy.engines.environments import (
    RECIPES,
    Installed,
    engine_config,
    install,
    installed,
    not_installable,
    weights_of,
    worker_environment,
)
from deploy.engines.packages import packages_folder
from deploy.engines.recipes import DEVICES, Device
from deploy.engines.tiny import is_tiny
from deploy.engines.trying import Tried, try_token

__all__ = [
    "DEVICES",
    "RECIPES",
    "Device",
    "Installed",
    "Tried",
    "engine_config",
    "install",
    "installed",
    "is_tiny",
    "not_installable",
    "packages_folder",
    "try_token",
    "weights_of",
    "worker_environment",
]
