"""Row 18: what turns at a shared device cost, and whether they share it as they should: small SSM engines on the CPU."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, get_args

from sharing import Moment, Sharing, over_time, sharing

from schemas.config import Share, TimeSlicesConfig

Line = Callable[..., dict[str, Any]]
Spread = Callable[..., dict[str, float]]
WINDOW_S = 4.0
TOKENS_WINDOW_S = 15.0  # many requests: the tokens of their prompts are shared out, too, and not counted here
WEIGHTS = {"heavy": 2.0, "light": 1.0}
NS_PER_S = 1e9
ALONE, TWO, SHARE = 1.05, 1.15, 0.05  # goals


def turns(line: Line, spread: Spread, rounds: int) -> list[dict[str, Any]]:
    """One engine with and without turns, and two that share time or tokens; all are idle but those that are measured."""
    alone, two, device, tokens = [], [], [], []
    with tempfile.TemporaryDirectory() as home, _engines(Path(home)) as (plain, taking, by_time, by_tokens):
        for _ in range(rounds):
            without, with_turns = _measured([plain]), _measured([taking])
            both = _measured(by_time)
            speed = _speed(*without)
            alone.append(speed / _speed(*with_turns))
            two.append(max(one.at_ns for one in both) / NS_PER_S / sum(one.tokens / speed for one in both))
            device.append(both[0].used_ns / both[1].used_ns)
            heavy, light = _measured(by_tokens, TOKENS_WINDOW_S)
            tokens.append(heavy.tokens / light.tokens)
    share = f"2 within {SHARE:.0%}"
    rows = (
        ("one engine's time with turns over that without", alone, f"<= {ALONE}x", median(alone) <= ALONE),
        ("two engines' time with turns over the sum of their times alone", two, f"<= {TWO}x", median(two) <= TWO),
        ("device time of weight 2 over weight 1, where time is shared out", device, share, abs(median(device) / 2 - 1) <= SHARE),
        ("tokens of weight 2 over weight 1, where tokens are shared out", tokens, share, abs(median(tokens) / 2 - 1) <= SHARE),
    )
    return [
        line(18, metric, spread(values, 3), None, "1" if "time with" in metric else "2", round(median(values), 3), goal, is_met)
        for metric, values, goal, is_met in rows
    ]


@contextlib.contextmanager
def _engines(home: Path) -> Iterator[tuple[Sharing, Sharing, list[Sharing], list[Sharing]]]:
    with contextlib.ExitStack() as stack:
        found = []
        for name, slices in (("plain", None), ("taking", TimeSlicesConfig("own", folder=str(home / "own")))):
            one = Sharing("ssm", home, name, slices)
            stack.callback(one.close)
            one.up()
            one.pause()
            found.append(one)
        pairs = []
        for share_of in get_args(Share):
            files = home / share_of
            files.mkdir()
            pair = stack.enter_context(sharing(dict.fromkeys(WEIGHTS, "ssm"), files, WEIGHTS, share_of=share_of))
            for one in pair:
                one.pause()
            pairs.append(pair)
        yield found[0], found[1], pairs[0], pairs[1]


def _measured(engines: list[Sharing], window_s: float = WINDOW_S) -> list[Moment]:
    for one in engines:
        one.go()
    found = over_time(engines, window_s)
    for one in engines:
        one.pause()
    return found


def _speed(moment: Moment) -> float:
    """Tokens per second."""
    return moment.tokens / (moment.at_ns / NS_PER_S)
