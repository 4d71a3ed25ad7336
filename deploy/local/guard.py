"""Stands between the supervisor and one program, and leaves nothing behind whoever is killed.

    guard.py --log FILE --log-bytes N --grace S [--hold FILE] -- PROGRAM ARGUMENTS...

The supervisor holds the other end of standard input. When it closes (the supervisor is gone) or on SIGTERM the program
gets SIGTERM, and after the grace everything that came from it gets SIGKILL. The same when the program ends or is
killed: its own children never outlive it. On Linux the guard adopts orphans, so even those that went into a session of
their own are found, and the program dies with its guard. The first line on standard output is the program's pid; its
output goes to the log, which is turned over at its bound. A shared lock on the file to hold tells the next start
whether anything of an earlier one still lives. This file needs the standard library only.
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SWEEP_S = 10.0
ORPHANED_GRACE_S = 3.0  # when the supervisor is gone nobody waits for a long farewell
_LINUX = sys.platform == "linux"


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies (Linux)."""
    if _LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """Find all living descendants of a process by /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found: set[int] = set()
    ahead = [root]
    while ahead:
        for pid in children.get(ahead.pop(), ()):
            if pid not in found:
                found.add(pid)
                ahead.append(pid)
    return found


def reap_adopted(kept: Collection[int]) -> None:
    """Take leave of adopted children that have ended, else they stay as zombies as long as this process lives (Linux).

    Args:
        kept: Children of our own, whose end somebody here waits for. One of them that has ended and was not waited for
            yet may stand before others: those are found the next time.
    """
    while _LINUX:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in kept:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, 0)


def kill_tree(root: int, group: int | None, limit_s: float = SWEEP_S) -> bool:
    """Kill every descendant of `root`, and a process group, until none is left.

    Returns:
        Whether all are gone.
    """
    deadline = time.monotonic() + limit_s
    while True:
        if group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        left = descendants(root)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)


class Log:
    """A file that is turned over at its bound: at most twice `bytes_max` remain."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        self._path, self._bytes_max = path, bytes_max
        self._open()

    def _open(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._bytes = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append; a full disk loses lines, never the program."""
        if self._bytes and self._bytes + len(data) > self._bytes_max:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
        with contextlib.suppress(OSError):
            self._file.write(data)
            self._bytes += len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Guard:
    """Runs one program to its end."""

    def __init__(self, argv: list[str], log: Log, grace_s: float) -> None:
        self._log, self._grace_s = log, grace_s
        self._deadline: float | None = None
        self._wake, wake = socket.socketpair()
        wake.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._wake_writer = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        adopt_orphans()
        guard = os.getpid()
        self._program = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=lambda: die_with(guard),  # noqa: PLW1509 - this process has one thread
        )

    @property
    def pid(self) -> int:
        """The program's."""
        return self._program.pid

    def run(self) -> int:
        """Wait until the program is gone, and everything that came from it.

        Returns:
            Its exit status, or 128 plus the signal that ended it.
        """
        assert self._program.stdout is not None  # noqa: S101 - asked for above
        output = self._program.stdout.fileno()
        os.set_blocking(output, False)
        with selectors.DefaultSelector() as selector:
            for fd in (0, output, self._wake.fileno()):
                selector.register(fd, selectors.EVENT_READ)
            while self._program.poll() is None:
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    break
                wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for key, _ in selector.select(wait_s):
                    self._take(key.fd, output, selector)
                reap_adopted({self.pid})
        kill_tree(os.getpid(), self.pid)
        code = self._program.wait(SWEEP_S) if self._program.returncode is None else self._program.returncode
        self._copy(output)
        return code if code >= 0 else 128 - code

    def _take(self, fd: int, output: int, selector: selectors.BaseSelector) -> None:
        if fd == output:
            if not self._copy(output):
                selector.unregister(output)
        elif fd == 0:
            if not os.read(0, 4096):
                selector.unregister(0)
                self._end(min(self._grace_s, ORPHANED_GRACE_S))
        else:
            signals = self._wake.recv(4096)
            if any(number in signals for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
                self._end(self._grace_s)

    def _copy(self, output: int) -> bool:
        """Move what the program said into its log; False at its end."""
        for _ in range(64):
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.write(data)
        return True

    def _end(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        if self._deadline is not None:  # asked already: a second signal would mean something else to the program
            self._deadline = min(deadline, self._deadline)
            return
        self._deadline = deadline
        with contextlib.suppress(ProcessLookupError):
            self._program.send_signal(signal.SIGTERM)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies (Linux)."""
    if _LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(137)


def main() -> int:
    """Read the arguments and guard the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--log-bytes", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("program", nargs="+")
    given = parser.parse_args()
    if given.hold is not None:
        held = given.hold.open("a")  # let go when this process ends
        fcntl.flock(held, fcntl.LOCK_SH)
    log = Log(given.log, given.log_bytes)
    try:
        guard = Guard(given.program, log, given.grace)
    except OSError as error:
        log.write(f"cannot start {given.program[0]}: {error}\n".encode())
        return 127
    sys.stdout.write(f"{guard.pid}\n")
    sys.stdout.flush()
    return guard.run()


if __name__ == "__main__":
    sys.exit(main())
