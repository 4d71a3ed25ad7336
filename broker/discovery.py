"""Where the configuration is found when nobody names it: the same place for the client and for the command line."""

import os
from collections.abc import Mapping
from pathlib import Path

from schemas.config import Config, load_config

CONFIG_NAME = "forebay.toml"
CONFIG_VARIABLE = "FOREBAY_CONFIG"
HOME_VARIABLE = "FOREBAY_HOME"


def find_config(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Find the configuration file, or None where the defaults and the environment must do.

    The first of these: the given path, FOREBAY_CONFIG, `./forebay.toml`, and the one that `forebay local up` wrote
    into its home (FOREBAY_HOME, else `forebay` in XDG_DATA_HOME or `~/.local/share`).
    """
    env = os.environ if environ is None else environ
    if path is not None:
        return path.expanduser()
    if env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE]).expanduser()
    for candidate in (Path(CONFIG_NAME), _home(env) / CONFIG_NAME):
        if candidate.is_file():
            return candidate
    return None


def discover(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Find and read the configuration.

    Raises:
        ConfigError: Naming the file, the field's path and what was expected.
    """
    env = os.environ if environ is None else environ
    return load_config(find_config(path, env), env)


def _home(env: Mapping[str, str]) -> Path:
    if env.get(HOME_VARIABLE):
        return Path(env[HOME_VARIABLE]).expanduser()
    shared = env.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path("~/.local/share").expanduser()) / "forebay"
