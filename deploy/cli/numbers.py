"""Numbers on the command line: click takes `nan` and `inf` for numbers, and no time limit is either."""

import math
from typing import Any

import click

SECONDS_MAX = 31_536_000.0  # a year: beyond it lie mistakes, and what clocks cannot count


class Finite(click.FloatRange):
    """A finite number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401 - click's
        """Read it; anything that is not finite is wrong usage."""
        number = float(click.FLOAT.convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return float(super().convert(number, param, ctx))


def seconds(least: float) -> Finite:
    """Make the type of an option in seconds, from `least` to a year."""
    return Finite(least, SECONDS_MAX)
