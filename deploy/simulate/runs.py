"""Run policies on a scenario: once, to the highest load that they bear, or to the fewest GPUs that bear a load."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from deploy.simulate.arrivals import Arrivals
from deploy.simulate.errors import SimulationError
from deploy.simulate.policies import find_policy
from deploy.simulate.scenario import FromTrace, Scenario, SimulatedEngine, Traffic
from deploy.simulate.trace_files import Trace
from deploy.simulate.world import Ran, World

LOAD_LEAST, LOAD_MOST = 1 / 64, 64.0  # of the scenario's own, between which the highest load is looked for
LOAD_STEP = 1.01  # how near it is come to
Report = Callable[[str, int, float], object]  # policy, requests that arrived, milliseconds simulated


class Found(Struct):
    """What a search came to.

    Attributes:
        at: The highest factor of the scenario's load, or the fewest GPUs; None where even the easiest is too much.
        ran: The run there.
        beyond: The nearest that missed the objective; None where nothing did.
    """

    at: float | None
    ran: Ran | None
    beyond: float | None


class Runs:
    """Runs policies on one scenario; traces are read once.

    Args:
        scenario: What is simulated.
        beside: Its folder.
        requests_max: Each run takes so many requests at most.
        report: Told where a run stands.
    """

    def __init__(
        self, scenario: Scenario, beside: Path | None = None, requests_max: int | None = None, report: Report | None = None
    ) -> None:
        self.scenario, self._beside = scenario, beside
        self._requests_max, self._report = requests_max, report
        self._traces: dict[str, Trace] = {}

    def run(self, policy: str, scale: float = 1.0, scenario: Scenario | None = None) -> Ran:
        """Run one policy.

        Args:
            policy: Its name.
            scale: Times the scenario's own load.
            scenario: Another one than the runs' own.

        Raises:
            SimulationError: A policy is not known, a trace cannot be read, or requests never end.
        """
        scenario = scenario or self.scenario
        arrivals = Arrivals(scenario, None, scale, self._beside, self._traces)
        report = self._report
        tell = None if report is None else lambda arrived, now_ms: report(policy, arrived, now_ms)
        return World(scenario, arrivals, policy, find_policy(policy), self._requests_max, tell).run()

    def find_load(self, policy: str) -> Found:
        """Find the highest load under which the objective is met, by doubling and halving steps."""
        return _search(lambda scale: self.run(policy, scale), self._is_met, LOAD_LEAST, LOAD_MOST)

    def find_gpus(self, policy: str) -> Found:
        """Find the fewest GPUs that meet the objective, shared among the engines as the scenario's own are."""
        most = self.scenario.gpus_max
        least = sum(1 for engine in self.scenario.engines.values() if engine.workers)
        if most < least:
            message = f"`gpus_max`: expected {least} at least, one for each engine"
            raise SimulationError(message)
        low, high, found = least - 1, most + 1, None  # low misses, high meets
        while high - low > 1:
            middle = (low + high) // 2
            ran = self.run(policy, scenario=self.with_gpus(middle))
            if not ran.is_whole:
                return Found(None, ran, None)
            if self._is_met(ran):
                high, found = middle, ran
            else:
                low = middle
        return Found(None if found is None else high, found, low if low >= least else None)

    def with_gpus(self, count: int) -> Scenario:
        """Share so many GPUs among the engines, as near to the scenario's own shares as whole ones allow, one at least each."""
        used = {name: engine for name, engine in self.scenario.engines.items() if engine.workers}
        given, total = dict.fromkeys(used, 1), self.scenario.workers
        for _ in range(count - len(used)):
            name = max(used, key=lambda one: used[one].workers * count / total - given[one])
            given[name] += 1
        engines: dict[str, SimulatedEngine] = {name: replace(engine, workers=given[name]) for name, engine in used.items()}
        named = {f"{name}-{n}" for name, number in given.items() for n in range(number)}
        faults = [fault for fault in self.scenario.faults if fault.worker in named]
        return replace(self.scenario, engines={**self.scenario.engines, **engines}, faults=faults)

    def _is_met(self, ran: Ran) -> bool:
        return ran.measures.attainment() >= self.scenario.slo.attainment


def _search(run: Callable[[float], Ran], is_met: Callable[[Ran], bool], least: float, most: float) -> Found:
    """Bracket by factors of two from 1, then halve the bracket."""
    low: float | None = None
    high: float | None = None
    best, scale = None, 1.0
    while (low is None or high is None or high / low > LOAD_STEP) and least <= scale <= most:
        ran = run(scale)
        if not ran.is_whole:
            return Found(None, ran, None)
        if is_met(ran):
            low, best = scale, ran
        else:
            high = scale
        scale = scale * 2 if high is None else scale / 2 if low is None else (low * high) ** 0.5
    return Found(low, best, high)


def with_trace(scenario: Scenario, path: Path) -> Scenario:
    """Put another trace under a scenario: where it reads one, or else under its first traffic, arrivals and lengths."""
    name = str(path.absolute())
    reads = [traffic.trace_name is not None for traffic in scenario.traffic]
    changed = [
        _on_trace(traffic, name) if (is_read or (not n and not any(reads))) else traffic
        for n, (traffic, is_read) in enumerate(zip(scenario.traffic, reads, strict=True))
    ]
    return replace(scenario, traffic=changed)


def _on_trace(traffic: Traffic, name: str) -> Traffic:
    arrivals = traffic.arrivals
    if isinstance(arrivals, FromTrace):
        return replace(traffic, arrivals=replace(arrivals, trace=name))
    if traffic.trace is not None:
        return replace(traffic, trace=name)
    return replace(traffic, arrivals=FromTrace(name), input_tokens=None, output_tokens=None)
