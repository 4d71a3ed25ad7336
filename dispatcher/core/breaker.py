r"""Circuit breakers: a worker that fails is left alone, probed, and taken again (Nygard, Release It!, 2007).

    closed --(`failures` in a row)--> open --(`open_ms`)--> half open --(a success)--> closed, to start slowly
                                       ^                       |
                                       \--(a failure: twice as long, up to `open_ms_max`)

While it is half open `probes` requests at once are sent. What never comes back of them holds nobody up for longer than
`open_ms`: then there are as many again. A worker that was started anew is probed at once: it is another process.

A pool is open when all its workers are, and then `probes` are sent to the whole of it; the first success lets each of its
workers be probed. It counts no failures of its own: of two workers, one that fails at once ends so many more requests than
one that works that a pool's count would shut the healthy one out.

| code | says of the engine | counts as |
|---|---|---|
| none (completed) | it works | a success |
| internal, timeout, unhealthy | it does not | a failure |
| invalid_request, context_overflow, model_not_found, unsupported_feature | nothing: the client is at fault | neither |
| cancelled, expired | nothing: nobody wanted the answer any more | neither |
| capacity_exceeded, preempted | it is full, which is no illness: load and exclusion answer to that | neither |
| poison | nothing: the request kills whoever takes it | neither |
"""

from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from typing import Literal

from schemas.errors import ErrorCode
from schemas.policy import BreakerConfig
from schemas.questions import BreakerSeen

FAILURES = frozenset({ErrorCode.INTERNAL, ErrorCode.TIMEOUT, ErrorCode.UNHEALTHY})
NEVER = float("inf")


class State(IntEnum):
    """What a breaker lets through: everything, probes, or nothing."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """The breaker of one worker.

    Args:
        config: Its bounds.
        epoch: Of the worker's start.

    Attributes:
        state: Of now; `settle` moves it on with time.
        failures: In a row.
        open_ms: How long it is open, or was the last time.
        turn_ms: When it becomes half open, or may be probed again whatever became of the probes.
        probing: Probes that are out.
    """

    __slots__ = ("_config", "epoch", "failures", "open_ms", "probing", "state", "turn_ms")

    def __init__(self, config: BreakerConfig, epoch: int) -> None:
        self._config, self.epoch = config, epoch
        self.state = State.CLOSED
        self.failures = self.probing = 0
        self.open_ms, self.turn_ms = config.open_ms, NEVER

    @property
    def allows(self) -> bool:
        """Whether the worker may be sent a request."""
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and self.probing < self._config.probes)

    def settle(self, now_ms: float) -> None:
        """Move on with time."""
        if now_ms < self.turn_ms:
            return
        self.state, self.probing, self.turn_ms = State.HALF_OPEN, 0, NEVER

    def sent(self, now_ms: float) -> None:
        """A request was sent there; what is not closed takes it for a probe."""
        if self.state is State.HALF_OPEN:
            self.probing += 1
            self.turn_ms = now_ms + self.open_ms

    def completed(self, code: ErrorCode | None, now_ms: float) -> None:
        """Take in how a run ended; while it is open, those are runs from before."""
        if self.state is State.OPEN:
            return
        if code is None:
            self.close()
        elif code in FAILURES:
            self.failures += 1
            if self.state is State.HALF_OPEN:
                self._open(min(2 * self.open_ms, self._config.open_ms_max), now_ms)
            elif self.failures >= self._config.failures:
                self._open(self._config.open_ms, now_ms)
        elif self.state is State.HALF_OPEN:
            self.probing = max(self.probing - 1, 0)  # it told nothing: another may go

    def know(self, epoch: int) -> bool:
        """Take in which start of the worker it is.

        Returns:
            Whether it was started anew; one that failed is probed then.
        """
        if epoch == self.epoch:
            return False
        self.epoch, self.failures = epoch, 0
        if self.state is not State.CLOSED:
            self.state, self.probing, self.turn_ms = State.HALF_OPEN, 0, NEVER
        return True

    def close(self) -> None:
        """It works."""
        self.state, self.failures, self.probing = State.CLOSED, 0, 0
        self.open_ms, self.turn_ms = self._config.open_ms, NEVER

    def _open(self, open_ms: int, now_ms: float) -> None:
        self.state, self.probing, self.open_ms, self.turn_ms = State.OPEN, 0, open_ms, now_ms + open_ms


class Breakers:
    """The breakers of all workers; those that never failed have none.

    Args:
        config: Their bounds.

    Attributes:
        version: Changes whenever what may be sent to changes.
        turn_ms: `settle` has nothing to do before.
        are_probing: Whether any of them is half open.
    """

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._pools: dict[str, dict[str, Breaker]] = {}
        self.version = 0
        self.turn_ms = NEVER
        self.are_probing = False

    def settle(self, now_ms: float) -> None:
        """Move on with time."""
        if now_ms < self.turn_ms:
            return
        for breakers in self._pools.values():
            for breaker in breakers.values():
                breaker.settle(now_ms)
        self._changed()

    def state(self, pool: str, worker: str) -> State:
        """The state of a worker's breaker."""
        breaker = self._pools.get(pool, {}).get(worker)
        return State.CLOSED if breaker is None else breaker.state

    def pool_state(self, pool: str, workers: Collection[str]) -> State:
        """The state of a pool: that of its least troubled worker.

        Args:
            pool: The pool.
            workers: Those of its workers that are there.
        """
        return min((self.state(pool, worker) for worker in workers), default=State.CLOSED)

    def allows(self, pool: str, worker: str, workers: Collection[str]) -> bool:
        """Whether a worker may be sent a request.

        Args:
            pool: Its pool.
            worker: Its name.
            workers: Those of the pool's workers that are there, this one included.
        """
        breakers = self._pools.get(pool)
        breaker = None if breakers is None else breakers.get(worker)
        if breakers is None or breaker is None or not breaker.allows:
            return breaker is None
        if breaker.state is State.CLOSED or self.pool_state(pool, workers) is State.CLOSED:
            return True
        return sum(breakers[name].probing for name in workers if name in breakers) < self._config.probes

    def sent(self, pool: str, worker: str, now_ms: float) -> None:
        """A request was sent there."""
        breaker = self._pools.get(pool, {}).get(worker)
        if breaker is not None and breaker.state is State.HALF_OPEN:
            breaker.sent(now_ms)
            self._changed()

    def completed(self, pool: str, worker: str, epoch: int, code: ErrorCode | None, now_ms: float) -> bool:
        """Take in how a run ended; one of an earlier start of the worker tells nothing any more.

        Returns:
            Whether the breaker was half open and is closed now: the worker should start slowly.
        """
        breaker = self._pools.get(pool, {}).get(worker)
        if breaker is None:
            if code not in FAILURES:
                return False
            breaker = self._pools.setdefault(pool, {})[worker] = Breaker(self._config, epoch)
        if breaker.epoch != epoch:
            return False
        before = breaker.state
        breaker.completed(code, now_ms)
        if before is State.CLOSED and breaker.state is State.CLOSED:
            if not breaker.failures:
                del self._pools[pool][worker]
            return False
        self._changed()
        return before is State.HALF_OPEN and breaker.state is State.CLOSED

    def know(self, pool: str, epochs: Mapping[str, int]) -> None:
        """Take in which workers a pool has, and which start of each it is; others are forgotten."""
        breakers = self._pools.get(pool, {})
        gone = breakers.keys() - epochs.keys()
        for worker in gone:
            del breakers[worker]
        if gone or any([breakers[worker].know(epochs[worker]) for worker in breakers]):  # noqa: C419 - each must know
            self._changed()

    def seen(self) -> list[BreakerSeen]:
        """Those that are not closed, by pool and worker."""
        found = []
        for pool, breakers in sorted(self._pools.items()):
            for worker, one in sorted(breakers.items()):
                if one.state is not State.CLOSED:
                    until_ms = None if one.turn_ms == NEVER else one.turn_ms
                    state: Literal["half_open", "open"] = "open" if one.state is State.OPEN else "half_open"
                    found.append(BreakerSeen(pool, worker, one.epoch, state, one.open_ms, until_ms, one.probing))
        return found

    def restore(self, seen: Iterable[BreakerSeen]) -> None:
        """Let these be as they were seen."""
        for one in seen:
            breaker = self._pools.setdefault(one.pool, {})[one.worker] = Breaker(self._config, one.epoch)
            breaker.state = State.OPEN if one.state == "open" else State.HALF_OPEN
            breaker.open_ms, breaker.probing = one.open_ms, one.probing
            breaker.turn_ms = NEVER if one.until_ms is None else one.until_ms
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        known = [breaker for breakers in self._pools.values() for breaker in breakers.values()]
        self.turn_ms = min((breaker.turn_ms for breaker in known), default=NEVER)
        self.are_probing = any(breaker.state is State.HALF_OPEN for breaker in known)
