"""Policies that keep requests until a slot is free: isolated engines, one FIFO for all, and earliest deadline first.

They know at once of every slot that falls free, as no real dispatcher does: no snapshot is late for them. A request
that comes while several workers have free slots goes to the one with the least share of its slots taken.
"""

import heapq
from collections import deque

from deploy.simulate.job import NEVER_MS, Job
from deploy.simulate.policies.eligible import Eligible
from deploy.simulate.worker import Worker
from deploy.simulate.world import World
from schemas.messages import EngineStatus

_Group = tuple[str, ...]


class Central:
    """What they share: a line for each set of engines that may serve, in the order of a rank.

    Args:
        world: What they work on.
    """

    wants_status = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._given = dict.fromkeys(world.workers, 0)  # requests that a worker has or will get
        self._dead: set[str] = set()
        self._lines: dict[_Group, list[tuple[float, int, Job]]] = {}
        self._eligible = Eligible(world)
        self.queued = 0

    def group(self, job: Job) -> _Group:
        """The pools that may serve a request."""
        return self._eligible.pools(job)

    def rank(self, job: Job) -> float:
        """Who goes first: the least."""
        return job.at_ms

    def load(self, worker: Worker, job: Job) -> float:  # noqa: ARG002 - others look at it
        """Who of those with a free slot gets a request: the least."""
        return self._given[worker.name] / worker.spec.slots

    def arrived(self, job: Job) -> None:
        """Give it to a worker with a free slot, or let it wait."""
        group = self.group(job)
        if not group:
            self._world.finish(job, "rejected")
            return
        free = [worker for pool in group for worker in self._world.pools[pool] if self._is_free(worker)]
        if free:
            self._send(job, min(free, key=lambda worker: self.load(worker, job)))
        else:
            self._wait(job, group)

    def ended(self, job: Job, worker: Worker) -> None:  # noqa: ARG002 - the policy's signature
        """A slot fell free: whoever is first of those that the worker may serve gets it."""
        self._given[worker.name] -= 1
        self._fill(worker)

    def seen(self, status: EngineStatus) -> None:
        """Nothing is learned from a snapshot."""

    def died(self, worker: Worker) -> None:
        """It gets nothing any more."""
        self._dead.add(worker.name)

    def restarted(self, worker: Worker) -> None:
        """It gets requests again."""
        self._dead.discard(worker.name)
        self._given[worker.name] = len(worker.held)
        self._fill(worker)

    def lost(self, worker: Worker) -> None:
        """What it had is given to others."""
        self._dead.add(worker.name)
        for job in self._world.take_back(worker):
            self.arrived(job)

    def _is_free(self, worker: Worker) -> bool:
        return self._given[worker.name] < worker.spec.slots and worker.name not in self._dead

    def _fill(self, worker: Worker) -> None:
        while self._is_free(worker):
            lines = [line for group, line in self._lines.items() if line and worker.pool in group]
            if not lines:
                return
            self.queued -= 1
            self._send(heapq.heappop(min(lines, key=lambda line: line[0][:2]))[2], worker)

    def _wait(self, job: Job, group: _Group) -> None:
        self.queued += 1
        heapq.heappush(self._lines.setdefault(group, []), (self.rank(job), job.number, job))

    def _send(self, job: Job, worker: Worker) -> None:
        self._given[worker.name] += 1
        self._world.send(job, worker.lowest)


class Isolated(Central):
    """Each kind of request has its own engines, and a FIFO."""

    def group(self, job: Job) -> _Group:
        """The one pool that it is meant for."""
        spec = self._world.scenario.engines[job.ask.engine]
        fits = job.input_tokens + job.output_tokens <= spec.max_context
        return (job.ask.engine,) if spec.workers and fits else ()


class PooledFifo(Central):
    """One FIFO over all engines; who may not be served by a worker with a free slot does not hold up those that may."""


class Edf(Central):
    """Earliest deadline first by what is clairvoyant: true lengths, true states.

    A request is due when its first token is; one without an objective is due last. One that can no longer be in time,
    were its prompt read alone and at once, waits behind all that can. Of the workers with a free slot the one gets it
    that would leave most of both objectives: the time to its first token behind the prompts that are to be read there,
    and the time of a step with one more in the batch, each as a share of what is allowed.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._late: dict[_Group, deque[Job]] = {}
        self._unread = dict.fromkeys(world.workers, 0)  # tokens on their way

    def rank(self, job: Job) -> float:
        """When its first token is due."""
        slo = self._world.scenario.slo
        return job.at_ms + slo.ttft_ms if job.ask.service_class in slo.classes else NEVER_MS

    def load(self, worker: Worker, job: Job) -> float:
        """The greater share of what the objective allows that it would take there."""
        engine, slo = worker.engine, self._world.scenario.slo
        speed, batch = engine.speed, self._given[worker.name] + 1
        step_ms = speed.decode_ms(batch, engine.kv_usage(self._world.now_ms))
        tokens = engine.unread_tokens + self._unread[worker.name] + job.input_tokens
        first_ms = speed.prefill_ms(tokens) + tokens / speed.prefill_chunk * step_ms
        return engine.pace * max(first_ms / max(slo.ttft_ms, 1.0), step_ms / max(slo.tpot_ms, 1.0))

    def _send(self, job: Job, worker: Worker) -> None:
        self._unread[worker.name] += job.input_tokens
        self._world.at(self._world.now_ms + self._world.scenario.hop_ms, self._there, job, worker)
        super()._send(job, worker)

    def _there(self, job: Job, worker: Worker) -> None:
        self._unread[worker.name] -= job.input_tokens

    def _fill(self, worker: Worker) -> None:
        now_ms = self._world.now_ms + self._world.scenario.hop_ms
        speed = worker.engine.speed
        for group, line in self._lines.items():
            while line and worker.pool in group:
                rank, _, job = line[0]
                if now_ms + speed.ttft_ms + speed.prefill_ms(job.input_tokens) <= rank:
                    break
                self._late.setdefault(group, deque()).append(heapq.heappop(line)[2])
        super()._fill(worker)
        for group, late in self._late.items():
            while late and worker.pool in group and self._is_free(worker):
                self.queued -= 1
                self._send(late.popleft(), worker)
