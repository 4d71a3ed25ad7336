"""A program to run and the handle on one that runs, each behind its guard."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from msgspec import Struct, field

from deploy.local import guard
from deploy.local.errors import NotReady

LOG_BYTES_MAX = 16 * 2**20
START_S = 20.0  # for a guard to say the program's pid, on a machine that is busy
KILL_S = 5.0


class Program(Struct, frozen=True):
    """What to run.

    Attributes:
        name: Unique in a stack; also the log's name.
        argv: The program and its arguments.
        log: File that takes its output.
        grace_s: Time between SIGTERM and SIGKILL.
        env: Set on top of the environment.
        unset: Taken out of the environment.
        cwd: Where it runs; nothing is read from there.
        hold: File that its guard keeps locked, shared, while it lives.
    """

    name: str
    argv: list[str]
    log: str
    grace_s: float = 10.0
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    cwd: str = "/"
    hold: str | None = None


class Running:
    """One started program.

    Raises:
        NotReady: It could not be started.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._is_asked = False
        log = Path(program.log)
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name not in program.unset} | program.env
        limits = ["--log", program.log, "--log-bytes", str(LOG_BYTES_MAX), "--grace", str(program.grace_s)]
        if program.hold is not None:
            limits += ["--hold", program.hold]
        argv = [sys.executable, "-I", "-S", guard.__file__, *limits, "--", *program.argv]
        with log.open("ab") as errors:
            self._guard = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=env,
                cwd=program.cwd,
                start_new_session=True,  # a Ctrl-C on the terminal is not for it
            )
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        assert self._guard.stdout is not None  # noqa: S101 - asked for above
        with self._guard.stdout as out, selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            line = out.readline() if selector.select(START_S) else b""
        if not line.strip().isdigit():
            self.kill()
            message = f"cannot start {self.program.name}: see {self.program.log}"
            raise NotReady(message)
        return int(line)

    @property
    def guard_pid(self) -> int:
        """The guard's pid."""
        return self._guard.pid

    @property
    def exit_code(self) -> int | None:
        """What the program ended with (128 plus the signal that killed it), or None while it runs."""
        code = self._guard.poll()
        if code is None:
            return None
        self._close_pipe()
        if code < 0:  # the guard itself was killed: its program dies with it, what came from that may not
            self._sweep()
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Ask it to stop, once (to many a second signal means: at once), and do not wait."""
        if not self._is_asked and self._guard.poll() is None:
            self._is_asked = True
            self._guard.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop it: SIGTERM, its grace, SIGKILL; returns when everything that came from it is gone."""
        self.end()
        try:
            self._guard.wait(self.program.grace_s + guard.SWEEP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_pipe()

    def kill(self) -> None:
        """Kill the program (SIGKILL), and wait for its guard to clear away what came from it."""
        if self._guard.poll() is None:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(self.pid, signal.SIGKILL)
            try:
                self._guard.wait(guard.SWEEP_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait(KILL_S)
                self._sweep()
        self._close_pipe()

    def wait(self, limit_s: float) -> int | None:
        """Wait for its end, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while self.exit_code is None and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(min(0.1, limit_s))
        return self.exit_code

    def _sweep(self) -> None:
        """Kill what is left in the program's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.pid, signal.SIGKILL)

    def _close_pipe(self) -> None:
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
