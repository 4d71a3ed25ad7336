"""How dead letters look: on one line, whole for people, and as JSON."""

import base64
from datetime import UTC, datetime
from typing import Any

from broker.dead_letters import DeadLetter
from broker.replay import PutBack
from deploy.cli.show import plain, whole
from schemas import headers
from schemas.messages import Envelope

HEXED_BYTES_MAX = 4_096
_WIDTHS = {"place": 8, "written": 19, "id": 26, "tenant": 12, "code": 15}
TITLES = "  ".join(f"{name:<{width}}" for name, width in _WIDTHS.items()) + "  reason"


def moment(time_ms: int) -> str:
    """A time in UTC, to the second."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a stranger's timestamp
        return str(time_ms)


def letter_line(letter: DeadLetter, columns: int | None = None) -> str:
    """A dead letter on one line, under `TITLES`, as far as it fits."""
    fields = (str(letter.place), moment(letter.written_at_ms), letter.id or "-", letter.tenant or "-", letter.code)
    said = letter.reason if letter.put_back_at_ms is None else f"(put back {moment(letter.put_back_at_ms)}) {letter.reason}"
    return plain("  ".join([*(f"{f:<{w}}" for f, w in zip(fields, _WIDTHS.values(), strict=True)), said]), columns)


def letter_facts(letter: DeadLetter) -> dict[str, Any]:
    """What `list --json` gives of a dead letter."""
    original = letter.original
    return {
        "place": str(letter.place),
        "written_at_ms": letter.written_at_ms,
        "id": letter.id,
        "tenant": letter.tenant,
        "service_class": letter.service_class,
        "code": letter.code,
        "reason": letter.reason,
        "original": None if original is None else dict(zip(("topic", "partition", "offset"), original, strict=True)),
        "value_bytes": letter.value_bytes,
        "is_cut": letter.is_cut,
        "put_back_at_ms": letter.put_back_at_ms,
    }


def letter_whole(letter: DeadLetter) -> dict[str, Any]:
    """What `show --json` gives: bytes as text where they are UTF-8, else as base64 beside it."""
    envelope = letter.envelope
    shown = [(name, value) for name, value in letter.headers if name != headers.ENVELOPE]
    return {
        **letter_facts(letter),
        "envelope": None if envelope is None else whole(envelope),
        "headers": [{"name": name, **_bytes("value", value)} for name, value in shown],
        **_bytes("key", letter.key),
        **_bytes("value", letter.value),
    }


def put_back_facts(done: PutBack) -> dict[str, Any]:
    """What `replay --json` gives of a dead letter that is a request again."""
    partition, offset = done.at or (None, None)
    return {"place": str(done.place), "id": done.id, "topic": done.topic, "partition": partition, "offset": offset}


def put_back_line(done: PutBack) -> str:
    """The same for people."""
    at = "" if done.at is None else "/{}/{}".format(*done.at)
    return plain(f"{done.place!s:<8}  {done.id or '(a new id)':<26}  -> {done.topic}{at}")


def letter_text(letter: DeadLetter) -> str:
    """Everything about a dead letter, for people."""
    put_back = "no" if letter.put_back_at_ms is None else f"{moment(letter.put_back_at_ms)} UTC"
    facts = [
        ("written", f"{moment(letter.written_at_ms)} UTC"),
        ("id", letter.id or "- (none that can be read)"),
        ("tenant", letter.tenant or "-"),
        ("class", letter.service_class or "- (not known)"),
        ("code", letter.code),
        ("reason", letter.reason),
        ("original", "-" if letter.original is None else "{}/{}/{}".format(*letter.original)),
        *_history(letter.envelope),
        ("put back", put_back),
        ("key", "-" if letter.key is None else readable(letter.key)),
    ]
    facts += [
        ("header", f"{name}: {readable(value)}")
        for name, value in letter.headers
        if name not in {*headers.OF_DEAD, headers.ENVELOPE}
    ]
    size = f"{letter.value_bytes} bytes" + (f", of which the first {len(letter.value or b'')} were kept" if letter.is_cut else "")
    lines = [f"{name:<9} {plain(said)}" for name, said in (("place", str(letter.place)), *facts, ("value", size))]
    return "\n".join([*lines, "", value_text(letter.value or b"")])


def value_text(value: bytes) -> str:
    """A value as text where it is UTF-8, with whatever a terminal would obey made harmless; else in hexadecimal."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _hex(value)
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def readable(value: bytes) -> str:
    """A short value on one line."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"
    return text if text.isprintable() else f"0x{value.hex()}"


def _history(envelope: Envelope | None) -> list[tuple[str, str]]:
    if envelope is None:
        return []
    facts = [
        ("origin", "{}/{}/{}".format(*envelope.origin)),
        ("received", f"{moment(envelope.received_at_ms)} UTC"),
        ("attempts", f"{envelope.attempts} failures before the last, handed to an engine {envelope.hop} times before"),
    ]
    for attempt in envelope.route:
        why = "" if attempt.error is None else f": {attempt.error.code.value}: {attempt.error.message}"
        facts.append(("route", f"{attempt.engine}/{attempt.worker} {attempt.outcome}{why}"))
    return facts


def _bytes(name: str, value: bytes | None) -> dict[str, str | None]:
    if value is None:
        return {name: None}
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {name: None, f"{name}_base64": base64.b64encode(value).decode()}


def _hex(value: bytes) -> str:
    shown = value[:HEXED_BYTES_MAX]
    lines = [f"{at:08x}  {shown[at : at + 16].hex(' ')}" for at in range(0, len(shown), 16)]
    if len(value) > len(shown):
        lines.append(f"... {len(value) - len(shown)} more bytes: --raw writes them all")
    return "\n".join(lines)
