"""The engine `moe`: a Triton server over gRPC, whatever backend it runs."""

from engine_consumers.moe.backend import MoeEngine
from engine_consumers.moe.options import MoeOptions

__all__ = ["MoeEngine", "MoeOptions"]
