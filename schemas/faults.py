"""What is wrong with a value that was refused, in one line that names the field by its path.

msgspec says most of it; what it leaves out is looked up here, in a second and slower reading of the refused value:
which key of a mapping is meant, and where bytes that are no text, or a number that is no number, stand. Values above
`REREAD_BYTES_MAX` are not read again, so that a bad record never costs much more than a good one.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from schemas import headers
from schemas.choices import Step, choices
from schemas.errors import InvalidMessage

REREAD_BYTES_MAX = 65_536
REREAD_DEPTH_MAX = 64
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 300

_PATH = re.compile(r" - at `(?P<key>key` in `)?\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_REQUIRED = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_OF_A_CHOICE = re.compile(r"^Invalid enum value |^Expected `str`, got ")
_FIRST_NAME = re.compile(r"^`(?P<name>\w+)`")
_NOT_UTF8 = "UTF-8"  # in the text of msgspec's error
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


class _NotANumber:
    """Stands where JSON holds `NaN` or an infinity."""

    def __init__(self, spelled: str) -> None:
        self.spelled = spelled


def invalid(
    error: Exception, content_type: str = headers.JSON, *, value: Callable[[], object] | None = None, kind: object = None
) -> InvalidMessage:
    """Turn msgspec's error into ours: one sentence that begins with the field's path.

    Args:
        error: What msgspec raised.
        content_type: What the value was read as.
        value: Gives the refused value as plain objects; without it a mapping's key stays `[...]`.
        kind: The type that the value should have had; without it a field's few allowed values are not named.
    """
    if not isinstance(error, msgspec.ValidationError):
        name = "msgpack" if content_type == headers.MSGPACK else "JSON"
        text = "nested too deeply" if isinstance(error, RecursionError) else _one_line(str(error))
        return InvalidMessage(f"not {name}: {text}")
    text, steps, at_key = _split(str(error))
    if None in steps or at_key:
        steps, key = _name_keys(steps, value, kind, str(error), at_key=at_key)
        if at_key:
            text = f"key {_clip(repr(key))}: {text}" if key is not None else f"a key: {text}"
    for pattern, wording in ((_UNKNOWN, "unknown field"), (_REQUIRED, "required field is missing")):
        if found := pattern.match(text):
            steps, text = [*steps, found["name"]], wording
    path = show(steps)
    allowed = choices(kind, steps) if kind is not None and _OF_A_CHOICE.match(text) else []
    text = _one_line(text).replace("got `None`", "got `null`")
    if allowed:
        text = f"{text}: expected one of {', '.join(allowed)}"
    if not path and (found := _FIRST_NAME.match(text)):
        return InvalidMessage(text, found["name"])
    return InvalidMessage(f"`{path}`: {text}" if path else f"the value: {text}", path or None)


def misread(error: Exception, value: bytes, content_type: str, kind: object) -> InvalidMessage:
    """Turn what a decoder raised into our error, reading the value again for what the decoder did not say."""
    if content_type != headers.MSGPACK and (mark := _mark(value)):
        return InvalidMessage(f"not JSON: it begins with {mark}: write it as UTF-8 without one")
    if len(value) > REREAD_BYTES_MAX:
        return invalid(error, content_type, kind=kind)
    if isinstance(error, msgspec.ValidationError):
        module = msgspec.msgpack if content_type == headers.MSGPACK else msgspec.json
        return invalid(error, content_type, value=lambda: module.decode(value), kind=kind)
    found = None
    if content_type != headers.MSGPACK:
        found = _bad_json(value)
    elif _NOT_UTF8 in str(error):
        found = _bad_msgpack(value)
    if found is None:
        return invalid(error, content_type)
    steps, text = found
    path = show(steps)
    return InvalidMessage(f"`{path}`: {text}" if path else f"the value: {text}", path or None)


def legible(value: bytes, content_type: str) -> dict[str, Any]:
    """Give those fields of an object that can be read, where it as a whole cannot; empty where it is no object."""
    if len(value) > REREAD_BYTES_MAX:
        return {}
    if content_type != headers.MSGPACK:
        document = _lenient_json(value)
        return (
            {name: found for name, found in document.items() if _first_bad(found) is None} if isinstance(document, dict) else {}
        )
    try:
        parts = msgspec.msgpack.decode(value, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return {}
    return {name: msgspec.msgpack.decode(part) for name, part in parts.items() if _is_sound(part)}


def without_mark(value: bytes) -> bytes:
    """Give text that begins with a byte order mark as the UTF-8 that it should have been; any other as it is."""
    if value.startswith(codecs.BOM_UTF8):
        return value.removeprefix(codecs.BOM_UTF8)
    if not _mark(value) or len(value) > REREAD_BYTES_MAX:
        return value
    return value.decode("utf-16", "replace").encode("utf-8", "replace")


def _mark(value: bytes) -> str | None:
    """Name the byte order mark that a text begins with, if it does: no JSON does, and many editors write one."""
    if value.startswith(codecs.BOM_UTF8):
        return "a byte order mark (EF BB BF)"
    if value.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "a byte order mark of UTF-16"
    return None


def unwritable(message: msgspec.Struct) -> InvalidMessage:
    """Say which field of a message holds text that no encoding can write."""
    found = _first_bad(msgspec.to_builtins(message))
    steps, text = found or ([], "text that cannot be written as UTF-8")
    path = show(steps)
    return InvalidMessage(f"`{path}`: {text}", path or None)


def show(steps: Sequence[Step]) -> str:
    """Write a path: `messages[0].content`, `metadata.colour`, `metadata['two words']`."""
    parts = []
    for step in steps:
        if step is None:
            parts.append("[...]")
        elif isinstance(step, int):
            parts.append(f"[{step}]")
        elif _PLAIN.fullmatch(step) and len(step) <= NAME_CHARS_MAX:
            parts.append(f".{step}")
        else:
            shown = _clip(repr(step)).replace("`", "'")
            parts.append(f"[{shown}]")
    return "".join(parts).removeprefix(".")


def _clip(text: str) -> str:
    return text if len(text) <= NAME_CHARS_MAX else text[: NAME_CHARS_MAX - 1] + "…"


def _one_line(text: str) -> str:
    shown = text[: TEXT_CHARS_MAX + 1]
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    return shown if len(shown) <= TEXT_CHARS_MAX else shown[: TEXT_CHARS_MAX - 1] + "…"


def _split(text: str) -> tuple[str, list[Step], bool]:
    found = _PATH.search(text)
    if not found:
        return text, [], False
    steps: list[Step] = [s["name"] or (int(s["index"]) if s["index"] else None) for s in _STEP.finditer(found["path"])]
    return text[: found.start()], steps, bool(found["key"])


def _name_keys(
    steps: list[Step], value: Callable[[], object] | None, kind: object, text: str, *, at_key: bool
) -> tuple[list[Step], object]:
    """Put keys where msgspec says `[...]`, and give the key itself where the fault is a key."""
    if value is None:
        return steps, None
    try:
        document, named = value(), list(steps)
    except (ValueError, TypeError, RecursionError):  # what stands behind the fault cannot be read at all
        return steps, None
    for place in [n for n, step in enumerate(steps) if step is None]:
        key = _first_bad_key(document, named[:place], kind, text)
        if not isinstance(key, str | int):
            return named, None
        named[place] = str(key)
    return named, _first_bad_key(document, named, kind, text) if at_key else None


def _first_bad_key(document: object, steps: Sequence[Step], kind: object, text: str) -> object:
    """Give the first key with which the mapping at `steps` draws the same error; found by halving."""
    mapping = _at(document, steps)
    if not isinstance(mapping, dict) or not mapping:
        return None
    items, fault = list(mapping.items()), _split(text)[1:]

    def fails(count: int) -> bool:
        try:
            msgspec.convert(_with(document, steps, dict(items[:count])), kind, str_keys=True)
        except msgspec.ValidationError as error:
            return _split(str(error))[1:] == fault
        return False

    if not fails(len(items)):
        return None
    below, above = 0, len(items)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if fails(middle) else (middle, above)
    return items[above - 1][0]


def _at(document: object, steps: Sequence[Step]) -> object:
    for step in steps:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return None
    return document


def _with(document: object, steps: Sequence[Step], new: object) -> object:
    if not steps:
        return new
    if isinstance(document, dict):
        return document | {steps[0]: _with(document[steps[0]], steps[1:], new)}
    if isinstance(document, list):
        return [_with(below, steps[1:], new) if n == steps[0] else below for n, below in enumerate(document)]
    return document


def _bad_json(value: bytes) -> tuple[list[Step], str] | None:
    """Find the first text that is not UTF-8, or the first number that is none, in what is JSON but for that."""
    document = _lenient_json(value)
    return None if document is None else _first_bad(document)


def _lenient_json(value: bytes) -> object:
    try:
        document: object = json.loads(value.decode("utf-8", "surrogateescape"), parse_constant=_NotANumber)
    except (ValueError, RecursionError):
        return None
    return document


def _first_bad(document: object) -> tuple[list[Step], str] | None:
    for steps, found in _walk(document):
        if isinstance(found, _NotANumber):
            return steps, f"{found.spelled} is not a number that JSON knows"
        if isinstance(found, str) and any("\ud800" <= c <= "\udfff" for c in found):
            return steps, "the text is not UTF-8"
        if isinstance(found, dict) and any("\ud800" <= c <= "\udfff" for key in found for c in key):
            return steps, "a name in it is not UTF-8"
    return None


def _walk(document: object) -> Iterator[tuple[list[Step], object]]:
    """Give every value below with its path, in the order in which they stand."""
    waiting: list[tuple[list[Step], object]] = [([], document)]
    while waiting:
        steps, found = waiting.pop()
        yield steps, found
        if isinstance(found, dict):
            waiting += [([*steps, str(key)], below) for key, below in reversed(found.items())]
        elif isinstance(found, list):
            waiting += [([*steps, n], found[n]) for n in reversed(range(len(found)))]


def _bad_msgpack(value: bytes) -> tuple[list[Step], str] | None:
    """Go down to the text that is not UTF-8: each level is read with its parts left unread, then each part alone."""
    steps: list[Step] = []
    for _ in range(REREAD_DEPTH_MAX):
        try:
            parts = _parts(value)
        except msgspec.ValidationError:
            return steps, "the text is not UTF-8"
        except msgspec.DecodeError as error:
            return (steps, "a name in it is not UTF-8") if _NOT_UTF8 in str(error) else None
        for step, part in parts:
            if not _is_sound(part):
                steps.append(step)
                value = part
                break
        else:
            return None
    return steps, "the text is not UTF-8"


def _parts(value: bytes) -> list[tuple[Step, bytes]]:
    try:
        below = msgspec.msgpack.decode(value, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except msgspec.ValidationError as error:
        if "`key` in" not in str(error):
            raise
        return [(None, bytes(part)) for part in msgspec.msgpack.decode(value, type=dict[Any, msgspec.Raw]).values()]
    items = below.items() if isinstance(below, dict) else enumerate(below)
    return [(step, bytes(part)) for step, part in items]


def _is_sound(value: bytes) -> bool:
    try:
        msgspec.msgpack.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
