"""The engine `ssm`: Mamba and Mamba2 on mamba_ssm, with a slot loop of our own."""

from engine_consumers.ssm.backend import SsmEngine

__all__ = ["SsmEngine"]
