"""One stack's folder: its configuration, data, logs, and what its supervisor says of itself."""

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Literal

import msgspec
from msgspec import Struct, field

from deploy.local.errors import BrokenState, LocalStackError
from schemas.config import Delivery

Phase = Literal["starting", "running", "stopping", "stopped", "failed"]
BrokerKind = Literal["kafka", "tansu", "given"]


class ProgramState(Struct, frozen=True):
    """One program as its supervisor sees it; `pid` is None while it is down."""

    name: str
    log: str
    pid: int | None = None
    guard_pid: int | None = None
    restarts: int = 0
    last_exit: int | None = None


class State(Struct, frozen=True):
    """What the supervisor says of itself.

    Attributes:
        waits_for: What the start is waiting for.
        engines: Engine -> names of its workers' programs.
        ports: Ports of the own services, asked for again at the next start.
        error: Why the start failed.
    """

    home: str
    pid: int
    phase: Phase
    broker: BrokerKind
    kafka: str
    redis: str
    delivery: Delivery
    engines: dict[str, list[str]]
    ports: list[int] = field(default_factory=list)
    programs: list[ProgramState] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    waits_for: str = ""
    error: str | None = None


class Home:
    """The places in a stack's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "forebay.toml"
        self.state = root / "state.json"
        self.logs = root / "logs"
        self.kafka = root / "kafka"
        self.valkey = root / "valkey"
        self.lock = root / "locks" / "supervisor.lock"
        self.up_lock = root / "locks" / "up.lock"
        self.guards_lock = root / "locks" / "guards.lock"

    def make(self) -> None:
        """Make the folders.

        Raises:
            LocalStackError: They cannot be made.
        """
        try:
            for folder in (self.root, self.logs, self.lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"cannot make the home folder {self.root} ({error.strerror}): give another with --home or FOREBAY_HOME"
            raise LocalStackError(message) from None

    def read_state(self) -> State | None:
        """What the last supervisor said, or None where there was none.

        Raises:
            BrokenState: The file is there and cannot be read; the supervisor replaces it in one step, so that waiting
                does not help.
        """
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=State)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else error
            message = f"{self.state} is broken ({told}): `forebay local down` and `forebay local up` write it anew"
            raise BrokenState(message) from None

    def write_state(self, state: State) -> None:
        """Replace the state in one step."""
        part = self.state.with_name(f".{self.state.name}.{os.getpid()}")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        part.replace(self.state)

    def is_supervised(self) -> bool:
        """Whether a supervisor lives: it holds its lock as long as it does."""
        try:
            with self.lock.open("a") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def supervisor_pid(self) -> int | None:
        """The pid that the living supervisor left in its lock, or None where it left none."""
        try:
            text = self.lock.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return int(text) if text.isascii() and text.isdigit() else None

    def take_lock(self) -> IO[str]:
        """Become the supervisor; the lock is held until the file is closed or the process ends.

        Raises:
            LocalStackError: Another one lives.
        """
        file = self.lock.open("a")
        for _ in range(20):  # whoever asks whether a supervisor lives holds it for an instant
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            else:
                file.truncate(0)  # the pid in it is that of an earlier supervisor
                return file
        file.close()
        message = f"a stack runs in {self.root} already"
        raise LocalStackError(message)


def home_path(given: Path | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """Give the stack's folder: the given one, else FOREBAY_HOME, else `forebay` in XDG_DATA_HOME or `~/.local/share`."""
    env = os.environ if environ is None else environ
    if given is None and env.get("FOREBAY_HOME"):
        given = Path(env["FOREBAY_HOME"])
    if given is not None:
        return given.expanduser().absolute()
    shared = env.get("XDG_DATA_HOME")
    return (Path(shared) if shared else Path.home() / ".local" / "share").absolute() / "forebay"
