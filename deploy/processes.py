"""The long-running processes, put together: what `forebay dispatch` and `forebay work` run."""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable

from broker.transport.connect import connect
from broker.transport.protocol import Transport
from dispatcher.service import DispatcherService
from engine_consumers.errors import ENGINE_DEAD
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import RedisAsking, RedisSeenLog, StatusBoard
from memory_coordinator.board import Board
from schemas.config import Config
from schemas.errors import ConfigError

log = logging.getLogger("forebay.process")

HUNG_S = 120.0

OnStop = Callable[[Callable[[], None]], None]  # told what to call when the process is to leave in good order


async def dispatch(config: Config, on_stop: OnStop, name: str | None = None) -> int:
    """Run a dispatcher until it is stopped; gives the exit code.

    Raises:
        ConfigError: No engine is configured.
        TransportError, ConnectionError: Kafka or Redis cannot be reached, or a topic is missing.
        OffsetGone: Accepted records are not there any more.
    """
    if not config.engines:
        message = "`engines`: no engine is configured: add one as `[engines.NAME]` with `kind` and `model`"
        raise ConfigError(message)
    transport, board = connect(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
    bounds = config.dispatcher.idempotency_window_ms, config.dispatcher.idempotency_ids_max
    seen_log = RedisSeenLog(config.redis, config.kafka.topic_prefix, *bounds)
    asking = RedisAsking(config.redis, config.kafka.topic_prefix)
    relax_collector()
    try:
        await reach(transport, board)
        named = name or default_name("dispatcher")
        service = DispatcherService(config, transport, board, named, seen_log=seen_log, asking=asking)
        on_stop(service.stop)
        async with ends_if_hung(HUNG_S):
            await service.run()
    finally:
        await asking.close()
        await seen_log.close()
        await board.close()
        await transport.close()
    return 0


async def work(config: Config, engine: str, on_stop: OnStop, name: str | None = None) -> int:
    """Run a worker of an engine until it is stopped; gives the exit code, ENGINE_DEAD when the engine died.

    Raises:
        ConfigError: The engine is not configured, or wrongly.
        TransportError, ConnectionError: Kafka or Redis cannot be reached, or a topic is missing.
        EngineError: The engine does not start.
        OffsetGone: Accepted records are not there any more.
    """
    spec = config.engines.get(engine)
    if spec is None:
        known = ", ".join(sorted(config.engines)) or "none"
        message = f"`engines.{engine}`: no such engine is configured: known are {known}"
        raise ConfigError(message)
    try:
        made = load(spec)
    except ConfigError as error:
        message = f"`engines.{engine}`: {error}"
        raise ConfigError(message) from None
    transport, board = connect(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
    asking = RedisAsking(config.redis, config.kafka.topic_prefix)
    try:
        await reach(transport, board)
        worker = Worker(config, engine, made, transport, board, name or default_name(engine), asking=asking)
        on_stop(worker.stop)
        await worker.run()
    finally:
        await asking.close()
        await board.close()
        await transport.close()
    return ENGINE_DEAD if worker.engine_died else 0


@contextlib.asynccontextmanager
async def ends_if_hung(limit_s: float) -> AsyncIterator[None]:
    """End the process, with where it stood on stderr, once its event loop has not come round for so long.

    One that hangs holds its place in no group, but whoever supervises it takes it for alive; ended, it is started anew.
    """

    async def come_round() -> None:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or sys.stderr)
            await asyncio.sleep(limit_s / 10)

    rounds = asyncio.create_task(come_round())
    try:
        yield
    finally:
        rounds.cancel()
        faulthandler.cancel_dump_traceback_later()


def relax_collector() -> None:
    """Let Python's cycle collector look less often: a dispatcher holds many thousand records, and none is a cycle."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1_000)


def default_name(role: str) -> str:
    """Name a process so that it is unique in its group and tells where it runs."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


async def reach(transport: Transport, board: Board) -> None:
    """Find out that Kafka and Redis are there; each has a time limit of its own.

    Raises:
        TransportError, ConnectionError: One is not. Raised once both have ended: who is left in the middle of connecting
            leaves a connection open, and the event loop says so beside our own line.
    """
    for outcome in await asyncio.gather(transport.check(), board.check(), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def log_to_stderr(level: str) -> None:
    """Write structured lines to stderr: time, logger, level, then `action key=value ...`."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("aiokafka").setLevel(max(logging.WARNING, logging.getLogger().level))
