"""The stack's `forebay.toml`: made once, and then the user's; `up` sets three values in it and adds engines."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from deploy.local.errors import LocalStackError
from schemas.config import EngineConfig

HEAD = """\
# Forebay's configuration, made by `forebay local up`. Later starts set kafka.bootstrap, kafka.delivery and redis.url
# here, and add the engines that they are told to start; everything else is yours and stays as it is.
"""

_HEADER = re.compile(r"^\s*\[([^\[\]]+)\]\s*(?:#.*)?$")


def set_value(text: str, section: str, key: str, value: str) -> str:
    """Set one text value of a section, and leave every other line as it is.

    Raises:
        LocalStackError: The file spells it in a way that cannot be edited line by line.
    """
    line = f"{key} = {_text(value)}"
    lines = text.splitlines()
    start = next((i for i, one in enumerate(lines) if _section(one) == section), None)
    if start is None:
        lines += ["", f"[{section}]", line]
    else:
        end = next((i for i in range(start + 1, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
        at = next((i for i in range(start + 1, end) if re.match(rf"\s*{re.escape(key)}\s*=", lines[i])), None)
        if at is None:
            last = max(i for i in range(start, end) if lines[i].strip())
            lines.insert(last + 1, line)
        else:
            lines[at] = line
    edited = "\n".join(lines) + "\n"
    _must_say(edited, section, key, value)
    return edited


def add_engine(text: str, name: str, engine: EngineConfig) -> str:
    """Add an engine's table at the end of the file."""
    plain = {key: value for key, value in msgspec.to_builtins(engine).items() if value not in (None, {}, [])}
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    lines = [f"[engines.{name}]", *(f"{key} = {_toml(value)}" for key, value in plain.items() if key not in tables)]
    for key, table in tables.items():
        lines += ["", f"[engines.{name}.{key}]", *(f"{_key(one)} = {_toml(value)}" for one, value in table.items())]
    return text.rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


def read_text(path: Path) -> str:
    """Give the file's text, or the head of a new one.

    Raises:
        LocalStackError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return HEAD
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: {error}"
        raise LocalStackError(message) from None


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step.

    Raises:
        LocalStackError: It cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise LocalStackError(message) from None


def _section(line: str) -> str | None:
    found = _HEADER.match(line)
    return found[1].strip() if found else None


def _must_say(text: str, section: str, key: str, value: str) -> None:
    try:
        table: Mapping[str, Any] = tomllib.loads(text)
        for part in section.split("."):
            table = table[part]
        if table[key] == value:
            return
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        pass
    message = f"cannot set `{section}.{key}` in forebay.toml: write it as a line `{key} = ...` below `[{section}]`"
    raise LocalStackError(message)


def _toml(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    message = f"TOML cannot say {value!r}"
    raise LocalStackError(message)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
