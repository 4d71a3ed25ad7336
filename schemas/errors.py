"""Errors of the schemas package, and the taxonomy that every failed result speaks.

SchemaError
├── InvalidMessage    a peer's record that cannot be accepted: code, message, and the field at fault
└── ConfigError       our own configuration: the path of the field and what was expected
"""

from enum import Enum


class ErrorCode(str, Enum):
    """The closed taxonomy of failures; `retryable` says whether another try may succeed."""

    CAPACITY_EXCEEDED = "capacity_exceeded"
    UNHEALTHY = "unhealthy"
    TIMEOUT = "timeout"
    INTERNAL = "internal"
    PREEMPTED = "preempted"
    INVALID_REQUEST = "invalid_request"
    CONTEXT_OVERFLOW = "context_overflow"
    MODEL_NOT_FOUND = "model_not_found"
    UNSUPPORTED_FEATURE = "unsupported_feature"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    POISON = "poison"

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed on another try."""
        return self in _RETRYABLE

    @property
    def is_client_fault(self) -> bool:
        """Whether the request itself is at fault, so that it is `rejected` rather than `failed`."""
        return self in _CLIENT_FAULTS


_RETRYABLE = frozenset(
    {
        ErrorCode.CAPACITY_EXCEEDED,
        ErrorCode.UNHEALTHY,
        ErrorCode.TIMEOUT,
        ErrorCode.INTERNAL,
        ErrorCode.PREEMPTED,
    }
)
_CLIENT_FAULTS = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_OVERFLOW,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.UNSUPPORTED_FEATURE,
    }
)


class SchemaError(ValueError):
    """Base of this package's errors."""


class InvalidMessage(SchemaError):
    """A record that does not decode into the message it should be.

    Args:
        message: One sentence, naming the field where there is one.
        param: Path of the field at fault (`sampling.top_p`), or None when the whole value is at fault.
        code: The taxonomy's word for it.
    """

    def __init__(self, message: str, param: str | None = None, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(SchemaError):
    """A configuration value that stops the start; the text begins with its path."""
