"""Environments of the engines, one per kind and device, and the models that come with them."""

from deploy.engines.environments import (
    LATER,
    RECIPES,
    Installed,
    engine_config,
    install,
    installed,
    not_installable,
    worker_environment,
)
from deploy.engines.packages import packages_folder
from deploy.engines.recipes import DEVICES, Device

__all__ = [
    "DEVICES",
    "LATER",
    "RECIPES",
    "Device",
    "Installed",
    "engine_config",
    "install",
    "installed",
    "not_installable",
    "packages_folder",
    "worker_environment",
]
