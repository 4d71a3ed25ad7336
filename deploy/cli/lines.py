"""What an error says in one line, and the exit codes of signals. Imports nothing that a command might not need."""

import sys

SIGINT_EXIT = 130
SIGTERM_EXIT = 143

# Looked up by name, so that telling an error imports nothing: an error whose module was never imported was not raised.
_KNOWN = (
    ("schemas.errors", "SchemaError"),
    ("broker.errors", "BrokerError"),
    ("broker.transport.errors", "TransportError"),
    ("deploy.local.errors", "LocalStackError"),
    ("engine_consumers.errors", "EngineError"),
    ("redis.exceptions", "RedisError"),
)


class Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt nothing but the end of the program should catch it."""


def example(*lines: str) -> str:
    """Write the end of a command's help, as click's `epilog`: what a reader may copy."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def one_line(error: BaseException) -> str | None:
    """Say what happened in one line; None where the error is none that we foresee."""
    if isinstance(error, BaseExceptionGroup):
        return one_line(error.exceptions[0])
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return _joined(f"{error.filename}: {error.strerror}")
    known = tuple(getattr(sys.modules[module], name) for module, name in _KNOWN if hasattr(sys.modules.get(module), name))
    if isinstance(error, (*known, OSError)):
        return _joined(str(error) or type(error).__name__)
    return None


def _joined(text: str) -> str:
    return " ".join(text.split())
