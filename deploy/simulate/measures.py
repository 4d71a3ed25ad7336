"""What is measured of a run, in memory that does not grow with it.

*Useful utilisation* is the work of the requests that met their objective and ended inside the window, over the time of
all GPUs in it. The work of a request is the engine time that it takes at least on the engine that it is meant for: its
prompt read alone, and its part of each step with every slot of the batch taken (`Speed.full_cost_ms`). So a GPU that
runs one sequence in a batch of 48 is not fully used, and a request is worth the same under every policy.

The window begins after the warm-up and ends with the last arrival. Latencies and attainment are those of all requests
that arrive in it; one that never got an answer missed its objective, and one of a class that has none met it when it
was answered.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from deploy.simulate.engine import Speed
from deploy.simulate.histogram import Histogram
from deploy.simulate.job import Ask, Job
from deploy.simulate.scenario import Slo

HORIZON_MS = 60_000  # of a shift
SHIFT_BIN_MS = 250
POINTS_MAX = 480  # of a series
TENANT = "tenant "


class KindFigures:
    """Requests of one kind that arrived inside the window."""

    def __init__(self) -> None:
        self.count = self.answered = self.met = 0
        self.ttft, self.tpot, self.latency = Histogram(), Histogram(), Histogram()


class TenantFigures:
    """What a tenant got inside the window."""

    def __init__(self) -> None:
        self.arrived = self.answered = 0
        self.tokens = 0
        self.work_ms = 0.0


class Series:
    """A few figures over time: means over intervals that double when there are too many."""

    def __init__(self, interval_ms: float) -> None:
        self.interval_ms = interval_ms
        self._sums: list[dict[str, float]] = []
        self._counts: list[int] = []

    def add(self, now_ms: float, values: Mapping[str, float]) -> None:
        """Take a sample of each figure."""
        while (place := int(now_ms / self.interval_ms)) >= POINTS_MAX:
            self.interval_ms *= 2
            self._sums = [_added(*self._sums[n : n + 2]) for n in range(0, len(self._sums), 2)]
            self._counts = [sum(self._counts[n : n + 2]) for n in range(0, len(self._counts), 2)]
        while len(self._sums) <= place:
            self._sums.append(defaultdict(float))
            self._counts.append(0)
        self._counts[place] += 1
        sums = self._sums[place]
        for name, value in values.items():
            sums[name] += value

    def points(self, name: str) -> tuple[list[float], list[float]]:
        """Give the seconds at which the intervals begin, and the means."""
        kept = [n for n, count in enumerate(self._counts) if count]
        seconds = [n * self.interval_ms / 1000 for n in kept]
        return seconds, [self._sums[n].get(name, 0.0) / self._counts[n] for n in kept]


def _added(*parts: dict[str, float]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            sums[name] += value
    return sums


class Measures:
    """Everything that is known of a run.

    Args:
        slo: The objective.
        kinds: All kinds of requests, by number.
        speeds: Engine -> its model, for the work of a request.
        from_ms: The window begins.
        shifts_ms: Moments after which recovery is measured.
        interval_ms: Of the series, to begin with.
    """

    def __init__(
        self,
        slo: Slo,
        kinds: Sequence[Ask],
        speeds: Mapping[str, Speed],
        from_ms: float,
        shifts_ms: Sequence[float] = (),
        interval_ms: float = 1_000.0,
    ) -> None:
        self.slo, self._asks, self.from_ms, self._speeds = slo, kinds, from_ms, speeds
        self.kinds = {ask.number: KindFigures() for ask in kinds}
        self.tenants: dict[str, TenantFigures] = defaultdict(TenantFigures)
        self.engines: Counter[str] = Counter()  # answered inside the window, by engine
        self.statuses: Counter[str] = Counter()
        self.arrived = 0
        self.useful_ms = self.work_ms = 0.0
        self.queue_most = 0
        self.series = Series(interval_ms)
        self._shifts = [(at_ms, [[0, 0] for _ in range(HORIZON_MS // SHIFT_BIN_MS)]) for at_ms in shifts_ms]
        self._last_ms = 0.0
        self._since: dict[str, float] = defaultdict(float)  # the last sample: work done, by tenant

    def of_kinds(self) -> list[tuple[Ask, KindFigures]]:
        """Give each kind of request with its figures."""
        return [(ask, self.kinds[ask.number]) for ask in self._asks]

    def arrival(self, job: Job) -> None:
        """A request came."""
        self.arrived += 1
        self._last_ms = job.at_ms
        if job.at_ms >= self.from_ms:
            self.kinds[job.ask.number].count += 1
            self.tenants[job.ask.tenant].arrived += 1

    def work_of(self, job: Job) -> float:
        """Engine time that it takes at least."""
        return self._speeds[job.ask.engine].full_cost_ms(job.input_tokens, job.output_tokens)

    def ended(self, job: Job, status: str, now_ms: float, *, is_open: bool) -> None:
        """A request ended.

        Args:
            job: The request.
            status: That of its terminal result.
            now_ms: When.
            is_open: Whether arrivals still come: the window for what is done.
        """
        self.statuses[status] += 1
        is_met = status == "completed" and self.meets(job)
        for at_ms, bins in self._shifts:
            since = int((job.at_ms - at_ms) // SHIFT_BIN_MS)
            if 0 <= since < len(bins):
                bins[since][0] += 1
                bins[since][1] += is_met
        work_ms = self.work_of(job) if status == "completed" else 0.0
        self._since[TENANT + job.ask.tenant] += work_ms
        self._since["useful_ms"] += work_ms if is_met else 0.0
        if is_open and now_ms >= self.from_ms and status == "completed":
            tenant = self.tenants[job.ask.tenant]
            tenant.answered += 1
            tenant.tokens += job.input_tokens + job.output_tokens
            tenant.work_ms += work_ms
            self.engines[job.worker.rpartition("-")[0]] += 1
            self.work_ms += work_ms
            self.useful_ms += work_ms if is_met else 0.0
        if job.at_ms >= self.from_ms:
            figures = self.kinds[job.ask.number]
            figures.met += is_met
            if status == "completed":
                figures.answered += 1
                figures.ttft.add(job.ttft_ms)
                figures.latency.add(job.latency_ms)
                if job.output_tokens > 1:
                    figures.tpot.add(job.tpot_ms)

    def meets(self, job: Job) -> bool:
        """Whether an answered request met its objective."""
        if job.end_ms > job.deadline_ms:
            return False
        if job.ask.service_class not in self.slo.classes:
            return True
        return job.ttft_ms <= self.slo.ttft_ms and job.tpot_ms <= self.slo.tpot_ms

    def sample(self, now_ms: float, queued: int, running: int) -> None:
        """Look at the run at a moment, the same interval after the last one."""
        self.queue_most = max(self.queue_most, queued)
        self.series.add(now_ms, {**self._since, "queue": queued, "running": running})
        self._since.clear()

    @property
    def window_ms(self) -> float:
        """The length of the window."""
        return max(0.0, self._last_ms - self.from_ms)

    @property
    def measured(self) -> int:
        """Requests with an objective that came after the warm-up."""
        return sum(figures.count for figures in self._with_objective())

    def attainment(self) -> float:
        """Share of the requests with an objective that met it; 1 of none."""
        count = self.measured
        return sum(figures.met for figures in self._with_objective()) / count if count else 1.0

    def _with_objective(self) -> list[KindFigures]:
        return [figures for ask, figures in self.of_kinds() if ask.service_class in self.slo.classes]

    def recovery_s(self) -> list[float | None]:
        """For each shift, the seconds from which on the rest of the horizon meets the objective; None: not inside it."""
        return [self._recovery_s(bins) for _, bins in self._shifts]

    def _recovery_s(self, bins: list[list[int]]) -> float | None:
        found: float | None = None
        count = met = 0
        for n in range(len(bins) - 1, -1, -1):
            count += bins[n][0]
            met += bins[n][1]
            if count and met >= self.slo.attainment * count:
                found = n * SHIFT_BIN_MS / 1000
        return found
