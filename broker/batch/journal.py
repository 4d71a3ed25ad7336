r"""What a run has reached, in one file beside its output: enough to go on after any kill, and to write the outputs.

The first line says whose run it is; it is on disk before anything is sent. Then come entries, a line each, in the order
in which they happened:

    O 17 {...}     line 17 is answered: its line for the output
    E 18 {...}     line 18 is not: its line for the error file
    M 40 1234      every line up to 40 is in the cluster or answered; results before offset 1234 are in this file
    F {...}        the outputs are written; only this and the first line remain then

A line cut short by a kill, and whatever follows it, is dropped when the file is opened again: nothing in it is known
only there, for what it says can be read from the cluster again.
"""

import contextlib
import fcntl
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from broker.batch.errors import CannotStart
from broker.batch.reader import index_of

VERSION = 1
Kind = Literal["O", "E"]


class Header(msgspec.Struct, frozen=True):
    """Whose run it is.

    Attributes:
        digest: SHA-256 of the input.
        settings: Digest of whatever else goes into a request.
        cluster: Address and topic prefix.
        partition: The partition of the results topic that the answers come to.
        offset: Its end before the first request was sent.
        deadline_ms: Unix time after which the cluster answers `expired`.
    """

    version: int
    digest: str
    settings: str
    cluster: str
    partition: int
    offset: int
    deadline_ms: int


class Tally(msgspec.Struct):
    """How many lines are answered, and how many ended as errors."""

    answered: int = 0
    errors: int = 0


class Finished(Tally):
    """What was reached in the end.

    Attributes:
        error_file: The error file that was written, seen from the journal's folder; empty where that is not known.
    """

    error_file: str = ""


class Journal:
    """The file, held by one process at a time.

    Args:
        path: The file; made where it is missing.
        numbers: The input's line numbers, ascending.

    Attributes:
        header: None until `begin`.
        sent: Every line number up to this one is in the cluster or ended.
        offset: Where to read results from.
        finished: What was reached, where the outputs are already written.

    Raises:
        CannotStart: Another process works with it, or it is no journal.
    """

    def __init__(self, path: Path, numbers: "array[int]") -> None:
        self.path = path
        self.header: Header | None = None
        self.finished: Finished | None = None
        self.tally = Tally()
        self.sent = self.offset = 0
        self._numbers = numbers
        self._places = array("Q", bytes(8 * len(numbers)))  # where each line's entry begins; 0: none, for the header lies there
        try:
            with contextlib.ExitStack() as on_failure:
                self._file = on_failure.enter_context(path.open("a+b"))
                _lock(self._file.fileno(), path)
                self._load()
                on_failure.pop_all()
        except OSError as error:
            message = f"{path}: {error.strerror or error}"
            raise CannotStart(message) from None
        self._end = self._file.seek(0, os.SEEK_END)

    def begin(self, header: Header) -> None:
        """Start anew; returns once that is on disk."""
        self._file.truncate(0)
        self._file.write(msgspec.json.encode(header) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._end = self._file.seek(0, os.SEEK_END)
        self.header, self.finished, self.tally = header, None, Tally()
        self.sent, self.offset = 0, header.offset
        self._places = array("Q", bytes(8 * len(self._numbers)))

    def has(self, index: int) -> bool:
        """Whether a line has ended."""
        return self._places[index] != 0

    def add(self, index: int, kind: Kind, line: bytes) -> None:
        """Keep the end of a line that has not ended yet."""
        entry = b"%s %d %s\n" % (kind.encode(), self._numbers[index], line)
        self._places[index] = self._end
        self._file.write(entry)
        self._end += len(entry)
        self._count(kind)

    def mark(self, sent: int, offset: int) -> None:
        """Keep how far sending and reading have come, and hand everything to the system."""
        if (sent, offset) != (self.sent, self.offset):
            self.sent, self.offset = sent, offset
            entry = b"M %d %d\n" % (sent, offset)
            self._file.write(entry)
            self._end += len(entry)
        self._file.flush()

    def read(self) -> Iterator[tuple[Kind, bytes]]:
        """Give every line's end in the input's order."""
        self._file.flush()
        for place in self._places:
            self._file.seek(place)
            kind, _, rest = self._file.readline().partition(b" ")
            yield ("O" if kind == b"O" else "E"), rest.partition(b" ")[2]

    def finish(self, error_file: str) -> None:
        """Say that the outputs are written, and keep no more than that."""
        if self.header is None:
            return
        finished = Finished(self.tally.answered, self.tally.errors, error_file)
        shorter = self.path.with_name(f"{self.path.name}.new")
        with shorter.open("wb") as file:
            file.write(msgspec.json.encode(self.header) + b"\nF " + msgspec.json.encode(finished) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        shorter.replace(self.path)
        self.finished = finished

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._file.close()

    def _count(self, kind: Kind) -> None:
        if kind == "O":
            self.tally.answered += 1
        else:
            self.tally.errors += 1

    def _load(self) -> None:
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):
            self._file.truncate(0)  # killed before anything was sent
            return
        try:
            self.header = msgspec.json.decode(first, type=Header)
        except msgspec.DecodeError:
            message = f"{self.path}: not a journal of a batch run: move it away, or name another output"
            raise CannotStart(message) from None
        self.offset = self.header.offset
        sound = self._file.tell()
        while entry := self._file.readline():
            if not entry.endswith(b"\n") or not self._take(entry, sound):
                self._file.truncate(sound)
                return
            sound += len(entry)

    def _take(self, entry: bytes, place: int) -> bool:
        """Take an entry in; False where it is none."""
        kind, _, rest = entry.partition(b" ")
        try:
            if kind == b"F":
                self.finished = msgspec.json.decode(rest, type=Finished)
            elif kind == b"M":
                sent, offset = rest.split()
                self.sent, self.offset = int(sent), int(offset)
            elif kind in (b"O", b"E"):
                index = index_of(self._numbers, int(rest.partition(b" ")[0]))
                if index is not None and not self._places[index]:
                    self._places[index] = place
                    self._count("O" if kind == b"O" else "E")
            else:
                return False
        except (ValueError, msgspec.DecodeError):
            return False
        return True


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        message = f"{path}: another process is running this batch"
        raise CannotStart(message) from None
