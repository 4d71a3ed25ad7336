"""The clock by which processes of different hosts tell each other the time."""

import time


def now_ms() -> int:
    """Unix time, in milliseconds."""
    return time.time_ns() // 1_000_000
