"""Whether an engine that is installed really runs: it is started in its environment and asked for one token."""

import sys
import time

import msgspec
from msgspec import Struct

from deploy.engines.environments import worker_environment
from deploy.engines.first_token import MARK
from deploy.engines.packages import packages_folder
from deploy.local.command import ended
from deploy.local.errors import LocalStackError
from schemas.config import EngineConfig

TRY_S = 300.0  # vLLM takes a minute and a half to come up on a small machine


class Tried(Struct, frozen=True):
    """What came of it.

    Attributes:
        works: Whether a token came.
        told: The token's text, or why there is none.
        seconds: From the start of the process to its end.
    """

    works: bool
    told: str
    seconds: float


class _Told(Struct):
    text: str = ""
    error: str | None = None


def try_token(config: EngineConfig, limit_s: float = TRY_S) -> Tried:
    """Start an engine in its own environment, give one token, and stop it.

    Args:
        config: Of the engine.
        limit_s: After so long it is given up.
    """
    began = time.monotonic()
    argv = [config.python or sys.executable, "-P", "-m", "deploy.engines.first_token", msgspec.json.encode(config).decode()]
    try:
        ours = {"PYTHONPATH": str(packages_folder()), **worker_environment(config.python)}
        done = ended(argv, limit_s, {**ours, **config.env})
    except LocalStackError as error:
        return Tried(works=False, told=str(error), seconds=round(time.monotonic() - began, 1))
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if lines:
        told = msgspec.json.decode(lines[-1], type=_Told)
    else:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        told = _Told(error=f"its process ended with {done.returncode}: {said[-1]}")
    return Tried(works=told.error is None, told=told.error or told.text, seconds=round(time.monotonic() - began, 1))
