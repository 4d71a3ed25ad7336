"""What each kind of engine is made from."""

from deploy.engines.recipes import ssm, transformer
from deploy.engines.recipes.recipe import DEVICES, Device, Environment, Model, Recipe, Report, Step

__all__ = ["DEVICES", "Device", "Environment", "Model", "Recipe", "Report", "Step", "ssm", "transformer"]
