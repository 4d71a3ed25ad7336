"""Where tables go: a terminal has its width, and a file or pipe as much as they need."""

import os
import sys

from rich.console import Console

WIDE = 240  # columns


def standard_output() -> Console:
    """A console on standard output; `COLUMNS` says how wide, where somebody wants to."""
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_bounded else WIDE)
