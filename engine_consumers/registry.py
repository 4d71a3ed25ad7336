"""Kinds of engines, by name. A kind is imported only when it is loaded, so this imports no GPU library.

Kinds are open: `register` adds one, and so does an installed package with an entry point in the group `forebay.engines`.
"""

from importlib import import_module
from importlib.metadata import entry_points
from typing import cast

from engine_consumers.engine import Engine
from schemas.config import EngineConfig
from schemas.errors import ConfigError

ENTRY_POINTS = "forebay.engines"

_paths = {
    "sim": "engine_consumers.sim:SimEngine",
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


def load(kind: str, config: EngineConfig) -> Engine:
    """Make an engine; it is not started yet.

    Raises:
        ConfigError: The kind is not known, its module cannot be imported, or an option is wrong.
    """
    path = _paths.get(kind)
    if path is None:
        found = {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
        path = found.get(kind)
    if path is None:
        message = f"`kind`: no engine of kind {kind!r}: expected one of {', '.join(kinds())}"
        raise ConfigError(message)
    module, _, name = path.partition(":")
    try:
        made = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"`kind`: the engine {kind!r} ({path}) cannot be imported: {error}"
        raise ConfigError(message) from error
    return cast("Engine", made(config))
