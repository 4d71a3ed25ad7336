"""The process that owns a stack: starts its programs in order, starts dead ones again, stops them in reverse.

    python -P -m deploy.local.supervisor     with the plan on standard input

It lives until SIGTERM or `forebay local down`. Should it be killed, every guard sees its pipe close and ends its program.
"""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace
from redis.exceptions import RedisError

from deploy.local import guard, ready
from deploy.local.brokers import VALKEY
from deploy.local.errors import LocalStackError, NotReady
from deploy.local.home import Home, Phase, ProgramState
from deploy.local.plan import Plan, worker_name
from deploy.local.program import Program, Running
from deploy.local.restarts import Restarts
from memory_coordinator import StatusBoard
from schemas.config import Config, load_config
from schemas.errors import ConfigError
from schemas.messages import EngineStatus

log = logging.getLogger("forebay.supervisor")

TICK_S = 0.1
SERVICE_S = 120.0  # for a broker with data to come up
GIVEN_S = 10.0  # for one that should be there already
GIVEN_HINT = ": mend the address given with --{}, or leave it out and one is started here"
TOPICS_S = 120.0
STATUS_S = 0.5  # between two looks at the workers' status
START_ENDS_MAX = 4  # a program that ends so often before the stack is up will not come up
LOG_TAIL_BYTES = 8_192


class Stopped(Exception):
    """Asked to stop."""


class Child:
    """One program over all its starts."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.running: Running | None = None
        self.restarts = Restarts()
        self.last_exit: int | None = None
        self._started_s = 0.0
        self._due_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Start it when it is due, and note its end; gives whether anything changed."""
        if self.running is None:
            if now_s < self._due_s:
                return False
            self.running, self._started_s = Running(self.program), now_s
            log.info("program_started name=%s pid=%d", self.program.name, self.running.pid)
            return True
        code = self.running.exit_code
        if code is None:
            return False
        pause_s = self.restarts.ended(now_s - self._started_s)
        self.running, self.last_exit, self._due_s = None, code, now_s + pause_s
        log.warning("program_ended name=%s status=%d again_in_s=%.1f", self.program.name, code, pause_s)
        return True

    @property
    def state(self) -> ProgramState:
        """What is told of it."""
        running = self.running
        return ProgramState(
            name=self.program.name,
            log=self.program.log,
            pid=running.pid if running else None,
            guard_pid=running.guard_pid if running else None,
            restarts=self.restarts.count,
            last_exit=self.last_exit,
        )


class Supervisor:
    """Runs a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._home = plan, Home(Path(plan.home))
        self._stages: list[list[Child]] = []
        self._passing: list[Running] = []  # what is run once, beside the stages
        self._state = plan.state(os.getpid())
        self._is_up = self._stopping = False

    def run(self) -> int:
        """Run until asked to stop; gives the exit code."""
        self._tell("starting")
        guard.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        phase: Phase = "stopped"
        try:
            self._bring_up()
            self._is_up = True
            self._tell("running")
            log.info("stack_up kafka=%s redis=%s", self._plan.kafka, self._plan.redis)
            while True:
                self._tick()
        except Stopped:
            log.info("stack_stopping")
        except (LocalStackError, ConfigError) as error:
            log.critical("stack_failed error=%s", error)
            phase = "failed"
            self._state = replace(self._state, error=str(error))
        finally:
            self._take_down(phase)
        return int(phase == "failed")

    def _bring_up(self) -> None:
        plan, config = self._plan, load_config(self._home.config, os.environ)
        for stage in plan.services:
            self._start(stage)
        probe = ready.transactions_work if plan.broker == "kafka" else ready.kafka_answers
        own_redis = any(program.name == VALKEY for stage in plan.services for program in stage)
        kafka, redis = f"Kafka at {plan.kafka}", f"Redis at {plan.redis}"
        if plan.broker != "given":
            self._await(lambda: probe(plan.kafka), SERVICE_S, kafka)
        else:
            self._await(lambda: probe(plan.kafka), GIVEN_S, kafka, GIVEN_HINT.format("kafka"))
        if own_redis:
            self._await(lambda: ready.redis_answers(plan.redis), SERVICE_S, redis)
        else:
            self._await(lambda: ready.redis_answers(plan.redis), GIVEN_S, redis, GIVEN_HINT.format("redis"))
        self._ensure_topics()
        self._start(plan.processes)
        self._await(_Workers(config, plan, self._pids).answer, None, "the engines")

    def _start(self, programs: list[Program]) -> None:
        self._stages.append([Child(program) for program in programs])
        self._tick()

    def _await(self, probe: Callable[[], bool], limit_s: float | None, what: str, hint: str = "") -> None:
        """Wait for a part while all others are looked after; without a limit `up` is who gives up."""
        self._tell("starting", what)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not probe():
            self._tick()
            if deadline is not None and time.monotonic() >= deadline:
                message = f"{what} does not answer within {limit_s:.0f} s{hint}"
                raise NotReady(message)

    def _ensure_topics(self) -> None:
        self._tell("starting", "the topics")
        running = Running(self._plan.ensure)
        self._passing = [running]
        try:
            deadline = time.monotonic() + TOPICS_S
            while (code := running.exit_code) is None and time.monotonic() < deadline:
                self._tick()
        finally:
            running.stop()
            self._passing = []
        if code != 0:
            message = f"the topics could not be made: {last_line(self._plan.ensure.log)}"
            raise NotReady(message)

    def _tick(self) -> None:
        if self._stopping:
            raise Stopped
        now_s = time.monotonic()
        changed = False
        for child in self._children:
            if child.tick(now_s):
                changed = True
                if not self._is_up and child.restarts.in_a_row >= START_ENDS_MAX:
                    message = f"{child.program.name} ends again and again: {last_line(child.program.log)}"
                    raise NotReady(message)
        guards = self._guards
        if changed:
            self._sweep(guards)
        guard.reap_adopted(guards)
        if changed:
            self._tell(self._state.phase, self._state.waits_for)
        time.sleep(TICK_S)

    def _sweep(self, guards: set[int]) -> None:
        """End what a killed guard left: it became ours. Every child that is no guard is such a one."""
        mine = guard.descendants(os.getpid())
        kept = guards.union(*(guard.descendants(pid) for pid in guards))
        for pid in mine - kept:
            log.warning("orphan_killed pid=%d", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _take_down(self, phase: Phase) -> None:
        self._tell("stopping")
        for stage in reversed(self._stages):
            running = [child.running for child in stage if child.running]
            for one in running:
                one.end()
            for one in running:
                one.stop()
            for child in stage:
                child.running = None
        self._tell(phase)
        log.info("stack_down phase=%s", phase)

    def _tell(self, phase: Phase, waits_for: str = "") -> None:
        programs = [child.state for child in self._children]
        self._state = replace(self._state, phase=phase, waits_for=waits_for, programs=programs)
        try:
            self._home.write_state(self._state)
        except OSError as error:  # a full disk must not end the stack
            log.error("state_not_written error=%s", error)  # noqa: TRY400 - the line says it all

    def _pids(self) -> dict[str, int | None]:
        return {child.program.name: child.running.pid if child.running else None for child in self._children}

    @property
    def _guards(self) -> set[int]:
        running = [child.running for child in self._children if child.running]
        return {one.guard_pid for one in [*running, *self._passing]}

    @property
    def _children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def _on_signal(self, *_: object) -> None:
        self._stopping = True


class _Workers:
    """Whether every worker says of itself that it is well."""

    def __init__(self, config: Config, plan: Plan, pids: Callable[[], dict[str, int | None]]) -> None:
        self._config, self._plan, self._pids = config, plan, pids
        self._next_s = 0.0

    def answer(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + STATUS_S
        pids = self._pids()
        if pids["dispatcher"] is None:
            return False
        well = {(status.engine, status.worker) for status in read_statuses(self._config) if status.is_healthy}
        return all(
            (pid := pids[program]) is not None and (engine, worker_name(engine, pid)) in well
            for engine, programs in self._plan.engines.items()
            for program in programs
        )


def read_statuses(config: Config) -> list[EngineStatus]:
    """Read what the workers say of themselves; nothing where Redis does not answer."""

    async def read() -> list[EngineStatus]:
        board = StatusBoard(config.redis, config.kafka.topic_prefix)
        try:
            return await board.read()
        finally:
            await board.close()

    try:
        return ready.run_apart(read())
    except (RedisError, OSError):
        return []


def last_line(path: str) -> str:
    """The last words in a log, and where it is."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return f"{lines[-1].strip() if lines else 'it said nothing'} (log: {path})"


def main() -> int:
    """Read the plan, take the home's lock, and run the plan in the background.

    Whoever started this waits for the foreground part only, and never has to wait for the supervisor as its child.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    try:
        held = Home(Path(plan.home)).take_lock()
    except LocalStackError as error:
        log.critical("not_started error=%s", error)
        return 1
    with held:  # the lock goes on with the child
        if os.fork():
            return 0
        held.write(f"{os.getpid()}\n")
        held.flush()
        return Supervisor(plan).run()


if __name__ == "__main__":
    sys.exit(main())
