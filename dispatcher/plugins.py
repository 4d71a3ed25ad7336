"""Loads the modules that bring plugins of routing; the core itself imports nothing that it is not made of."""

from collections.abc import Sequence
from importlib import import_module

from dispatcher.core.routing import plugins
from schemas.errors import ConfigError
from schemas.policy import RoutingConfig


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules, so that what they register is known.

    Args:
        modules: As in `routing.plugins`.

    Raises:
        ConfigError: One cannot be imported, or registers a name that is taken; in one line.
    """
    for place, module in enumerate(modules):
        try:
            import_module(module)
        except Exception as error:  # whatever a module does when it is imported
            said = " ".join(str(error).split()) or type(error).__name__
            message = f"`routing.plugins[{place}]`: cannot import {module!r}: {said}"
            raise ConfigError(message) from error


def ready_plugins(routing: RoutingConfig) -> None:
    """Load the modules that are configured, and see that every name in use is registered.

    Raises:
        ConfigError: With the path of what is wrong.
    """
    load_plugins(routing.plugins)
    plugins.check(routing)
