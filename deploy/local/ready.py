"""Whether a part answers, found out by talking to it."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from deploy.local.errors import NotReady

T = TypeVar("T")
ASK_S = 5.0
POLL_S = 0.05
PROBE_ID = "forebay.local.ready"


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a thread of its own, so that it does not matter whether a loop runs here."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            outcome.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - handed on below
            failure.append(error)

    thread = threading.Thread(target=work, name="forebay-probe", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def until(probe: Callable[[], bool], limit_s: float, what: str, check: Callable[[], None] = lambda: None) -> None:
    """Ask again and again.

    Args:
        probe: Whether the part answers.
        limit_s: How long at most.
        what: The part, for the message.
        check: Raises when waiting longer makes no sense.

    Raises:
        NotReady: It did not answer in time.
    """
    deadline = time.monotonic() + limit_s
    while True:
        check()
        if probe():
            return
        if time.monotonic() >= deadline:
            message = f"{what} did not answer within {limit_s:.0f} s"
            raise NotReady(message)
        time.sleep(POLL_S)


def listens(address: str) -> bool:
    """Whether anybody takes connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ASK_S):
            return True
    except (OSError, ValueError):
        return False


def kafka_answers(address: str) -> bool:
    """Whether a broker answers a metadata request; the first of several addresses that listens is asked."""
    return any(listens(one.strip()) for one in address.split(",")) and _quietly(_metadata(address))


def transactions_work(address: str) -> bool:
    """Whether the broker begins and ends a transaction: then its coordinators are up, too."""
    return listens(address) and _quietly(_transaction(address))


def redis_answers(url: str) -> bool:
    """Whether Redis answers PING."""
    try:
        with Redis.from_url(url, socket_timeout=ASK_S, socket_connect_timeout=ASK_S, retry=Retry(NoBackoff(), 0)) as client:
            return bool(client.ping())
    except (RedisError, OSError, ValueError):
        return False


def _quietly(ask: Awaitable[None]) -> bool:
    """Ask without the client's complaints: that a part does not answer yet is no news."""

    async def bounded() -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                await ask
        except (KafkaError, OSError, TimeoutError, AssertionError):
            return False
        return True

    log = logging.getLogger("aiokafka")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return run_apart(bounded())
    finally:
        log.setLevel(level)


async def _metadata(address: str) -> None:
    client = AIOKafkaClient(bootstrap_servers=address, request_timeout_ms=int(ASK_S * 1000))
    try:
        await client.bootstrap()
    finally:
        await client.close()


async def _transaction(address: str) -> None:
    producer = AIOKafkaProducer(
        bootstrap_servers=address, transactional_id=PROBE_ID, request_timeout_ms=int(ASK_S * 1000), transaction_timeout_ms=1000
    )
    try:
        await producer.start()
        await producer.begin_transaction()
        await producer.abort_transaction()
    finally:
        with contextlib.suppress(KafkaError, OSError, TimeoutError):
            async with asyncio.timeout(ASK_S):
                await producer.stop()
