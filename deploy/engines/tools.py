"""Running the programs that make an environment."""

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


def run(argv: list[str], limit_s: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and give what it wrote to its standard output.

    Args:
        argv: The program and its arguments.
        limit_s: How long it may take.
        environment: Set on top of ours, of which nothing that names an environment is handed on.

    Raises:
        NotAvailable: It failed, with its first and last line, or it took too long.
    """
    env = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON} | dict(environment or {})
    told = f"{Path(argv[0]).name} {argv[1]}"
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired:
        message = f"{told}: not done within {limit_s:.0f} s; start it again: what was fetched is kept"
        raise NotAvailable(message) from None
    except OSError as error:
        message = f"cannot run {argv[0]}: {error.strerror}"
        raise NotAvailable(message) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        text = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        message = f"{told} failed: {text}"
        raise NotAvailable(message)
    return done.stdout
