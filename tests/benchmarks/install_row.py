"""Row 17: what a core install costs, and how long the client takes to import."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


def install() -> tuple[float, float, bool]:
    """Install the core from this checkout into an empty environment: seconds, MB, and whether torch came along."""
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "venv" / "bin" / "python"
        _run([find_uv_bin(), "venv", "--quiet", "--python", sys.executable, str(python.parents[1])])
        began = time.perf_counter()
        _run([find_uv_bin(), "pip", "install", "--quiet", "--python", str(python), str(ROOT)])
        seconds = time.perf_counter() - began
        size = sum(f.stat().st_size for f in python.parents[1].rglob("*") if f.is_file() and not f.is_symlink()) / 1e6
        torch = subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=LIMIT_S, check=False).returncode == 0
        return seconds, size, torch


def import_seconds(code: str) -> float:
    """Time a fresh interpreter that runs `code`."""
    began = time.perf_counter()
    _run([sys.executable, "-c", code])
    return time.perf_counter() - began


def _run(argv: list[str]) -> None:
    subprocess.run(argv, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, cwd=tempfile.gettempdir())
