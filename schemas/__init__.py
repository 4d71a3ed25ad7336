"""Messages, topics, headers, configuration and the error taxonomy; imports nothing else of ours."""

from schemas.config import Config, load_config, parse_config
from schemas.errors import ConfigError, ErrorCode, InvalidMessage, SchemaError
from schemas.messages import (
    ChatMessage,
    EngineStatus,
    Envelope,
    ErrorInfo,
    InferenceRequest,
    InferenceResult,
    RouteAttempt,
    Sampling,
    Timing,
    TokenChunk,
    Usage,
)
from schemas.topics import Topics, TopicSpec

__all__ = [
    "ChatMessage",
    "Config",
    "ConfigError",
    "EngineStatus",
    "Envelope",
    "ErrorCode",
    "ErrorInfo",
    "InferenceRequest",
    "InferenceResult",
    "InvalidMessage",
    "RouteAttempt",
    "Sampling",
    "SchemaError",
    "Timing",
    "TokenChunk",
    "TopicSpec",
    "Topics",
    "Usage",
    "load_config",
    "parse_config",
]
