"""The whole stack: up, down, status. What the command line does, for programs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from deploy.local.cache import locked
from deploy.local.errors import BrokenState, LocalStackError, NotReady, NotRunning, OtherStack
from deploy.local.home import Home, State, home_path
from deploy.local.plan import Plan, Report, Wanted, make_plan, worker_name
from deploy.local.supervisor import last_line, read_statuses
from memory_coordinator import StatusBoard
from schemas.addresses import REDIS_PORT, check_bootstrap, check_redis_url
from schemas.config import Config, RedisConfig, load_config
from schemas.errors import ConfigError

UP_S = 600.0  # a model on a busy machine
DOWN_S = 120.0
UP_LOCK_S = 900.0
SPAWN_S = 60.0
LEFTOVERS_S = 30.0
POLL_S = 0.1
REACH_S = 5.0
LOG_BYTES_MAX = 8 * 2**20


def up(
    home: Path | None = None, wanted: Wanted | None = None, *, limit_s: float = UP_S, report: Report = lambda _: None
) -> dict[str, Any]:
    """Start a stack, and wait until all of it answers. Where one runs already as it is wanted, nothing is changed.

    Args:
        home: Its folder; see `home_path`.
        wanted: Engines, addresses that are there already, and so on.
        limit_s: How long its parts may take to answer; fetching them is not counted.
        report: Is told of each step in one line.

    Returns:
        What `status` gives.

    Raises:
        ConfigError: The configuration or an engine's name is wrong.
        OtherStack: One runs already and is not what is wanted; it goes on.
        BrokenState: One runs already, and what it says of itself cannot be read.
        LocalStackError: A part cannot be had, or does not answer; then nothing is left running.
    """
    place = Home(home_path(home))
    place.make()
    with locked(place.up_lock, UP_LOCK_S):
        _must_be_addresses(wanted or Wanted())
        if place.is_supervised():
            state = _wait_up(place, limit_s, report)
            _must_be_as(state, wanted or Wanted())
            report(f"a stack runs already in {place.root}, with {_told(state)}; `forebay local down` first to change it")
            return status(place.root)
        with locked(place.guards_lock, LEFTOVERS_S):
            pass  # what an earlier, killed supervisor left has ended
        _must_reach_redis(wanted or Wanted())
        plan = make_plan(place, wanted or Wanted(), _last(place, report), report)
        for note in plan.notes:
            report(note)
        place.state.unlink(missing_ok=True)
        try:
            _spawn(place, plan)
            _wait_up(place, limit_s, report)
        except BaseException:
            _stop(place, DOWN_S)
            raise
    return status(place.root)


def down(home: Path | None = None, *, limit_s: float = DOWN_S) -> bool:
    """Stop a stack in good order; its data stays.

    Returns:
        Whether one ran.

    Raises:
        LocalStackError: It does not stop within `limit_s`.
    """
    place = Home(home_path(home))
    if not place.is_supervised():
        return False
    _stop(place, limit_s)
    return True


def status(home: Path | None = None) -> dict[str, Any]:
    """Tell what runs: addresses, delivery, engines with their workers, and the programs behind them.

    Raises:
        NotRunning: Nothing runs in this home.
        BrokenState: What the stack says of itself cannot be read.
        ConfigError: The configuration was made unreadable since.
    """
    place = Home(home_path(home))
    state = place.read_state() if place.is_supervised() else None
    if state is None:
        message = f"no stack runs in {place.root}: `forebay local up` starts one"
        raise NotRunning(message)
    config = load_config(place.config, os.environ)
    return {
        "kafka": state.kafka,
        "redis": state.redis,
        "delivery": state.delivery,
        "engines": _engines(state, config),
        "home": state.home,
        "broker": state.broker,
        "phase": state.phase,
        "config": str(place.config),
        "notes": state.notes,
        "programs": [msgspec.to_builtins(program) for program in state.programs],
    }


def _must_be_addresses(wanted: Wanted) -> None:
    """Refuse an address that cannot be one before it is written into the configuration."""
    for option, variable, given, check in (
        ("--kafka", "FOREBAY_KAFKA__BOOTSTRAP", wanted.kafka, check_bootstrap),
        ("--redis", "FOREBAY_REDIS__URL", wanted.redis, check_redis_url),
    ):
        address = given if given is not None else os.environ.get(variable) or None
        try:
            if address is not None:
                check(address)
        except ValueError as error:
            message = f"{variable if given is None else option}: {error}"
            raise ConfigError(message) from None
    redis = wanted.redis or os.environ.get("FOREBAY_REDIS__URL")
    if redis:
        StatusBoard(RedisConfig(url=redis), "check")


def _must_reach_redis(wanted: Wanted) -> None:
    """Refuse a Redis that was given and is not there before anything is started, as that takes longer."""
    given = wanted.redis or os.environ.get("FOREBAY_REDIS__URL")
    if not given:
        return
    parts = urlsplit(given)
    if not parts.hostname:  # a socket in the file system
        return
    address = parts.hostname, parts.port or REDIS_PORT
    try:
        socket.create_connection(address, REACH_S).close()
    except OSError as error:
        message = f"cannot reach Redis at {address[0]}:{address[1]} ({error}): start it, or leave out --redis to have one started"
        raise NotReady(message) from None


def _engines(state: State, config: Config) -> list[dict[str, Any]]:
    known = {(one.engine, one.worker): one for one in read_statuses(config)}
    programs = {program.name: program for program in state.programs}
    engines = []
    for name, wanted in state.engines.items():
        engine = config.engines[name]
        workers = []
        for program_name in wanted:
            program = programs.get(program_name)
            pid = program.pid if program else None
            worker = worker_name(name, pid) if pid else program_name
            said = known.get((name, worker)) if pid else None
            workers.append(
                {
                    "worker": worker,
                    "pid": pid,
                    "is_healthy": said is not None and said.is_healthy,
                    "slots": said.slots if said else engine.slots,
                    "running": said.running if said else 0,
                    "restarts": program.restarts if program else 0,
                }
            )
        pool = config.pool(name)
        engines.append({"name": name, "kind": engine.kind, "pool": pool, "model": engine.model, "workers": workers})
    return engines


def _spawn(place: Home, plan: Plan) -> None:
    """Start the supervisor; when this returns it holds the home's lock."""
    log = place.logs / "supervisor.log"
    if log.exists() and log.stat().st_size > LOG_BYTES_MAX:
        log.replace(log.with_name(log.name + ".1"))
    try:
        with log.open("ab") as out:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "deploy.local.supervisor"],
                input=msgspec.json.encode(plan),
                stdout=out,
                stderr=out,
                cwd=place.root,
                env={name: value for name, value in os.environ.items() if name not in plan.ensure.unset},
                start_new_session=True,
                timeout=SPAWN_S,
                check=False,
            )
    except (subprocess.TimeoutExpired, OSError) as error:
        message = f"the supervisor does not start: {error}"
        raise NotReady(message) from None
    if done.returncode:
        message = f"the supervisor does not start: {last_line(str(log))}"
        raise NotReady(message)


def _wait_up(place: Home, limit_s: float, report: Report) -> State:
    deadline = time.monotonic() + limit_s
    said = ""
    while True:
        gone = not place.is_supervised()  # asked first: what it said last is read after its end
        state = place.read_state()
        if state is not None and state.phase == "running" and not gone:
            return state
        if state is not None and state.phase == "starting" and state.waits_for not in {"", said}:
            said = state.waits_for
            report(f"waiting for {said}")
        if gone:
            message = (state.error if state else None) or f"the supervisor ended: {last_line(str(place.logs / 'supervisor.log'))}"
            raise NotReady(message)
        if time.monotonic() >= deadline:
            message = f"{said or 'the stack'} did not answer within {limit_s:.0f} s: see the logs in {place.logs}"
            raise NotReady(message)
        time.sleep(POLL_S)


def _stop(place: Home, limit_s: float) -> None:
    """Ask the supervisor to stop everything, and wait for it; what it holds while it lives is its lock."""
    deadline = time.monotonic() + limit_s
    is_asked = False
    while place.is_supervised():
        pid = _supervisor(place)
        if pid is not None and not is_asked:
            is_asked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() >= deadline:
            message = f"the stack in {place.root} does not stop within {limit_s:.0f} s: see {place.logs / 'supervisor.log'}"
            raise LocalStackError(message)
        time.sleep(POLL_S)


def _supervisor(place: Home) -> int | None:
    """The pid of the living supervisor, as soon as it has said it: in its state or, where that is broken, in its lock.

    Raises:
        BrokenState: It stands in neither.
    """
    try:
        state = place.read_state()
    except BrokenState:
        pid = place.supervisor_pid()
        if pid is None:
            raise
        return pid
    return None if state is None else state.pid


def _last(place: Home, report: Report) -> State | None:
    """What the stack that ran here last said of itself; only its ports and its broker's kind are lost with it."""
    try:
        return place.read_state()
    except BrokenState:
        report(f"{place.state} is broken: beginning without it")
        return None


def _must_be_as(state: State, wanted: Wanted) -> None:
    """Refuse what a running stack does not have.

    Raises:
        OtherStack: Naming what runs, what was asked for, and how to change it.
    """
    differs = [f"not the engine {name}" for name in dict.fromkeys(wanted.engines) if name not in state.engines]
    if wanted.workers is not None:
        named = [name for name in wanted.engines or state.engines if name in state.engines]
        differs += [f"not {wanted.workers} workers of {name}" for name in named if len(state.engines[name]) != wanted.workers]
    if wanted.kafka is not None and wanted.kafka != state.kafka:
        differs.append(f"not Kafka at {wanted.kafka} but at {state.kafka}")
    if wanted.redis is not None and wanted.redis != state.redis:
        differs.append("not the Redis given")
    if wanted.broker not in {"auto", state.broker}:
        differs.append(f"not the broker {wanted.broker} but {state.broker}")
    if differs:
        message = (
            f"a stack runs already in {state.home}, with {_told(state)}, and {', '.join(differs)}: "
            "`forebay local down` first, then `forebay local up` with everything that you want"
        )
        raise OtherStack(message)


def _told(state: State) -> str:
    names = ", ".join(f"{name} ({len(workers)})" for name, workers in state.engines.items())
    return f"the engines {names}" if names else "no engines"
