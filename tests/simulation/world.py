"""One run of the simulation: the cluster, the processes under their supervisor, the clients, and what goes wrong."""

import asyncio
import contextlib
import contextvars
import random
from collections.abc import Callable
from typing import Any

from msgspec import structs
from simulation.checks import ALL, Findings, check, unfinished
from simulation.network import Ambush, Loss, Network, SimTransport, Weather
from simulation.processes import Fate, ProcessLoop
from simulation.scenario import EPOCH_MS, Asked, Fault, Scenario

from broker.requests import cancelling
from broker.transport.errors import OffsetGone, TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.memory.log import PartitionLog
from broker.transport.protocol import Outgoing, Record
from dispatcher.service import DispatcherService
from engine_consumers.engine import Piece
from engine_consumers.sim import SimEngine
from engine_consumers.worker import Worker
from memory_coordinator import MemoryBoard
from memory_coordinator.seen import MemorySeenLog
from schemas.topics import Topics

LIMIT_MS = 30_000  # after the healing: what is not answered by then is lost
LOOK_S = 0.04


class Redis:
    """Whether it is there."""

    is_gone = False

    def must_be_there(self) -> None:
        if self.is_gone:
            message = "Redis is gone"
            raise ConnectionError(message)


class SimBoard(MemoryBoard):
    """A board on that Redis."""

    def __init__(self, redis: Redis) -> None:
        super().__init__()
        self._redis = redis

    async def write(self, status, heartbeat_ms):
        self._redis.must_be_there()
        await super().write(status, heartbeat_ms)

    async def remove(self, pool, worker):
        self._redis.must_be_there()
        await super().remove(pool, worker)

    async def read(self):
        self._redis.must_be_there()
        return await super().read()


class SimSeenLog(MemorySeenLog):
    """The requests seen lately, on that Redis."""

    def __init__(self, redis: Redis, window_ms: int, ids_max: int) -> None:
        super().__init__(window_ms, ids_max)
        self._redis = redis

    async def write(self, batch):
        self._redis.must_be_there()
        await super().write(batch)

    async def read(self):
        self._redis.must_be_there()
        return await super().read()

    async def replace(self, batches):
        self._redis.must_be_there()
        await super().replace(batches)


class ChaosEngine(SimEngine):
    """A sim engine that can be slow, hang, die, and kill its process."""

    def __init__(self, config, kill: Callable[[], None]) -> None:
        super().__init__(config, kill)
        self._whole = self._options
        self._stuck: set[Any] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def open_runs(self) -> int:
        return len(self._runs)

    def slow_down(self, factor: float) -> None:
        whole = self._whole
        self._options = structs.replace(whole, ttft_ms=whole.ttft_ms * factor, tpot_ms=whole.tpot_ms * factor)

    def hurry(self) -> None:
        self._options = self._whole

    def lose_runs(self) -> None:
        """What runs now never gives anything again."""
        self._stuck = set(self._runs.states())

    def hang(self) -> None:
        """It does nothing any more, not even end a run."""
        self._flows.clear()

    async def _step(self, state) -> Piece:
        if state in self._stuck:
            await asyncio.get_running_loop().create_future()
        while not self._flows.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self._flows.wait()
        return await super()._step(state)


class Host:
    """Where one process runs, and runs again after it has ended."""

    def __init__(self, name: str, engine: str | None) -> None:
        self.name, self.engine_name = name, engine
        self.starts = 0
        self.clock_ms = 0  # how wrong its clock is
        self.comes_back = True
        self.fate: Fate | None = None
        self.transport: SimTransport | None = None
        self.program: DispatcherService | Worker | None = None
        self.engine: ChaosEngine | None = None

    @property
    def lives(self) -> bool:
        return self.fate is not None and not self.fate.is_dead


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, trace: Callable[..., None]) -> None:
        self._scenario, self._config, self._trace = scenario, scenario.config, trace
        self._loop: ProcessLoop = asyncio.get_running_loop()
        self._dice = random.Random(f"{scenario.seed}/world")
        self._nobody = contextvars.Context()
        self.network = Network(scenario.seed, trace)
        self.cluster = MemoryCluster(
            self._config.kafka, clock=lambda: EPOCH_MS / 1000 + self._loop.time(), notice_ms=self.network.notice_ms
        )
        self.redis = Redis()
        self.board = SimBoard(self.redis)
        bounds = self._config.dispatcher.idempotency_window_ms, self._config.dispatcher.idempotency_ids_max
        self.seen_log = SimSeenLog(self.redis, *bounds)
        self.topics = Topics(self._config.kafka.topic_prefix)
        self.hosts: dict[str, Host] = {}
        self._client = SimTransport(self.cluster, "client", self.network)
        self._sending = 0
        self._acknowledged: list[tuple[str, int, int]] = []
        self._alarms: list[str] = []
        self._trimmed: dict[str, list[Record]] = {}

    async def run(self) -> Findings:
        """Let it all happen, heal what is broken, wait until everything is answered, and check."""
        scenario = self._scenario
        admin = await MemoryTransport(self.cluster, "admin").admin()
        await admin.ensure(self.topics.specs(self._config.topics, self._config.pools), 1, 1)
        for topic in self.cluster.topics.values():
            for log in topic.logs:
                self._remember_trimmed(log)
        self.cluster.hook = self.network.hook
        for number in range(scenario.dispatchers):
            self._start(self._host(f"d{number}", None))
        for number, engine in enumerate(scenario.workers):
            self._start(self._host(f"w{number}", engine))
        self._sending = len(scenario.asked) + len(scenario.cancels)
        for asked in scenario.asked:
            self.later(asked.at_ms, self._ask, asked)
        for at_ms, cancel in scenario.cancels:
            self.later(at_ms, self._send_later, cancelling(cancel.id, cancel.tenant, cancel.batch, self.topics))
        for fault in scenario.faults:
            self.later(fault.at_ms, self._befall, fault)
        await asyncio.sleep(scenario.heal_ms / 1000)
        self._heal()
        until = self._loop.time() + LIMIT_MS / 1000
        while not self._is_quiet() and self._loop.time() < until:  # noqa: ASYNC110 - all of the run, by looking at its logs
            await asyncio.sleep(LOOK_S)
        return check(self, self._acknowledged, self._alarms)

    def read(self, topic: str) -> list[Record]:
        """Give all committed records that a topic ever held."""
        there = [record for log in self.cluster.logs(topic) for record in log.read(log.first, ALL)[0]]
        return [*self._trimmed.get(topic, ()), *there]

    def _remember_trimmed(self, log: PartitionLog) -> None:
        trim = log.trim

        def keep(before: int) -> None:
            gone = [record for record in log.read(log.first, ALL)[0] if record.offset < before]
            self._trimmed.setdefault(log.tp.topic, []).extend(gone)
            trim(before)

        log.trim = keep  # type: ignore[method-assign]

    def alarm(self, what: str) -> None:
        """Note what must never happen."""
        self._trace("alarm", what)
        self._alarms.append(what)

    def later(self, delay_ms: float, act: Callable[..., None], *args: Any) -> None:
        """Do something that is no process's doing."""
        self._loop.call_later(delay_ms / 1000, act, *args, context=self._nobody)

    @property
    def open_runs(self) -> dict[str, int]:
        """Runs that are open on engines of processes that live."""
        return {
            h.name: h.engine.open_runs for h in self.hosts.values() if h.lives and h.engine is not None and h.engine.open_runs
        }

    def _is_quiet(self) -> bool:
        return not (self._sending or self.open_runs or any(unfinished(self.cluster, self._config)))

    # -- clients ---------------------------------------------------------------------------------------------------

    def _ask(self, asked: Asked) -> None:
        request, topic = asked.request, self.topics.requests(asked.service_class)
        self._send_later(Outgoing(topic, asked.value, request.id.encode() if request.id else None))

    def _send_later(self, outgoing: Outgoing) -> None:
        self._loop.create_task(self._send(outgoing), context=contextvars.Context())

    async def _send(self, outgoing: Outgoing) -> None:
        try:
            producer = await self._client.producer()
            place = await (await producer.send(outgoing))
            self._acknowledged.append((outgoing.topic, *place))
        except TransportError as error:
            self._trace("not_acknowledged", outgoing.value, str(error))
        self._sending -= 1

    # -- processes ---------------------------------------------------------------------------------------------------

    def _host(self, name: str, engine: str | None) -> Host:
        host = self.hosts[name] = Host(name, engine)
        return host

    def _start(self, host: Host) -> None:
        host.starts += 1
        name = f"{host.name}.{host.starts}"
        self._trace("start", name)
        fate = host.fate = Fate(name, self._loop)
        transport = host.transport = SimTransport(self.cluster, name, self.network)

        def clock() -> int:
            return EPOCH_MS + int(self._loop.time() * 1000) + host.clock_ms

        if host.engine_name is None:
            host.program = DispatcherService(self._config, transport, self.board, name, clock=clock, seen_log=self.seen_log)
        else:
            spec = self._config.engines[host.engine_name]
            host.engine = ChaosEngine(spec, lambda: self._kill(host))
            host.program = Worker(self._config, host.engine_name, host.engine, transport, self.board, name, clock=clock)
        task = fate.spawn(host.program.run())
        task.add_done_callback(lambda task: self._ended(host, fate, task), context=self._nobody)

    def _ended(self, host: Host, fate: Fate, task: "asyncio.Task[None]") -> None:
        """A process came to its end by itself."""
        error = task.exception()
        self._trace("end", fate.name, repr(error))
        if error is not None and (isinstance(error, OffsetGone) or not isinstance(error, TransportError | OSError)):
            self.alarm(f"{fate.name} ended with {error!r}")
        elif error is None and host.engine is not None and host.engine.open_runs:
            self.alarm(f"{fate.name} left with {host.engine.open_runs} runs open")
        self._gone(host, fate)

    def _kill(self, host: Host) -> None:
        if host.lives:
            self._trace("kill", host.fate.name)
            self._gone(host, host.fate)

    def _gone(self, host: Host, fate: Fate) -> None:
        fate.kill()
        host.transport.kill()
        if host.comes_back:
            self.later(self._dice.choice((50, 200, 800)), self._start, host)

    def _pause(self, host: Host, length_ms: int) -> None:
        if not host.lives or host.fate.is_stopped:
            return
        fate, transport = host.fate, host.transport
        self._trace("pause", fate.name, length_ms)
        fate.stop()
        transport.freeze()
        self.later(length_ms, self._resume, fate, transport, self._dice.choice((0.0, 30.0, 100.0)))

    def _resume(self, fate: Fate, transport: SimTransport, heartbeat_ms: float) -> None:
        if fate.is_dead or not fate.is_stopped:
            return
        self._trace("resume", fate.name)
        fate.go_on()
        self._loop.call_later(heartbeat_ms / 1000, transport.thaw, context=fate.context)  # it hears of its fate a little later

    # -- faults ------------------------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        self._trace("fault", fault.kind, fault.victim, fault.length_ms, *fault.options.items())
        host = self.hosts.get(fault.victim)
        getattr(self, f"_{fault.kind}_fault")(host, fault.length_ms, **fault.options)

    def _kill_fault(self, host: Host, _: int, after: int) -> None:
        if host.lives:
            host.fate.strike(after, lambda: self._kill(host))

    def _pause_fault(self, host: Host, length_ms: int, after: int) -> None:
        if host.lives:
            host.fate.strike(after, lambda: self._pause(host, length_ms))

    def _kill_at_fault(self, host: Host, _: int, operation: str, moment: str, nth: int) -> None:
        if host.lives:
            self.network.ambushes.append(Ambush(host.fate.name, operation, moment, nth, lambda: self._kill(host)))

    def _pause_at_fault(self, host: Host, length_ms: int, operation: str, moment: str, nth: int) -> None:
        if host.lives:
            act = lambda: self._pause(host, length_ms)  # noqa: E731
            self.network.ambushes.append(Ambush(host.fate.name, operation, moment, nth, act))

    def _flaky_fault(self, _: Host, length_ms: int, lost: float, unheard: float, late: float) -> None:
        self._change_weather(length_ms, lost=lost, unheard=unheard, late=late)

    def _lose_at_fault(self, _: Host | None, __: int, operation: str, moment: str, times: int, every: int) -> None:
        self.network.losses.append(Loss(operation, moment, times, every))

    def _slow_fault(self, _: Host, length_ms: int, share: float, delay_ms: float) -> None:
        self._change_weather(length_ms, slow=share, slow_ms=delay_ms)

    def _coordinator_fault(self, _: Host, length_ms: int, of: str, share: float) -> None:
        self._change_weather(length_ms, coordinator=of, moved=share)

    def _change_weather(self, length_ms: int, **change: Any) -> None:
        weather = self.network.weather
        before = {name: getattr(Weather, name) for name in change}
        for name, value in change.items():
            setattr(weather, name, value)
        self.later(length_ms, lambda: [setattr(weather, name, value) for name, value in before.items()])

    def _broker_down_fault(self, _: Host, length_ms: int) -> None:
        self.cluster.stop()
        self.later(length_ms, self.cluster.start)

    def _come_fault(self, _: Host, length_ms: int) -> None:
        engine = self._scenario.workers[0]
        host = self._host(f"x{len(self.hosts)}", engine)
        self._start(host)

        def leave() -> None:
            host.comes_back = False
            self._stop(host)

        self.later(length_ms, leave)

    def _leave_fault(self, host: Host, _: int) -> None:
        self._stop(host)

    def _stop(self, host: Host) -> None:
        if host.lives:
            self._trace("stop", host.fate.name)
            host.fate.context.run(host.program.stop)

    def _redis_gone_fault(self, _: Host, length_ms: int) -> None:
        self.redis.is_gone = True
        self.later(length_ms, lambda: setattr(self.redis, "is_gone", False))

    def _redis_wiped_fault(self, _: Host, __: int) -> None:
        self.board.wipe()
        self.seen_log.wipe()

    def _clock_fault(self, host: Host, _: int, step_ms: int, *, everywhere: bool) -> None:
        for one in self.hosts.values() if everywhere else [host]:
            one.clock_ms += step_ms

    def _engine_slow_fault(self, host: Host, length_ms: int, factor: float) -> None:
        engine = host.engine
        engine.slow_down(factor)
        self.later(length_ms, engine.hurry)

    def _engine_loses_fault(self, host: Host, _: int) -> None:
        host.engine.lose_runs()

    def _engine_hangs_fault(self, host: Host, _: int) -> None:
        host.engine.hang()

    def _scale_down_fault(self, host: Host, _: int, *, dies: bool) -> None:
        """One worker fewer, for good; one of each engine stays."""
        left = [h for h in self.hosts.values() if h.comes_back and h.engine_name == host.engine_name and h.name[0] == "w"]
        if host.lives and len(left) > 1:
            host.comes_back = False
            if dies:
                host.fate.context.run(host.engine.kill)
            else:
                self._kill(host)

    def _engine_dies_fault(self, host: Host, _: int) -> None:
        if host.lives:
            host.fate.context.run(host.engine.kill)

    def _pool_goes_fault(self, _: Host, __: int) -> None:
        """Every worker of the second engine goes for good; where there is no second, the first one's come back as ever."""
        last = self._scenario.workers[-1]
        if last != self._scenario.workers[0]:
            for host in [host for host in self.hosts.values() if host.engine_name == last]:
                host.comes_back = False
                self._kill(host)

    def _heal(self) -> None:
        """Nothing goes wrong any more."""
        self._trace("heal")
        self.network.weather.__init__()
        self.network.ambushes.clear()
        self.network.losses.clear()
        self.cluster.start()
        self.redis.is_gone = False
        for host in self.hosts.values():
            if host.engine is not None:
                host.engine.hurry()
            if host.lives and host.fate.is_stopped:
                self._resume(host.fate, host.transport, 0.0)
