"""A simulated worker: the slots of the real one (its `Lifecycle`) before a modelled engine, and what it says of itself."""

from deploy.simulate.engine import Engine
from deploy.simulate.job import NEVER_MS, Job
from deploy.simulate.scenario import SimulatedEngine
from engine_consumers.core.completions import Completions
from engine_consumers.core.lifecycle import Ended, Lifecycle, Run, Taken, order
from schemas.features import CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP
from schemas.messages import Completion, EngineStatus

FEATURES = [CHAT, INPUT_TOKENS, PENALTIES, PRIORITY, SEED, STOP]
EPOCH_MS = 1_700_000_000_000  # Unix time of the run's beginning


class Partition:
    """A partition of a pool's topic: who owns it, where it ends, and what lies there unfinished."""

    def __init__(self, number: int, owner: "Worker | None") -> None:
        self.number, self.owner = number, owner
        self.end = 0
        self.position = 0  # below it all was read
        self.unfinished: dict[int, Job] = {}

    def append(self, job: Job) -> int:
        """A record was written; gives its offset."""
        job.place = self.number, self.end
        self.end += 1
        self.unfinished[job.number] = job
        return job.place[1]


class Worker:
    """One worker and its engine.

    Args:
        pool: Its engine's name.
        number: Its place in the pool.
        spec: What the scenario says of it.
        reserved_slots: Slots that batch may not take.
    """

    def __init__(self, pool: str, number: int, spec: SimulatedEngine, reserved_slots: int = 0) -> None:
        self.pool, self.number, self.spec, self.reserved_slots = pool, number, spec, reserved_slots
        self.name = f"{pool}-{number}"
        self.engine = Engine(spec.speed())
        self.temperature_c = spec.temperature_c
        self.is_alive, self.is_gone = True, False  # gone: its group knows
        self.epoch = 1
        self.held: dict[int, Job] = {}  # read and not ended
        self.partitions: list[Partition] = []
        self.planned_ms = NEVER_MS  # when its engine is looked at
        self._batch_held = 0
        self._begin()

    def _begin(self) -> None:
        self._lifecycle = Lifecycle(self.spec.slots, self.reserved_slots)
        self._completions = Completions()

    @property
    def load(self) -> int:
        """Requests it has, waiting ones included."""
        return len(self.held)

    @property
    def lowest(self) -> Partition:
        """Its lowest partition: what it is given lies there, so that others stay empty and may move."""
        return min(self.partitions, key=lambda partition: partition.number)

    def take(self, job: Job, now_ms: float) -> None:
        """A request was read."""
        self.held[job.number] = job
        job.worker, job.taken_ms = self.name, now_ms
        ask = job.ask
        if ask.service_class == "batch":
            self._batch_held += 1
        deadline_ms = int(job.deadline_ms) if ask.deadline_ms is not None else 1 << 62
        rank = order(ask.service_class, deadline_ms)
        for effect in self._lifecycle.handle(Taken(job.number, rank)):
            self._run(effect, now_ms)

    def advance(self, now_ms: float) -> list[Job]:
        """Let the engine come to the end of what it does.

        Returns:
            The requests that ended.
        """
        ended = self.engine.advance()
        for job in ended:
            del self.held[job.number]
            if job.ask.service_class == "batch":
                self._batch_held -= 1
            self._completions.add(
                Completion(
                    *job.place,
                    job.input_tokens,
                    job.output_tokens,
                    job.begun_ms - job.taken_ms,
                    job.first_ms - job.begun_ms,
                    job.end_ms - job.begun_ms,
                    job.beside,
                    job.kv_usage,
                )
            )
            for effect in self._lifecycle.handle(Ended(job.number)):
                self._run(effect, now_ms)
        return ended

    def _run(self, effect: object, now_ms: float) -> None:
        if not isinstance(effect, Run):
            message = f"a simulated worker cannot do {effect!r}"
            raise TypeError(message)
        job = self.held[effect.ticket]
        job.begun_ms, job.beside, job.kv_usage = now_ms, len(self.engine), self.engine.kv_usage(now_ms)
        self.engine.start(job, now_ms)

    def die(self, now_ms: float) -> list[Job]:
        """Lose everything.

        Returns:
            What it had, the oldest first.
        """
        self.is_alive = False
        self.engine.clear(now_ms)
        lost = list(self.held.values())
        self.held.clear()
        self._batch_held = 0
        for job in lost:
            job.reset()
        return lost

    def restart(self) -> None:
        """Serve again, as another."""
        self.is_alive, self.is_gone = True, False
        self.epoch += 1
        self._begin()

    def status(self, now_ms: float) -> EngineStatus:
        """What it says of itself, in a snapshot that is going to be published."""
        spec, running = self.spec, self._lifecycle.running
        status = EngineStatus(
            engine=self.pool,
            kind=spec.kind,
            pool=self.pool,
            worker=self.name,
            epoch=self.epoch,
            updated_at_ms=EPOCH_MS + int(now_ms),
            partitions=[p.number for p in self.partitions],
            positions={p.number: p.position for p in self.partitions},
            queue_depth=len(self.held) - running,
            running=running,
            slots=spec.slots,
            max_context=spec.max_context,
            trained_context=spec.trained_context or spec.max_context,
            models=[spec.model],
            features=FEATURES,
            kv_cache_usage=self.engine.kv_usage(now_ms) if spec.kv_tokens else None,
            gpu_temperature_c=self.temperature_c,
            interactive_slots=self._lifecycle.reserved,
            batch_load=self._batch_held,
            completed=self._completions.count,
            completions=self._completions.to_tell(),
        )
        self._completions.told(status.completed)
        return status
