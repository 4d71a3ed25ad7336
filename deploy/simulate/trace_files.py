"""Traces of real traffic: when requests came, and how long their prompts and answers were.

Two formats are read: Azure's LLM inference traces (CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake's (one JSON object a line with timestamp in milliseconds, input_length, output_length).
"""

import csv
import math
from array import array
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from deploy.simulate.errors import TraceError

FOLDER = Path(__file__).with_name("traces")
SHIPPED = {"azure_conv": FOLDER / "AzureLLMInferenceTrace_conv.csv"}
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
TOKENS_MAX = 2**31 - 1
LINE_CHARS_MAX = 10_000_000  # Mooncake's lines also hold hashes of blocks


class Trace(NamedTuple):
    """What a trace holds; 16 bytes a request.

    Attributes:
        at_ms: When each request came, from the first on.
    """

    at_ms: "array[float]"
    input_tokens: "array[int]"
    output_tokens: "array[int]"

    def __len__(self) -> int:
        """Count its requests."""
        return len(self.at_ms)

    @property
    def span_ms(self) -> float:
        """From the first request to where the next round begins: its last gap is the mean one."""
        return self.at_ms[-1] * len(self.at_ms) / max(1, len(self.at_ms) - 1)


def find_trace(name: str, beside: Path | None = None) -> Path:
    """Give the file of a shipped trace, or the path that it is; a relative one is looked for beside the scenario first."""
    if name in SHIPPED:
        return SHIPPED[name]
    if beside is not None and (beside / name).is_file():
        return beside / name
    return Path(name)


def read_trace(path: Path) -> Trace:
    """Read a trace of either format, told by its first line.

    Raises:
        TraceError: Naming the file, the line and what was expected.
    """
    trace = Trace(array("d"), array("i"), array("i"))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline(LINE_CHARS_MAX)
            file.seek(0)
            rows = _mooncake(path, file) if first.lstrip().startswith("{") else _azure(path, file)
            _collect(path, trace, rows)
    except FileNotFoundError:
        message = f"{path}: no such trace: give a file, or one of {', '.join(SHIPPED)}"
        raise TraceError(message) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        message = f"{path}: {' '.join(str(error).split())}"
        raise TraceError(message) from None
    if len(trace) < 2 or not trace.at_ms[-1]:
        message = f"{path}: expected two requests at least, at different times: it has {len(trace)}"
        raise TraceError(message)
    return trace


_Row = tuple[int, float, int, int]  # line, milliseconds, input tokens, output tokens


def _collect(path: Path, trace: Trace, rows: Iterator[_Row]) -> None:
    zero_ms: float | None = None
    for line, ms, input_tokens, output_tokens in rows:
        zero_ms = ms if zero_ms is None else zero_ms
        if trace.at_ms and ms - zero_ms < trace.at_ms[-1]:
            message = f"{path}:{line}: it came before the line above: sort the trace by time"
            raise TraceError(message)
        trace.at_ms.append(ms - zero_ms)
        trace.input_tokens.append(input_tokens)
        trace.output_tokens.append(output_tokens)


def _azure(path: Path, file: Iterable[str]) -> Iterator[_Row]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    if missing := [name for name in AZURE if name not in header]:
        message = f"{path}:1: expected the columns {', '.join(AZURE)} or lines of JSON: {missing[0]} is missing"
        raise TraceError(message)
    when, context, generated = (header.index(name) for name in AZURE)
    for row in reader:
        line = reader.line_num
        if not row:
            continue
        if len(row) != len(header):
            message = f"{path}:{line}: expected {len(header)} columns, got {len(row)}"
            raise TraceError(message)
        try:
            ms = datetime.fromisoformat(row[when].strip()).timestamp() * 1000
        except ValueError:
            message = f"{path}:{line}: TIMESTAMP: expected a time such as 2023-11-16 18:15:46.68, got {row[when][:40]!r}"
            raise TraceError(message) from None
        yield line, ms, _tokens(path, line, AZURE[1], row[context], 1), _tokens(path, line, AZURE[2], row[generated], 0)


def _mooncake(path: Path, file: Iterator[str]) -> Iterator[_Row]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            message = f"{path}:{line}: not JSON: {error}"
            raise TraceError(message) from None
        missing = [name for name in MOONCAKE if name not in row] if isinstance(row, dict) else list(MOONCAKE)
        if missing:
            message = f"{path}:{line}: expected an object with {', '.join(MOONCAKE)}: {missing[0]} is missing"
            raise TraceError(message)
        ms, *lengths = (row[name] for name in MOONCAKE)
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not math.isfinite(ms):
            message = f"{path}:{line}: timestamp: expected milliseconds, got {str(ms)[:40]!r}"
            raise TraceError(message)
        yield line, float(ms), _tokens(path, line, MOONCAKE[1], lengths[0], 1), _tokens(path, line, MOONCAKE[2], lengths[1], 0)


def _tokens(path: Path, line: int, name: str, value: object, least: int) -> int:
    """Read a count; an answer without tokens is one that has ended with its first."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not least <= number <= TOKENS_MAX or number != int(number):  # also where it is no number
        message = f"{path}:{line}: {name}: expected a whole number from {least} to {TOKENS_MAX}, got {str(value)[:40]!r}"
        raise TraceError(message)
    return max(1, int(number))
