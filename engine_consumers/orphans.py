"""Leaves no process of an engine's backend behind, however the worker ends.

vLLM's core outlives a worker that was killed with SIGKILL, and holds the GPU's memory against the next one; so does a Triton
server. A small process waits on a pipe from the worker: when the pipe closes, for whatever reason, it kills every process that
carries the mark which the worker's children inherit in their environment. It works where there is a /proc, and does nothing
elsewhere.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path

log = logging.getLogger("forebay.engine")

MARK = "FOREBAY_ENGINE_OWNER"
RELEASE_S = 5.0

# Stands alone: it is run without our packages, and must start in no time.
_WATCH = """
import os, signal, sys
mark = sys.argv[1].encode()
while sys.stdin.buffer.read(4096):
    pass
for _ in range(3):
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(name), signal.SIGKILL)
        except OSError:
            pass
"""


class OrphanGuard:
    """Marks the children that this process starts from now on, and sees to it that they end with it."""

    def __init__(self) -> None:
        self._watch: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Set the mark and start the watching process."""
        if self._watch is not None or not Path("/proc/self/environ").exists():
            return
        owner = f"{os.getpid()}-{secrets.token_hex(8)}"
        environment = {name: value for name, value in os.environ.items() if name not in {MARK, "LD_PRELOAD"}}
        os.environ[MARK] = owner
        os.environ["SPT_NOENV"] = "1"  # vLLM names its processes, which by default writes over what /proc shows of the mark
        try:
            self._watch = subprocess.Popen(  # noqa: S603 - our own interpreter and text
                [sys.executable, "-I", "-S", "-c", _WATCH, f"{MARK}={owner}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a Ctrl-C is not for it
            )
        except OSError as error:
            log.warning("orphan_guard_absent error=%r", error)

    def release(self) -> None:
        """Kill what is left of the children. Blocks for a moment."""
        if self._watch is None or self._watch.stdin is None:
            return
        self._watch.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._watch.wait(RELEASE_S)
        self._watch = None
        os.environ.pop(MARK, None)
