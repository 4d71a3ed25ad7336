"""When requests come and how long they are: distributions and traces, all from one seed."""

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from deploy.simulate.errors import ScenarioError
from deploy.simulate.job import NEVER_MS, Ask, Job
from deploy.simulate.scenario import (
    Exponential,
    Fixed,
    FromTrace,
    Gamma,
    Kind,
    Lengths,
    LogNormal,
    OnOff,
    Phase,
    Poisson,
    Scenario,
    Traffic,
    Uniform,
)
from deploy.simulate.trace_files import Trace, find_trace, read_trace

ANSWER_MAX_LEAST = 256
QUIET_MS = 1_000.0  # where a phase has no traffic, it is looked again so often


class Arrivals:
    """Every request of a run, in order of time.

    Args:
        scenario: What comes.
        seed: Everything drawn follows from it; the same for every policy.
        scale: Times the rate of what is scaled, beside the scenario's own.
        beside: The scenario's folder, for its traces.
        traces: Traces read before.

    Raises:
        TraceError: A trace cannot be read.
    """

    def __init__(
        self,
        scenario: Scenario,
        seed: int | None = None,
        scale: float = 1.0,
        beside: Path | None = None,
        traces: dict[str, Trace] | None = None,
    ) -> None:
        self._scenario, self._seed = scenario, scenario.seed if seed is None else seed
        self._scale = scenario.scale * scale
        self._traces = {} if traces is None else traces
        for traffic in scenario.traffic:
            name = traffic.trace_name
            if name is not None and name not in self._traces:
                self._traces[name] = read_trace(find_trace(name, beside))
        self.asks = [[_ask(kind) for kind in traffic.kinds] for traffic in scenario.traffic]
        numbered = [ask for asks in self.asks for ask in asks]
        for number, ask in enumerate(numbered):
            ask.number = number
        self.kinds = numbered
        self.shifts_ms = sorted(phase.at_s * 1000 for t in scenario.traffic for phase in t.phases if phase.is_shift)

    def __iter__(self) -> Iterator[Job]:
        """Give the requests, the earliest first, numbered from 0."""
        streams = [self._stream(traffic, asks) for traffic, asks in zip(self._scenario.traffic, self.asks, strict=True)]
        for number, job in enumerate(heapq.merge(*streams, key=lambda job: job.at_ms)):
            job.number = number
            yield job

    def _stream(self, traffic: Traffic, asks: list[Ask]) -> Iterator[Job]:
        dice = random.Random(f"{self._seed} {traffic.name}")
        trace = self._traces.get(traffic.trace_name) if traffic.trace_name else None
        input_of, output_of = _lengths(traffic.input_tokens, dice), _lengths(traffic.output_tokens, dice)
        mix, scale = _Mix(traffic), self._scale if traffic.is_scaled else 1.0
        end_ms = min(traffic.last_s or NEVER_MS, self._scenario.duration_s) * 1000
        answers_max = [kind.answer_max for kind in traffic.kinds]
        for at_ms, row in _times(traffic, trace, dice, mix, scale, end_ms):
            if trace is not None and (input_of is None or output_of is None):
                place = row if isinstance(traffic.arrivals, FromTrace) else dice.randrange(len(trace))
                input_tokens = input_of() if input_of else trace.input_tokens[place]
                output_tokens = output_of() if output_of else trace.output_tokens[place]
            elif input_of is not None and output_of is not None:
                input_tokens, output_tokens = input_of(), output_of()
            else:
                message = f"traffic {traffic.name!r} has no lengths"
                raise ScenarioError(message)
            n = mix.draw(at_ms, dice) if len(asks) > 1 else 0
            answer_max = max(answers_max[n] or max(ANSWER_MAX_LEAST, 2 * output_tokens), output_tokens)
            yield Job(0, at_ms, asks[n], input_tokens, output_tokens, answer_max)


class _Mix:
    """The rate and the shares of the kinds, as they change."""

    def __init__(self, traffic: Traffic) -> None:
        rate, shares = 1.0, _of_one([kind.share for kind in traffic.kinds])
        self._steps: list[tuple[float, float, float, list[float]]] = [(0.0, 0.0, rate, shares)]
        for phase in traffic.phases:
            rate, shares = _after(phase, rate, shares)
            self._steps.append((phase.at_s * 1000, phase.ramp_s * 1000, rate, shares))
        self._now = 0
        self._accumulated = list(accumulate(shares)) if len(self._steps) == 1 else None

    def rate(self, at_ms: float) -> float:
        """Of the traffic's own."""
        (_, _, before, _), (since_ms, ramp_ms, after, _) = self._around(at_ms)
        return before + (after - before) * _progress(at_ms - since_ms, ramp_ms)

    def draw(self, at_ms: float, dice: random.Random) -> int:
        """Choose a kind."""
        sums = self._accumulated
        if sums is None:
            (_, _, _, before), (since_ms, ramp_ms, _, after) = self._around(at_ms)
            done = _progress(at_ms - since_ms, ramp_ms)
            sums = list(accumulate(b + (a - b) * done for b, a in zip(before, after, strict=True)))
        wanted = dice.random() * sums[-1]
        return next((n for n, reached in enumerate(sums) if wanted < reached), len(sums) - 1)

    def _around(self, at_ms: float) -> tuple[tuple[float, float, float, list[float]], tuple[float, float, float, list[float]]]:
        while self._now + 1 < len(self._steps) and self._steps[self._now + 1][0] <= at_ms:
            self._now += 1
        return self._steps[max(0, self._now - 1)], self._steps[self._now]


def _after(phase: Phase, rate: float, shares: list[float]) -> tuple[float, list[float]]:
    return (rate if phase.rate is None else phase.rate), (shares if phase.shares is None else _of_one(phase.shares))


def _of_one(shares: list[float]) -> list[float]:
    return [share / sum(shares) for share in shares]


def _progress(since_ms: float, ramp_ms: float) -> float:
    return 1.0 if since_ms >= ramp_ms else since_ms / ramp_ms


def _times(
    traffic: Traffic, trace: Trace | None, dice: random.Random, mix: _Mix, scale: float, end_ms: float
) -> Iterator[tuple[float, int]]:
    """Give each arrival's time and, of a trace, its row. The gap after an arrival is that at the rate of its moment."""
    gap = _gaps(traffic, trace, dice)
    at_ms, row = traffic.first_s * 1000, 0
    while True:
        rate = mix.rate(at_ms) * scale
        if not rate:
            at_ms += QUIET_MS
        else:
            at_ms += gap(row, at_ms, rate)
            if at_ms >= end_ms:
                return
            yield at_ms, row
            row = row + 1 if trace is None or row + 1 < len(trace) else 0
        if at_ms >= end_ms:
            return


def _gaps(traffic: Traffic, trace: Trace | None, dice: random.Random) -> Callable[[int, float, float], float]:
    """Give what draws the gap before a row: from that row, the moment, and how many times the traffic's own rate holds."""
    arrivals = traffic.arrivals
    if isinstance(arrivals, OnOff):
        return _on_off(arrivals, dice)
    if isinstance(arrivals, FromTrace):
        if trace is None:
            message = f"traffic {traffic.name!r} has no trace"
            raise ScenarioError(message)
        times, last_ms = trace.at_ms, trace.span_ms - trace.at_ms[-1]
        return lambda row, _, rate: (times[row] - times[row - 1] if row else last_ms) / (arrivals.rate * rate)
    mean_ms = 1000 / arrivals.per_s
    if isinstance(arrivals, Poisson):
        return lambda _row, _at, rate: dice.expovariate(1.0) * mean_ms / rate
    if isinstance(arrivals, Gamma):
        shape = 1 / (arrivals.cv * arrivals.cv)
        return lambda _row, _at, rate: dice.gammavariate(shape, mean_ms / shape) / rate
    return lambda _row, _at, rate: mean_ms / rate


def _on_off(arrivals: OnOff, dice: random.Random) -> Callable[[int, float, float], float]:
    """A Poisson process whose rate changes: what is left of an exponential gap goes on at the other rate."""
    is_on, until_ms = False, arrivals.first_s * 1000

    def gap(_row: int, at_ms: float, rate: float) -> float:
        nonlocal is_on, until_ms
        wanted, began_ms = dice.expovariate(1.0), at_ms
        while True:
            while until_ms <= at_ms:
                is_on = not is_on
                mean_ms = (arrivals.on_s if is_on else arrivals.off_s) * 1000
                until_ms += dice.expovariate(1 / mean_ms) if arrivals.random else mean_ms
            per_ms = (arrivals.per_s if is_on else arrivals.off_per_s) * rate / 1000
            if per_ms and at_ms + wanted / per_ms <= until_ms:
                return at_ms + wanted / per_ms - began_ms
            wanted -= (until_ms - at_ms) * per_ms
            at_ms = until_ms

    return gap


def _lengths(lengths: Lengths | None, dice: random.Random) -> Callable[[], int] | None:
    if lengths is None:
        return None
    if isinstance(lengths, Fixed):
        return lambda: lengths.tokens
    if isinstance(lengths, Uniform):
        return lambda: dice.randint(lengths.least, max(lengths.least, lengths.most))
    if isinstance(lengths, LogNormal):
        return lambda: _within(lengths, lengths.median * dice.lognormvariate(0.0, lengths.sigma))
    return lambda: _within(lengths, dice.expovariate(1 / lengths.mean))


def _within(lengths: LogNormal | Exponential, tokens: float) -> int:
    return min(max(round(tokens), lengths.least), lengths.most)


def _ask(kind: Kind) -> Ask:
    asked = kind.tenant, kind.service_class, kind.model, kind.hint, kind.fallback, kind.slo_ms, kind.deadline_ms
    return Ask(0, kind.engine, *asked)
