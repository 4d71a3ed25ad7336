"""The `transformer` engine: vLLM, on GPU or CPU."""

from engine_consumers.transformer.backend import TransformerEngine
from engine_consumers.transformer.options import TransformerOptions

__all__ = ["TransformerEngine", "TransformerOptions"]
