"""Numbers on the command line: click takes `nan` and `inf` for numbers, and no time limit is either."""

import math
from typing import Any

import click

NONE = "none"
CONFIGURED = "config"
BOUND_MAX = 1e12
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


class Bound(Finite):
    """A number above zero; `none` for no bound; `config` for what the configuration says.

    Args:
        whole: Whether only whole numbers are taken.
        no_bound: Whether `none` is.
    """

    name = "number"

    def __init__(self, *, whole: bool = False, no_bound: bool = True) -> None:
        super().__init__(0, BOUND_MAX, min_open=True)
        self._whole, self._no_bound = whole, no_bound

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's
        """Read it."""
        if value in {NONE, CONFIGURED}:
            if value == NONE and not self._no_bound:
                self.fail("it cannot be `none`: expected a number or `config`.", param, ctx)
            return value
        number = super().convert(value, param, ctx)
        if self._whole and number != int(number):
            self.fail(f"{value} is not a whole number.", param, ctx)
        return int(number) if self._whole else number
