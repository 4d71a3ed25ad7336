"""Overrides of the configuration by environment variables, each read by the type of the field it stands for.

`FOREBAY_SECTION__FIELD=value`, as deep as the tables go: `FOREBAY_ENGINES__SIM__SLOTS=4`. A field that holds text takes
the value as it is; for any other the value is TOML (`4`, `true`, `["a", "b"]`). Names are written in capitals: an
engine or a tenant that the file names is found whatever its case, with `_` for `-` and `.`; the names of an engine's
own environment variables are taken as they are spelled.
"""

import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from schemas.errors import ConfigError

PREFIX = "FOREBAY_"
SEPARATOR = "__"

_TEXT = (inspect.StrType, inspect.LiteralType)


def override(raw: dict[str, Any], environ: Mapping[str, str], kind: type[msgspec.Struct]) -> dict[str, str]:
    """Put the values of the environment into plain tables.

    Args:
        raw: The tables as read from the file; changed in place.
        environ: The environment; variables without our prefix or without a section are passed over.
        kind: The struct that the tables are to become.

    Returns:
        Path (`kafka.bootstrap`) -> the variable that set it.

    Raises:
        ConfigError: A variable goes into what is no section.
    """
    variables: dict[str, str] = {}
    hint: inspect.Type | None = None
    for name in sorted(environ):
        if not name.startswith(PREFIX) or SEPARATOR not in name:
            continue
        hint = hint or inspect.type_info(kind)
        _set(raw, hint, name, environ[name], variables)
    return variables


def cause(variables: Mapping[str, str], path: str | None) -> str | None:
    """Give the variable that is to blame for a fault at a path, if one is."""
    if path is None:
        return None
    parts = path.replace("[", ".").split(".")
    for count in range(len(parts), 0, -1):
        if found := variables.get(".".join(parts[:count])):
            return found
    return None


def _set(table: dict[str, Any], hint: inspect.Type | None, name: str, text: str, variables: dict[str, str]) -> None:
    *sections, last = name[len(PREFIX) :].split(SEPARATOR)
    if not all([*sections, last]):
        message = f"environment variable {name}: expected {PREFIX}SECTION{SEPARATOR}FIELD"
        raise ConfigError(message)
    path: list[str] = []
    for section in sections:
        key, hint = _step(table, hint, section)
        path.append(key)
        if key not in table:
            table[key] = {}
            variables[".".join(path)] = name
        if not isinstance(table[key], dict):
            message = f"environment variable {name}: `{'.'.join(path)}` is not a section"
            raise ConfigError(message)
        table = table[key]
    key, hint = _step(table, hint, last)
    table[key] = _read(text, hint)
    variables[".".join([*path, key])] = name


def _step(table: Mapping[str, Any], hint: inspect.Type | None, part: str) -> tuple[str, inspect.Type | None]:
    """Give the key that a part of a variable's name means, and the type of what it holds, where that is known."""
    if isinstance(hint, inspect.StructType):
        key = part.lower()
        return key, next((field.type for field in hint.fields if field.encode_name == key), None)
    if isinstance(hint, inspect.DictType):
        if isinstance(hint.value_type, inspect.StrType):
            return part, hint.value_type
        alike = [key for key in table if _plain(key) == _plain(part)]
        return alike[0] if alike else part.lower(), hint.value_type
    return part.lower(), None


def _plain(key: str) -> str:
    return key.lower().replace("-", "_").replace(".", "_")


def _read(text: str, hint: inspect.Type | None) -> object:
    options = hint.types if isinstance(hint, inspect.UnionType) else (hint,)
    if any(isinstance(option, _TEXT) for option in options):
        return text
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value
