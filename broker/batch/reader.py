"""The input file: where its lines lie, its digest, and which lines name one custom_id twice.

The file is read twice in all: once here, for the index, and once line by line as requests are sent. Memory holds 24
bytes a line, whatever the lines' length.
"""

import codecs
import contextlib
import hashlib
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from broker.batch.errors import CannotStart

LINES_MAX = 10_000_000
_BLOCK_BYTES = 1 << 20
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLANK = b" \t\r\n"


def index_of(numbers: "array[int]", number: int) -> int | None:
    """Give the place of a line number among ascending ones, or None where it is not among them."""
    index = bisect_left(numbers, number)
    return index if index < len(numbers) and numbers[index] == number else None


class _CustomId(msgspec.Struct):
    custom_id: str


class InputFile:
    """An input file with its index. Lines are numbered from 1, as editors do; blank lines are no lines of the batch.

    Args:
        path: The file.
        line_bytes_max: Longer lines are not kept in memory: `line` gives their beginning.

    Attributes:
        digest: SHA-256 of the whole file.
        numbers: The line numbers that are not blank.
        duplicates: Line number -> earlier line with the same custom_id.

    Raises:
        CannotStart: The file cannot be read, or is no UTF-8 text.
    """

    def __init__(self, path: Path, line_bytes_max: int) -> None:
        self.path, self.line_bytes_max = path, line_bytes_max
        self.numbers, self._starts = array("Q"), array("Q")
        self.duplicates: dict[int, int] = {}
        digest = hashlib.sha256()
        try:
            with contextlib.ExitStack() as on_failure:
                self._file = on_failure.enter_context(path.open("rb"))
                self._signature = self._stat()
                keys = self._scan(digest)
                self._find_duplicates(keys)
                on_failure.pop_all()
        except OSError as error:
            message = f"{path}: {error.strerror or error}"
            raise CannotStart(message) from None
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        """Count the lines that are not blank."""
        return len(self.numbers)

    @property
    def is_cut_off(self) -> bool:
        """Whether the last line has no end."""
        return self._is_cut_off

    def line(self, index: int) -> bytes:
        """Read a line without its end.

        Args:
            index: Place in `numbers`.

        Raises:
            CannotStart: The file was changed while it was being read.
        """
        if self._stat() != self._signature:
            message = f"{self.path}: the file was changed while it was being run"
            raise CannotStart(message)
        self._file.seek(self._starts[index])
        return self._file.readline(self.line_bytes_max + 2).strip(_BLANK)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def _scan(self, digest: Any) -> "array[int]":  # noqa: ANN401 - hashlib names no type
        """Index the lines; gives a hash of each line's custom_id, 0 where it has none that can be read."""
        keys = array("Q")
        decoder = msgspec.json.Decoder(_CustomId)
        last = b"\n"
        for number, (start, head, tail) in enumerate(_lines(self._file, digest, self.line_bytes_max + 2), 1):
            last = tail
            if not head.strip(_BLANK):
                continue
            if number == 1 and head.startswith(_UTF16_MARKS):
                message = f"{self.path}: the file is UTF-16: save it as UTF-8"
                raise CannotStart(message)
            if len(self.numbers) >= LINES_MAX:
                message = f"{self.path}: more than {LINES_MAX} lines: split the file"
                raise CannotStart(message)
            self.numbers.append(number)
            self._starts.append(start)
            keys.append(_key(decoder, head))
        self._is_cut_off = not last.endswith(b"\n")
        return keys

    def _find_duplicates(self, keys: "array[int]") -> None:
        """Compare the custom_ids of those lines alone whose hashes occur more than once."""
        suspects = set()
        before = 0
        for key in sorted(keys):
            if key and key == before:
                suspects.add(key)
            before = key
        first: dict[str, int] = {}
        decoder = msgspec.json.Decoder(_CustomId)
        for index, key in enumerate(keys):
            if key in suspects:
                self._file.seek(self._starts[index])
                custom_id = decoder.decode(self._file.readline(self.line_bytes_max + 2)).custom_id
                number = self.numbers[index]
                if first.setdefault(custom_id, number) != number:
                    self.duplicates[number] = first[custom_id]


def _lines(file: BinaryIO, digest: Any, head_bytes: int) -> Iterator[tuple[int, bytes, bytes]]:  # noqa: ANN401
    """Give each line's start, its first bytes, and its last piece. A byte order mark at the start is passed over."""
    start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
    file.seek(0)
    digest.update(file.read(start))
    while head := file.readline(head_bytes):
        digest.update(head)
        begin, piece = start, head
        start += len(head)
        while not piece.endswith(b"\n") and (more := file.readline(_BLOCK_BYTES)):
            digest.update(more)
            start += len(more)
            piece = more
        yield begin, head, piece


def _key(decoder: msgspec.json.Decoder[_CustomId], line: bytes) -> int:
    try:
        custom_id = decoder.decode(line).custom_id
        return int.from_bytes(hashlib.blake2b(custom_id.encode(), digest_size=8).digest(), "big") or 1
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0
