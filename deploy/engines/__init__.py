"""Environments of the engines, one per kind and device, and the model that comes with them."""

from deploy.engines.environments import Installed, install, installed, transformer_engine_config

__all__ = ["Installed", "install", "installed", "transformer_engine_config"]
