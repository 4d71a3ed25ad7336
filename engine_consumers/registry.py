"""Kinds of engines, by name. A kind is imported only when it is loaded, so this imports no GPU library.

Kinds are open: `register` adds one, and so does an installed package with an entry point in the group `forebay.engines`.
What an engine is good at is its own kind; what runs it may be another, named as its backend.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from engine_consumers.engine import Engine
from schemas.config import EngineConfig
from schemas.errors import ConfigError

ENTRY_POINTS = "forebay.engines"

_paths = {
    "moe": "engine_consumers.moe:MoeEngine",
    "sim": "engine_consumers.sim:SimEngine",
    "ssm": "engine_consumers.ssm:SsmEngine",
    "transformer": "engine_consumers.transformer:TransformerEngine",
}


def register(kind: str, path: str) -> None:
    """Make a kind known, or replace it.

    Args:
        kind: Its name in the configuration.
        path: `module:class`; the class takes an `EngineConfig`.
    """
    _paths[kind] = path


def kinds() -> list[str]:
    """All kinds known here, sorted."""
    return sorted({*_paths, *(entry.name for entry in entry_points(group=ENTRY_POINTS))})


def implementation(config: EngineConfig) -> str:
    """The kind that runs an engine: its backend where one is named, else that of its own kind."""
    return config.backend or config.kind


def load(config: EngineConfig) -> Engine:
    """Make an engine; it is not started yet.

    Raises:
        ConfigError: What runs it is not known, its module cannot be imported, or an option is wrong.
    """
    kind, field = implementation(config), "backend" if config.backend else "kind"
    path = _paths.get(kind)
    if path is None:
        found = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
        path = found.get(kind)
    if path is None:
        message = f"`{field}`: no engine of kind {kind!r}: expected one of {', '.join(kinds())}"
        raise ConfigError(message)
    module, _, name = path.partition(":")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"`{field}`: the engine {kind!r} ({path}) cannot be imported: {error}"
        raise ConfigError(message) from error
    return cast("Engine", made(config))
