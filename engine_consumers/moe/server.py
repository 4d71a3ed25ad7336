"""A Triton server as the worker's child: started on a free port, watched, and ended with the worker."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque

from schemas.errors import ConfigError

log = logging.getLogger("forebay.engine")

STOP_S = 10.0
TAIL_LINES = 20


class Server:
    """One process, and those that it starts.

    Args:
        argv: Its command; `--grpc-port N` is appended.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start it; gives the address that it will answer at.

        Raises:
            ConfigError: The command cannot be run.
        """
        port = _free_port()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._argv,
                "--grpc-port",
                str(port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the worker, which drains
            )
        except OSError as error:
            message = f"`options.server`: {self._argv[0]} cannot be started: {error.strerror or error}"
            raise ConfigError(message) from None
        self._reader = asyncio.create_task(self._pass_on(self.process))
        return f"127.0.0.1:{port}"

    async def ended(self) -> str:
        """Wait for its end, and give the reason."""
        process = self.process
        if process is None:
            return "it was not started"
        code = await process.wait()
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=1.0)  # its own children may hold the pipe
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        last = next((line for line in reversed(self._tail) if "error" in line.lower()), self._tail[-1] if self._tail else "")
        return f"the Triton server {how}{': ' + last[:300] if last else ''}"

    async def stop(self) -> None:
        """End it, gently at first."""
        process = self.process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
                    break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and did not end
        if self._reader is not None:
            self._reader.cancel()

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Put what it says into our own log's stream, and remember the last of it."""
        assert process.stdout is not None  # noqa: S101 - it was asked for
        while line := await _line(process.stdout):
            self._tail.append(line.decode("utf-8", "replace").strip())
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed or 1)


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port
