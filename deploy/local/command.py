"""Programs that are run to their end: bounded in time, with an environment of their own, failing in one line."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from deploy.local.errors import NotAvailable

_NOT_HANDED_ON = frozenset({"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME"})


def uv() -> str:
    """Give uv's program, which comes with us."""
    from uv import find_uv_bin  # noqa: PLC0415 - only where something is installed

    return find_uv_bin()


def ended(
    argv: list[str], limit_s: float, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is.

    Args:
        argv: The program and its arguments.
        limit_s: How long it may take.
        environment: Set on top of ours, of which nothing that names a Python environment is handed on.
        cwd: Where it runs; here by default.

    Raises:
        NotAvailable: It cannot be run, or took too long.
    """
    env = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON} | dict(environment or {})
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
            env=env,
            cwd=cwd,
        )
    except subprocess.TimeoutExpired:
        message = f"{_told(argv)}: not done within {limit_s:g} s"
        raise NotAvailable(message) from None
    except OSError as error:
        message = f"cannot run {argv[0]}: {error.strerror}"
        raise NotAvailable(message) from None


def output(argv: list[str], limit_s: float, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a program, which has to succeed, and give what it wrote to its standard output; arguments as for `ended`.

    Raises:
        NotAvailable: It failed, with the first and the last line of what it said, or as for `ended`.
    """
    done = ended(argv, limit_s, environment, cwd)
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["it said nothing"]
        text = said[0] if len(said) == 1 else f"{said[0]} ... {said[-1]}"
        message = f"{_told(argv)} failed: {text}"
        raise NotAvailable(message)
    return done.stdout


def _told(argv: list[str]) -> str:
    return " ".join([Path(argv[0]).name, *argv[1:2]])
