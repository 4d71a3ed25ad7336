"""What our model tells of its experts, as it goes into the status and into results."""

from typing import Any

import msgspec
from msgspec import structs

from schemas.messages import ExpertFigures

COUNTERS = ("hits", "misses", "stall_ms", "prefetched", "prefetch_used", "evicted")


def read_experts(statistics: dict[str, Any]) -> ExpertFigures | None:
    """Give the experts' part of a model's statistics; None where it has none, or tells something else."""
    try:
        return msgspec.convert(statistics.get("experts"), ExpertFigures | None)
    except msgspec.ValidationError:
        return None


def during(before: ExpertFigures | None, after: ExpertFigures | None) -> ExpertFigures | None:
    """Give what has been counted from one moment to another; None where one of them is not known."""
    if before is None or after is None:
        return None
    counted = {name: round(getattr(after, name) - getattr(before, name), 3) for name in COUNTERS}
    if min(counted.values()) < 0:
        return None  # the server was started anew in between
    return structs.replace(after, **counted, hottest=[])
