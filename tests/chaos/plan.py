"""Which fault comes when: drawn from the seed, so that a run can be asked for again."""

import random
from typing import NamedTuple

DISPATCHERS, WORKERS = 2, 3

# (part, kind, how often in a deck): kill = SIGKILL, stop = SIGSTOP and later SIGCONT, restart = SIGTERM and a new start.
DECK = (
    ("dispatcher", "kill", 4),
    ("dispatcher", "stop", 4),
    ("dispatcher", "restart", 2),
    ("worker", "kill", 5),
    ("worker", "stop", 5),
    ("worker", "restart", 2),
    ("broker", "kill", 3),
    ("broker", "restart", 1),
    ("redis", "kill", 3),
    ("redis", "flush", 1),
)
COUNT = {"dispatcher": DISPATCHERS, "worker": WORKERS, "broker": 1, "redis": 1}
PAUSE_S = (1.0, 15.0)  # how long a process stands still, and how long Redis is away
BROKER_AWAY_S = (0.0, 5.0)


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at_s: When, counted from the first request.
        number: Which of the processes of its part.
        pause_s: How long the part stays stopped or away.
    """

    at_s: float
    part: str
    kind: str
    number: int
    pause_s: float

    @property
    def name(self) -> str:
        """The process it is meant for."""
        return f"{self.part}-{self.number}"

    @property
    def is_kill(self) -> bool:
        """Whether a SIGKILL is sent."""
        return self.kind == "kill"


def plan(seed: int, faults: int, span_s: float) -> list[Fault]:
    """Draw the faults of a run, in order of time.

    Args:
        seed: The same seed gives the same plan.
        faults: How many; each whole deck of 30 holds every kind as often as `DECK` says.
        span_s: They are spread over this time, each somewhere in a slice of its own.
    """
    dice = random.Random(seed)
    cards: list[tuple[str, str]] = []
    while len(cards) < faults:
        deck = [(part, kind) for part, kind, often in DECK for _ in range(often)]
        dice.shuffle(deck)
        cards += deck
    found = []
    for n, (part, kind) in enumerate(cards[:faults]):
        at_s = (n + dice.random()) / faults * span_s
        least, most = BROKER_AWAY_S if part == "broker" else PAUSE_S
        is_away = kind == "stop" or (kind == "kill" and part in {"broker", "redis"})  # others are started again at once
        pause_s = dice.uniform(least, most) if is_away else 0.0
        found.append(Fault(round(at_s, 2), part, kind, dice.randrange(COUNT[part]), round(pause_s, 2)))
    return found
