"""The way between processes and the in-memory cluster, with what may happen to a request or an answer on it."""

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from broker.transport.errors import TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport, Step
from broker.transport.memory.process import Process

NOT_LATE = frozenset(
    {"join", "leave", "poll", "partitions", "check", "ensure"}
)  # what leaves no trace, or must not outlive its sender
GROUP = frozenset({"join", "heartbeat", "committed", "leave"})
TRANSACTIONS = frozenset({"init", "offsets", "end"})
JITTER, JITTER_MS = 0.08, 6.0


@dataclass
class Weather:
    """How the network is now; each a probability per operation."""

    lost: float = 0.0  # the request never arrives
    unheard: float = 0.0  # it takes effect and the answer is lost
    late: float = 0.0  # its sender is told nothing, and it takes effect later
    slow: float = 0.0
    slow_ms: float = 0.0
    coordinator: str = ""  # which is moving
    moved: float = 0.0


@dataclass
class Loss:
    """Some operations of one kind whose request or answer is lost, whoever makes them."""

    operation: str
    moment: str
    times: int
    every: int
    seen: int = 0

    def takes(self, step: Step) -> bool:
        """Whether this one is lost."""
        if (step.operation, step.moment) != (self.operation, self.moment) or self.times <= 0:
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.times -= 1
        return True


@dataclass
class Ambush:
    """Something done to a process at one moment of one of its operations."""

    process: str
    operation: str
    moment: str
    left: int  # times it is let pass first
    act: Callable[[], None]


class Network:
    """Decides what becomes of each operation; one set of dice, so that a run repeats."""

    def __init__(self, seed: int, trace: Callable[..., None]) -> None:
        self._dice, self._trace = random.Random(f"{seed}/network"), trace
        self.weather = Weather()
        self.ambushes: list[Ambush] = []
        self.losses: list[Loss] = []

    def notice_ms(self) -> float:
        """How long a member takes to hear of a new generation."""
        return self._dice.choice((0.0, 0.0, 1.0, 20.0, 90.0))

    def late_ms(self, operation: str) -> float | None:
        """How late the request arrives, where nobody waits for it any more."""
        if not self.weather.late or operation in NOT_LATE or self._dice.random() >= self.weather.late:
            return None
        return self._dice.choice((1.0, 40.0, 400.0))

    async def hook(self, step: Step) -> None:
        """Delay, fail or ambush one moment of one operation."""
        self._trace(*step)
        for ambush in self.ambushes:
            if (ambush.process, ambush.operation, ambush.moment) == (step.process, step.operation, step.moment):
                if ambush.left:
                    ambush.left -= 1
                    continue
                self.ambushes.remove(ambush)
                ambush.act()
                await asyncio.sleep(0)
                break
        weather, dice = self.weather, self._dice
        draw = dice.random()
        if draw < weather.slow:
            await asyncio.sleep(dice.random() * weather.slow_ms / 1000)
        elif draw < weather.slow + JITTER:
            await asyncio.sleep(dice.random() * JITTER_MS / 1000)
        if step.moment == "before" and weather.moved and self._concerned(step.operation) and dice.random() < weather.moved:
            self._fail(step, "the coordinator is moving")
        if any(loss.takes(step) for loss in self.losses) or dice.random() < (
            weather.lost if step.moment == "before" else weather.unheard
        ):
            self._fail(step, "the connection broke")

    def _concerned(self, operation: str) -> bool:
        return operation in (GROUP if self.weather.coordinator == "group" else TRANSACTIONS)

    def _fail(self, step: Step, why: str) -> None:
        self._trace("failed", step.operation, step.process, why)
        message = f"{step.operation} on {step.subject}: {why}"
        raise TransportError(message)


class _Wire(Process):
    """A process's way to the cluster, on which a request may arrive when its sender has given up or died."""

    network: Network

    async def call(self, operation: str, subject: str, act: Callable[[], Any], limit_ms: int | None = None) -> Any:
        late_ms = self.network.late_ms(operation)
        if late_ms is None:
            return await super().call(operation, subject, act, limit_ms)
        loop = asyncio.get_running_loop()
        loop.call_later(late_ms / 1000, self._arrive, act, operation, context=contextvars.Context())
        await asyncio.sleep(0.001)
        message = f"{operation} on {subject}: no answer"
        raise TransportError(message)

    def _arrive(self, act: Callable[[], Any], operation: str) -> None:
        if self.cluster.is_up:
            self.network._trace("late", operation, self.name)
            try:
                act()
            except TransportError as error:
                self.network._trace("late_refused", operation, self.name, str(error))


class SimTransport(MemoryTransport):
    """A process's transport on the bad network."""

    def __init__(self, cluster: MemoryCluster, name: str, network: Network) -> None:
        super().__init__(cluster, name)
        self._process = _Wire(cluster, name)
        self._process.network = network
