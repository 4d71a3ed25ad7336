"""Runs every engine once on an NVIDIA GPU: installs it for the GPU, starts it, asks it for a token, prints a table.

Usage: python tests/gpu/run.py [KIND ...]   (or: make gpu). Ends with 3 where there is no GPU, and with 1 where an engine
did not work.
"""

import sys
import time

import pynvml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.engines import RECIPES, Tried, engine_config, install, try_token
from deploy.local.errors import LocalStackError

NO_GPU = 3
USAGE = 2
TRY_S = 900.0  # kernels are compiled at the first start


def gpus() -> list[str]:
    """Names of the GPUs that the driver shows.

    Raises:
        pynvml.NVMLError: There is no driver.
    """
    pynvml.nvmlInit()
    try:
        return [pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(n)) for n in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def tried(kind: str) -> Tried:
    """Install an engine for the GPU and ask it for a token."""
    began = time.monotonic()
    try:
        install(kind, "gpu", lambda step: print(f"{kind}: {step}", file=sys.stderr, flush=True))
        config = engine_config(kind, "gpu")
    except LocalStackError as error:
        return Tried(works=False, told=f"cannot be installed: {error}", seconds=round(time.monotonic() - began, 1))
    assert config is not None, "an engine that was just installed"
    return try_token(config, TRY_S)


def main(kinds: list[str]) -> int:
    if unknown := [kind for kind in kinds if kind not in RECIPES]:
        print(f"no engine called {unknown[0]!r}: expected {', '.join(RECIPES)}", file=sys.stderr)
        return USAGE
    try:
        found = gpus()
    except pynvml.NVMLError as error:
        found, why = [], str(error)
    else:
        why = "the driver shows none"
    if not found:
        print(f"no NVIDIA GPU here ({why}): run this on a machine that has one", file=sys.stderr)
        return NO_GPU
    table = Table("engine", "model", "weights", "works", "told", "seconds", box=None, title=found[0], title_justify="left")
    worked = []
    for kind in kinds or list(RECIPES):
        result = tried(kind)
        worked.append(result.works)
        model = RECIPES[kind].models[0]
        table.add_row(kind, model.name, model.label, str(result.works), Text(repr(result.told)), f"{result.seconds:.0f}")
    Console(width=200).print(table)
    return 0 if all(worked) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
