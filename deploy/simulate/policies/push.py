"""Policies that give each request to a worker at once, where it waits: what load balancers do.

The first two know the workers by their last snapshots only, and do not count what they sent since. The last knows the
true lengths of all queues, those on the way included: what no dispatcher can, and the limit of the others.
"""

import random

from deploy.simulate.job import Job
from deploy.simulate.policies.eligible import Eligible
from deploy.simulate.worker import Worker
from deploy.simulate.world import World
from schemas.messages import EngineStatus


class Push:
    """What they share.

    Args:
        world: What they work on.
    """

    wants_status = True
    queued = 0

    def __init__(self, world: World) -> None:
        self._world = world
        self._eligible = Eligible(world)
        self._known = dict.fromkeys(world.workers, 0.0)  # load, as of the last snapshot
        self._dead: set[str] = set()
        self._dice = random.Random(f"{world.seed} push")

    def choose(self, workers: list[Worker]) -> Worker:
        """Who gets a request."""
        raise NotImplementedError

    def arrived(self, job: Job) -> None:
        """Send it."""
        workers = [worker for pool in self._eligible.pools(job) for worker in self._world.pools[pool]]
        if not workers:
            self._world.finish(job, "rejected")
            return
        living = [worker for worker in workers if worker.name not in self._dead]
        self.sending(job, self.choose(living or workers))

    def sending(self, job: Job, worker: Worker) -> None:
        """Send it to that worker."""
        self._world.send(job, worker.lowest)

    def ended(self, job: Job, worker: Worker) -> None:
        """A snapshot will tell."""

    def seen(self, status: EngineStatus) -> None:
        """Remember the load."""
        self._known[status.worker] = (status.running + status.queue_depth) / status.slots

    def died(self, worker: Worker) -> None:
        """It gets nothing any more."""
        self._dead.add(worker.name)

    def restarted(self, worker: Worker) -> None:
        """It gets requests again."""
        self._dead.discard(worker.name)

    def lost(self, worker: Worker) -> None:
        """What it had is given to others."""
        self._dead.add(worker.name)
        for job in self._world.take_back(worker):
            self.arrived(job)


class LeastLoaded(Push):
    """The least loaded by the last snapshots; the first by name among like ones."""

    def choose(self, workers: list[Worker]) -> Worker:
        """Who gets a request."""
        return min(workers, key=lambda worker: self._known[worker.name])


class PowerOfTwo(Push):
    """The less loaded of two at random, by the last snapshots (Mitzenmacher 2001)."""

    def choose(self, workers: list[Worker]) -> Worker:
        """Who gets a request."""
        if len(workers) == 1:
            return workers[0]
        first, second = self._dice.sample(workers, 2)
        return first if self._known[first.name] <= self._known[second.name] else second


class FreshJsq(Push):
    """The shortest queue, which it knows; among like ones at random."""

    wants_status = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._given = dict.fromkeys(world.workers, 0)

    def choose(self, workers: list[Worker]) -> Worker:
        """Who gets a request."""
        return min(workers, key=lambda worker: (self._given[worker.name] / worker.spec.slots, self._dice.random()))

    def sending(self, job: Job, worker: Worker) -> None:
        """Count it at once."""
        self._given[worker.name] += 1
        super().sending(job, worker)

    def ended(self, job: Job, worker: Worker) -> None:  # noqa: ARG002 - the policy's signature
        """Count it at once."""
        self._given[worker.name] -= 1

    def lost(self, worker: Worker) -> None:
        """Its queue is gone."""
        self._given[worker.name] = 0
        super().lost(worker)
