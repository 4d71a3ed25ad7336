"""What each kind of engine is made from."""

from deploy.engines.recipes import hybrid, moe, ssm, transformer
from deploy.engines.recipes.recipe import DEVICES, Device, Environment, Model, Recipe, Report, Step

__all__ = ["DEVICES", "Device", "Environment", "Model", "Recipe", "Report", "Step", "hybrid", "moe", "ssm", "transformer"]
