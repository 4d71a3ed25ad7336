"""Turns at a device that engines of several processes on this host share; who is next is decided in `core/slices.py`.

For each device there is a folder: a table of all that take part, which is read and written under a lock for some
microseconds, and a named pipe for each of them. A byte in its pipe wakes one that waits. A pipe that nobody has open for
reading belongs to a dead process, however it ended: so a turn cannot be lost with its holder.

A turn is a courtesy, never a reason to stand still: one that shows no sign of life for `patience_ms` (stopped, or in a step
that takes as long) loses its turn, and where the lock itself is held for so long, steps are made without a turn until it is
free again. A turn ends only between two steps: a step that takes longer than a slice is not cut.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import select
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from engine_consumers.core.slices import Table
from schemas.config import EngineConfig, TimeSlicesConfig
from schemas.errors import ConfigError

log = logging.getLogger("forebay.engine")

LOOK_MS = 20  # one that waits looks so often whether the holder lives; it is woken when its turn comes
LOCK_POLL_S = 0.0001
NS_PER_MS = 1_000_000
PIPE = ".pipe"


class _LockStuck(Exception):
    """Another process holds the lock and does not let go of it."""


_decode = msgspec.json.Decoder(Table).decode
_encode = msgspec.json.Encoder().encode


class Turn(Protocol):
    """Permission to use the device for a step; all calls are made from one thread."""

    def __enter__(self) -> object:
        """Wait for it, unless it is held from the last step."""

    def computed(self, tokens: int) -> None:
        """The step computed so many tokens, those of prompts too; told before it is over."""

    def __exit__(self, *raised: object) -> None:
        """The step is over: hand it on, where another is due."""

    def rest(self) -> None:
        """There is nothing to do now: hand it on in any case."""

    def close(self) -> None:
        """Take part no more."""


class Unshared:
    """A device that is used by one engine alone."""

    def __enter__(self) -> None:
        """Go on."""

    def computed(self, tokens: int) -> None:
        """Nobody counts them."""

    def __exit__(self, *raised: object) -> None:
        """Go on."""

    def rest(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nobody waits."""


def turn_of(config: EngineConfig) -> Turn:
    """Give an engine's turns: at a device that it shares, or at one of its own.

    Raises:
        ConfigError: The folder cannot be used.
    """
    return Unshared() if config.time_slices is None else SharedTurn(config.time_slices)


class SharedTurn:
    """Takes turns with whoever names the same device in the same folder.

    Args:
        config: What is shared, and the weight in it.

    Raises:
        ConfigError: The folder cannot be used, or the others share something else out.
    """

    def __init__(self, config: TimeSlicesConfig) -> None:
        self._config = config
        self._slice_ns, self._patience_ns = int(config.slice_ms * NS_PER_MS), config.patience_ms * NS_PER_MS
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._holds = False
        self._asked = False  # in the table it holds the device, or waits for it
        self._since_ns = 0
        self._tokens = 0  # computed since it was last booked
        self._is_lock_stuck = False
        self._pipes: dict[str, int] = {}  # of others, for writing
        try:
            self._folder = _folder(config)
            self._file = os.open(self._folder / "table.json", os.O_RDWR | os.O_CREAT, 0o666)
            with self._table() as table:
                self._sweep(table)
                if table.seats and table.share_of != config.share_of:
                    message = f"`time_slices.share_of`: others at {config.device!r} share out its {table.share_of}: give the same"
                    raise ConfigError(message)
                table.join(self._name, config.weight, config.share_of)
                os.mkfifo(self._path(self._name))
                self._pipe = os.open(self._path(self._name), os.O_RDWR | os.O_NONBLOCK)  # for writing, too: else it would end
            self._news = select.poll()
            self._news.register(self._pipe, select.POLLIN)
        except (OSError, _LockStuck) as error:
            message = f"`time_slices`: the folder for turns at {config.device!r} cannot be used: {error}"
            raise ConfigError(message) from error

    def __enter__(self) -> None:
        """Wait for the turn; see `Turn`."""
        if self._holds:
            return
        with contextlib.suppress(_LockStuck):
            self._seize()
            while not self._holds:
                if self._news.poll(LOOK_MS):
                    os.read(self._pipe, select.PIPE_BUF)
                self._seize()

    def computed(self, tokens: int) -> None:
        """Count a step's tokens; see `Turn`."""
        self._tokens += tokens

    def __exit__(self, *raised: object) -> None:
        """End a step; see `Turn`."""
        if self._holds and time.monotonic_ns() - self._since_ns >= self._slice_ns:
            self._change(Table.boundary)

    def rest(self) -> None:
        """Hand it on; see `Turn`."""
        if self._asked:
            self._asked = not self._change(Table.rest)
            self._holds = False

    def close(self) -> None:
        """Take part no more; see `Turn`."""
        if self._pipe < 0:
            return
        self._change(Table.leave)
        self._path(self._name).unlink(missing_ok=True)
        for file in (self._file, self._pipe, *self._pipes.values()):
            os.close(file)
        self._pipes.clear()
        self._pipe = self._file = -1

    def _seize(self) -> None:
        """Take the device where it is free, or its holder dead or stuck; else wait in line."""
        with self._table() as table:
            now_ns = time.monotonic_ns()
            table.join(self._name, self._config.weight, self._config.share_of)  # where it was begun anew
            if not table.ask(self._name, now_ns):
                holder = str(table.holder)
                if not self._is_alive(holder):
                    log.warning("turn_freed device=%s reason=dead holder=%s", self._folder.name, holder)
                    table.leave(holder, now_ns)
                elif now_ns - table.since_ns > self._patience_ns:
                    log.warning("turn_freed device=%s reason=stuck holder=%s", self._folder.name, holder)
                    table.rest(holder, now_ns)
        self._holds, self._since_ns, self._asked = table.holder == self._name, now_ns, True

    def _change(self, change: Callable[[Table, str, int, int], None]) -> bool:
        """Change the table; False where its lock is stuck."""
        with contextlib.suppress(_LockStuck):
            with self._table() as table:
                now_ns, tokens = time.monotonic_ns(), 0
                if table.holder == self._name:
                    tokens, self._tokens = self._tokens, 0
                change(table, self._name, now_ns, tokens)
            self._holds, self._since_ns = table.holder == self._name, now_ns
            return True
        return False

    @contextlib.contextmanager
    def _table(self) -> Iterator[Table]:
        """Read the table and write what became of it, under its lock; then wake the one whose turn has come by that."""
        self._lock()
        try:
            raw = os.pread(self._file, os.fstat(self._file).st_size, 0)
            table = _read(raw)
            before = table.holder
            for name in self._pipes.keys() - table.seats.keys():
                os.close(self._pipes.pop(name))
            yield table
            if table.holder != before:
                table.pass_over_dead(self._is_alive, time.monotonic_ns())
            os.pwrite(self._file, _encode(table).ljust(len(raw)), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        if table.holder not in (None, before, self._name):
            self._wake(str(table.holder))

    def _lock(self) -> None:
        began_ns = time.monotonic_ns()
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self._is_lock_stuck and time.monotonic_ns() - began_ns < self._patience_ns:
                    time.sleep(LOCK_POLL_S)
                    continue
                if not self._is_lock_stuck:
                    log.warning("turns_suspended device=%s reason=lock_stuck", self._folder.name)
                self._is_lock_stuck = True
                raise _LockStuck from None
            self._is_lock_stuck = False
            return

    def _sweep(self, table: Table) -> None:
        """Remove what the dead left behind."""
        now_ns = time.monotonic_ns()
        for name in {*table.seats, *(path.name.removesuffix(PIPE) for path in self._folder.glob(f"*{PIPE}"))}:
            if not self._is_alive(name):
                table.leave(name, now_ns)
                self._path(name).unlink(missing_ok=True)

    def _is_alive(self, name: str) -> bool:
        """Whether anybody has a pipe open for reading."""
        if name == self._name:
            return True
        pipe = self._pipe_of(name)
        if pipe is None:
            return False
        asked = select.poll()
        asked.register(pipe, 0)  # of a pipe without readers it tells in any case
        if not asked.poll(0):
            return True
        os.close(self._pipes.pop(name))
        return False

    def _wake(self, name: str) -> None:
        pipe = self._pipe_of(name)
        if pipe is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it is full of bytes that wake it, or nobody's
                os.write(pipe, b"!")

    def _pipe_of(self, name: str) -> int | None:
        if name not in self._pipes:
            try:
                self._pipes[name] = os.open(self._path(name), os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno in (errno.ENXIO, errno.ENOENT):
                    return None
                raise
        return self._pipes[name]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{PIPE}"


def _read(raw: bytes) -> Table:
    try:
        return _decode(raw) if raw.strip() else Table()
    except msgspec.DecodeError:
        return Table()  # whoever wrote it was of another version: all ask anew


def _folder(config: TimeSlicesConfig) -> Path:
    """Give the folder of a device; by default below one that belongs to this user alone.

    Raises:
        OSError: It cannot be made, or belongs to somebody else.
    """
    if config.folder is not None:
        home = Path(config.folder).expanduser()
    else:
        home = Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}"
        home.mkdir(mode=0o700, exist_ok=True)
        if home.lstat().st_uid != os.getuid():
            message = f"{home} belongs to another user: give `time_slices.folder`"
            raise PermissionError(message)
        home /= "devices"
    folder = home / config.device
    folder.mkdir(parents=True, exist_ok=True)
    return folder
