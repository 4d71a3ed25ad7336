"""What a run has to do: its files, the ids of its requests, the lines that remain, and the outputs at the end.

Knows no cluster. The id of a request holds the run's key and the line's number, so a result names its line by itself
and memory need not keep who asked what. The key is drawn from the file's digest and the settings: the same file run
again in the same way gives the same ids, whose repeats the readers drop.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from broker.batch.errors import CannotStart
from broker.batch.journal import VERSION, Finished, Header, Journal, Tally
from broker.batch.lines import Settings
from broker.batch.reader import InputFile, index_of

PROGRESS_SUFFIX = ".progress"
_KEY_BYTES = 12


class Files(msgspec.Struct, frozen=True):
    """The files of a run.

    Attributes:
        source: OpenAI batch lines.
        output: A line for each that was answered.
        errors: A line for each that was not.
    """

    source: Path
    output: Path
    errors: Path

    @property
    def progress(self) -> Path:
        """Where the run keeps what it has reached."""
        return self.output.with_name(self.output.name + PROGRESS_SUFFIX)


class Plan:
    """A run, opened: new, begun earlier, or finished.

    Args:
        files: Input and outputs.
        settings: What the run adds to the lines.
        line_bytes_max: Longer lines become errors.
        restart: Forget what an earlier run reached.
        resend: Send lines that have no answer again, also those that are in the cluster already.

    Raises:
        CannotStart: The files do not fit, with what to do.
    """

    def __init__(
        self, files: Files, settings: Settings, line_bytes_max: int, *, restart: bool = False, resend: bool = False
    ) -> None:
        self.settings = settings
        self.files = files = _checked(files)
        self.source = InputFile(files.source, line_bytes_max)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.source.close)
            self._open(restart=restart)
            on_failure.pop_all()
        if resend:
            self.journal.sent = 0

    def _open(self, *, restart: bool) -> None:
        """Open the journal, and see whether everything fits."""
        files = self.files
        self.settings_text = msgspec.json.encode(self.settings).decode()
        key = hashlib.blake2b(f"{self.source.digest} {self.settings_text}".encode(), digest_size=_KEY_BYTES).hexdigest()
        self._key = key
        self.name = f"batch-{key}"  # by which its requests are cancelled together
        self.id_prefix = f"{self.name}-"
        self._key_prefix = self.id_prefix.encode()
        self._restart = restart
        is_new = not files.progress.exists()
        if is_new and not restart and files.output.exists() and files.output.stat().st_size:
            message = f"{files.output}: exists and is not of this run: name another output, or give --restart to replace it"
            raise CannotStart(message)
        self.journal = Journal(files.progress, self.source.numbers)
        try:
            if not restart:
                self._must_fit(self.journal.header)
                self._must_fit_outputs(self.journal.finished)
        except CannotStart:
            self.journal.close()
            raise
        if self.journal.finished and not self.is_finished:
            self._restart = True  # the output was taken away, and what it held is nowhere else

    @property
    def header(self) -> Header | None:
        """What the earlier run fixed, or None where this one is new."""
        return None if self._restart else self.journal.header

    @property
    def is_finished(self) -> bool:
        """Whether the outputs lie there already."""
        files = self.files
        return self.header is not None and self.journal.finished is not None and files.output.exists() and files.errors.exists()

    @property
    def is_complete(self) -> bool:
        """Whether every line has ended."""
        return self.tally.answered + self.tally.errors == len(self.source)

    @property
    def tally(self) -> Tally:
        """What was reached so far."""
        return (self.journal.finished or self.journal.tally) if self.header else Tally()

    def begin(self, topic_prefix: str, partition: int, offset: int, deadline_ms: int) -> None:
        """Fix where answers come to, on disk, before anything is sent."""
        digest = self.source.digest
        self.journal.begin(Header(VERSION, digest, self.settings_text, topic_prefix, partition, offset, deadline_ms))
        self._restart = False

    def partition(self, count: int) -> int:
        """Choose the partition that the answers come to."""
        return int(self._key, 16) % count

    def request_id(self, index: int) -> str:
        """Name the request of a line."""
        return f"{self.id_prefix}{self.source.numbers[index]:06d}"

    def index_of(self, key: bytes | None) -> int | None:
        """Find the line whose request has this id, or None where it is not of this run."""
        if key is None or not key.startswith(self._key_prefix):
            return None
        number = key[len(self._key_prefix) :]
        return index_of(self.source.numbers, int(number)) if number.isdigit() else None

    def awaited(self) -> Iterator[int]:
        """Give the lines that are in the cluster and have no answer."""
        numbers, sent = self.source.numbers, self.journal.sent
        return (i for i in range(len(numbers)) if numbers[i] <= sent and not self.journal.has(i))

    def unsent(self) -> Iterator[int]:
        """Give the lines that remain to be sent, in order; looked up as they are asked for."""
        numbers, sent = self.source.numbers, self.journal.sent
        return (i for i in range(len(numbers)) if numbers[i] > sent and not self.journal.has(i))

    def write_outputs(self) -> None:
        """Write output and error file in the input's order, each put in place as a whole, and finish the run."""
        output, errors = _fresh(self.files.output), _fresh(self.files.errors)
        with output.open("wb") as answered, errors.open("wb") as failed:
            for kind, line in self.journal.read():
                (answered if kind == "O" else failed).write(line)
            for file in (answered, failed):
                _to_disk(file)
        for written, place in ((output, self.files.output), (errors, self.files.errors)):
            if written != place:
                written.replace(place)
        self.journal.finish(_seen_from(self.files.output, self.files.errors))

    def close(self) -> None:
        """Let go of the files."""
        self.journal.close()
        self.source.close()

    def _must_fit(self, header: Header | None) -> None:
        if header is None:
            return
        files = self.files
        reason = None
        if header.version != VERSION:
            reason = f"was begun by another version (format {header.version}, not {VERSION})"
        elif header.digest != self.source.digest:
            reason = f"is of another input: {files.source} has changed since, or is another file"
        elif header.settings != self.settings_text:
            reason = f"was begun with other settings: {header.settings}, now {self.settings_text}"
        if reason:
            message = f"{files.progress}: {reason}; name another output, or give --restart to begin anew"
            raise CannotStart(message)

    def _must_fit_outputs(self, finished: Finished | None) -> None:
        """Refuse a finished run whose output is there and whose error file is not the one that it wrote."""
        output, errors = self.files.output, self.files.errors
        if finished is None or not output.exists():
            return
        if finished.error_file not in {"", _seen_from(output, errors)}:
            wrote = Path(os.path.normpath(output.parent / finished.error_file))
            message = f"{output}: the run is finished, and its error file is {wrote}: name that one with -e"
        elif not errors.exists():
            message = f"{output}: the run is finished, and its error file {errors} is gone"
        else:
            return
        message += "; --restart runs every line again and replaces the output"
        raise CannotStart(message)


def _seen_from(output: Path, errors: Path) -> str:
    """Name the error file so that the two may be moved together."""
    return os.path.relpath(errors, output.parent)


def _checked(files: Files) -> Files:
    found = Files(files.source, files.output.resolve(), files.errors.resolve())
    if not found.source.is_file():
        message = f"{found.source}: " + ("not a regular file" if found.source.exists() else "no such file")
        raise CannotStart(message)
    taken = {found.source.resolve(): found.source, found.progress: found.progress}
    for place in (found.output, found.errors):
        if place in taken:
            message = f"{place}: input, output and error file must be three different files"
            raise CannotStart(message)
        taken[place] = place
        if not place.parent.is_dir():
            message = f"{place}: there is no folder {place.parent}"
            raise CannotStart(message)
    if found.output.exists() and not found.output.is_file():
        message = f"{found.output}: not a regular file"
        raise CannotStart(message)
    if found.errors.is_dir():
        message = f"{found.errors}: a folder, not a file"
        raise CannotStart(message)
    return found


def _fresh(place: Path) -> Path:
    """Where to write what is then put in place; a device is written to as it is."""
    return place if place.exists() and not place.is_file() else place.with_name(place.name + ".new")


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    if os.path.isfile(file.name):  # noqa: PTH113 - a file object names its path as text
        os.fsync(file.fileno())
