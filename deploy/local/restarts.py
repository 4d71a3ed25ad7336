"""When a program that ended is started again: at once the first time, later with growing pauses."""

from dataclasses import dataclass

FIRST_S, LAST_S = 0.5, 15.0
STEADY_S = 30.0  # one that ran this long is well: its pauses start over


@dataclass
class Restarts:
    """The history of one program.

    Attributes:
        count: Ends so far.
        in_a_row: Ends without a steady run between them.
    """

    count: int = 0
    in_a_row: int = 0

    def ended(self, ran_s: float) -> float:
        """Note an end after `ran_s` seconds; gives the pause before the next start in seconds."""
        self.count += 1
        self.in_a_row = 1 if ran_s >= STEADY_S else self.in_a_row + 1
        return 0.0 if self.in_a_row == 1 else min(LAST_S, FIRST_S * 2.0 ** min(self.in_a_row - 2, 16))
