"""How a batch run shows where it stands: a bar on a terminal, plain lines elsewhere. Both write to stderr."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from broker.batch import Progress, Tally

LINE_EVERY_S = 10.0


def is_terminal() -> bool:
    """Whether somebody looks on."""
    return sys.stderr.isatty()


class Outage:
    """Says in one line that the cluster is away, and in another that it is back.

    Args:
        kafka: Its address.
        limit_s: How long it is waited for.
    """

    def __init__(self, kafka: str, limit_s: float) -> None:
        self._kafka, self._limit_s = kafka, limit_s
        self._longest_s = 0.0

    def news(self, away_s: float) -> str | None:
        """Give the line to print, if there is one.

        Args:
            away_s: For how long it has been away; 0 where it is well.
        """
        before_s, self._longest_s = self._longest_s, away_s
        if away_s and not before_s:
            return (
                f"forebay: cannot reach Kafka at {self._kafka} for {away_s:.0f} s: waiting for it up to {self._limit_s:g} s "
                "(--absence), then stopping; what was reached is kept"
            )
        if before_s and not away_s:
            return f"forebay: Kafka at {self._kafka} answers again: going on"
        return None


class Plain:
    """A line every ten seconds, and one at the end.

    Args:
        before: What an earlier run reached: it does not count for the rate.
        outage: Knows what to say when the cluster is away.
        clock: Gives seconds.
    """

    def __init__(self, before: Tally, outage: Outage, clock: Callable[[], float] = time.monotonic) -> None:
        self._before, self._outage, self._clock = before.answered + before.errors, outage, clock
        self._began = self._told = clock()
        self._last: Progress | None = None

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Say where it ended, unless an error says so."""
        if self._last is not None and kind is None:
            self._tell(self._last)

    def show(self, now: Progress) -> None:
        """Take in where the run stands."""
        self._last = now
        if news := self._outage.news(now.away_s):
            click.echo(news, err=True)
        if self._clock() - self._told >= LINE_EVERY_S:
            self._tell(now)

    def _tell(self, now: Progress) -> None:
        self._told = self._clock()
        click.echo(line(now, self._before, self._told - self._began), err=True)


class Bar:
    """A bar with rate and time left.

    Args:
        before: What an earlier run reached: it does not count for the rate.
        outage: Knows what to say when the cluster is away.
        clock: Gives seconds.
        console: Where it is drawn; stderr by default.
    """

    def __init__(
        self, before: Tally, outage: Outage, clock: Callable[[], float] = time.monotonic, console: Console | None = None
    ) -> None:
        self._before, self._outage, self._clock = before.answered + before.errors, outage, clock
        self._began = clock()
        self._bar = RichProgress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}/s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[errors]} errors"),
            TextColumn("[bold red]{task.fields[away]}"),
            console=console or Console(stderr=True),
        )
        self._task = self._bar.add_task("lines", total=None, rate="-", errors=before.errors, away="")

    def __enter__(self) -> Self:
        """Draw the bar."""
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()

    def show(self, now: Progress) -> None:
        """Take in where the run stands."""
        if news := self._outage.news(now.away_s):
            self._bar.console.print(news, highlight=False, markup=False, soft_wrap=True)
        done = now.answered + now.errors
        rate = _rate(done - self._before, self._clock() - self._began)
        away = _away(now.away_s)
        self._bar.update(self._task, total=now.total, completed=done, rate=f"{rate:.1f}", errors=now.errors, away=away)


def line(now: Progress, before: int, elapsed_s: float) -> str:
    """Say in one line where the run stands.

    Args:
        now: Where it stands.
        before: Lines that had ended before this run.
        elapsed_s: Since this run began.
    """
    done = now.answered + now.errors
    rate = _rate(done - before, elapsed_s)
    share = 100 * done // now.total if now.total else 100
    left = f", {_clock_face((now.total - done) / rate)} left" if rate and done < now.total else ""
    away = f", {_away(now.away_s)}" if now.away_s else ""
    return f"{done} of {now.total} lines ({share} %), {rate:.1f}/s{left}, {now.errors} errors{away}"


def _away(away_s: float) -> str:
    return f"Kafka is away for {away_s:.0f} s" if away_s else ""


def _rate(lines: int, elapsed_s: float) -> float:
    return lines / elapsed_s if elapsed_s > 0 else 0.0


def _clock_face(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
