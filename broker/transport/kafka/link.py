"""How every aiokafka object is made, started, bounded and let go, and how its errors become ours."""

# ruff: noqa: SLF001 - the library is pinned, and its inner workings are the point here

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import (
    InvalidProducerEpoch,
    InvalidProducerIdMapping,
    InvalidTxnState,
    KafkaConnectionError,
    KafkaError,
    MessageSizeTooLargeError,
    ProducerClosed,
    ProducerFenced,
    UnknownTopicOrPartitionError,
)
from aiokafka.helpers import create_ssl_context

from broker.transport.errors import Fenced, NoSuchTopic, TooLarge, TransportError
from broker.transport.kafka.noise import quieten
from broker.transport.unreachable import unreachable
from schemas.config import KafkaConfig
from schemas.errors import ConfigError

log = logging.getLogger("forebay.kafka")

METADATA_AGE_MS = 30_000  # after which new partitions are seen
CONNECT_RETRY_S = 0.2
CLOSE_S = 5.0
_FORCE_S = 1.0
_CANCEL_S = 0.05
_CANCELS_MAX = 40

_FENCED = (ProducerFenced, InvalidProducerEpoch, InvalidTxnState, InvalidProducerIdMapping)
_FAULTS = (KafkaError, OSError, AssertionError, asyncio.InvalidStateError)  # the library asserts where it was outrun


def client_settings(config: KafkaConfig) -> dict[str, Any]:
    """Give the keyword arguments that all aiokafka classes share.

    Raises:
        ConfigError: A certificate file cannot be read.
    """
    settings: dict[str, Any] = {
        "bootstrap_servers": config.bootstrap,
        "request_timeout_ms": config.request_timeout_ms,
        "metadata_max_age_ms": METADATA_AGE_MS,
        "security_protocol": config.security_protocol,
    }
    if "SSL" in config.security_protocol:
        try:
            settings["ssl_context"] = create_ssl_context(cafile=config.ssl_cafile)
        except OSError as error:
            message = f"kafka.ssl_cafile: cannot read {config.ssl_cafile}: {error}"
            raise ConfigError(message) from None
    if "SASL" in config.security_protocol:
        if config.sasl_username is None or config.sasl_password is None:
            message = f"kafka.sasl_username and kafka.sasl_password: expected with {config.security_protocol}"
            raise ConfigError(message)
        settings["sasl_mechanism"] = config.sasl_mechanism
        settings["sasl_plain_username"] = config.sasl_username
        settings["sasl_plain_password"] = config.sasl_password
    return settings


async def bootstrap(client: AIOKafkaClient, config: KafkaConfig) -> None:
    """Reach the cluster, trying again until the connect time-out.

    Raises:
        Unreachable: With the address and what to do.
    """
    quiet = quieten()
    quiet.last_reason = ""
    _pace(client)
    try:
        async with asyncio.timeout(config.connect_timeout_ms / 1000):
            while not await _bootstrapped(client):  # noqa: ASYNC110 - nothing tells when a broker comes up
                await asyncio.sleep(CONNECT_RETRY_S)
    except TimeoutError:
        raise unreachable(config, quiet.last_reason) from None


def _pace(client: AIOKafkaClient) -> None:
    """Let a client wait after each connection that failed.

    The library tries again at once, and our transactions' short backoff makes that some hundred times a second for each
    of a process's outboxes: together they keep a machine busy while its broker is away, and the broker from starting.
    """
    connect = client._get_conn

    async def paced(node_id: int, **more: Any) -> Any:  # noqa: ANN401 - the library's connection has no type
        found = await connect(node_id, **more)
        if found is None:
            await asyncio.sleep(CONNECT_RETRY_S)
        return found

    client._get_conn = paced


async def _bootstrapped(client: AIOKafkaClient) -> bool:
    try:
        await client.bootstrap()
    except (KafkaConnectionError, OSError):
        return False
    return True


@contextlib.asynccontextmanager
async def deadline(limit_ms: float, what: str) -> AsyncIterator[None]:
    """Bound what happens inside, and turn its errors into ours.

    Raises:
        TransportError: `what` failed or took longer than `limit_ms`.
    """
    try:
        async with asyncio.timeout(limit_ms / 1000):
            yield
    except TimeoutError:
        message = f"{what}: no answer within {limit_ms / 1000:g} s"
        raise TransportError(message) from None
    except _FAULTS as error:
        raise translate(error, what) from error


def translate(error: BaseException, what: str, index: int | None = None) -> TransportError:
    """Say an error of the library in our terms.

    Args:
        error: What was raised.
        what: What we tried to do.
        index: The record concerned, where there is one.
    """
    causes = [error] if error.__cause__ is None else [error, error.__cause__]
    for cause in causes:
        if isinstance(cause, TransportError):
            return cause
        told = f"{what}: {type(cause).__name__}: {cause}".removesuffix(": ")
        if isinstance(cause, _FENCED):
            return Fenced(told)
        if isinstance(cause, MessageSizeTooLargeError):
            return TooLarge(f"{told} (the topic's max.message.bytes is below kafka.record_bytes_max)", index)
        if isinstance(cause, UnknownTopicOrPartitionError):
            return NoSuchTopic(told, index)
    return TransportError(f"{what}: {error!r}")


def look_at(future: "asyncio.Future[Any]") -> None:
    """See to it that a failure nobody waits for any more is not logged as lost; for `add_done_callback`."""
    if not future.cancelled():
        future.exception()


async def kill(task: "asyncio.Future[Any] | None") -> None:
    """Cancel a task of the library until it is gone; its clean-up may wait for what never comes."""
    for _ in range(_CANCELS_MAX):
        if task is None or task.done():
            return
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_S)
    log.warning("task_stuck task=%s", task)


async def let_go(
    what: str,
    stop: Callable[[], Awaitable[Any]],
    client: AIOKafkaClient,
    tasks: Callable[[], Iterable["asyncio.Future[Any] | None"]],
    limit_s: float = CLOSE_S,
) -> None:
    """Stop something of the library within a bound; by force where it hangs or fails."""
    stopping = asyncio.ensure_future(stop())
    try:
        await asyncio.wait([stopping], timeout=limit_s)
        if not stopping.done():
            log.warning("stop_hung what=%s limit_s=%s", what, limit_s)
    finally:
        await kill(stopping)
        if stopping.cancelled() or stopping.exception() is not None:
            for task in tasks():
                await kill(task)
            closing = asyncio.ensure_future(client.close())
            await asyncio.wait([closing], timeout=_FORCE_S)
            await kill(closing)


async def let_go_of_producer(what: str, producer: AIOKafkaProducer, limit_s: float) -> None:
    """Stop a producer of the library within a bound; what it could not send fails."""
    ending = producer._txn_manager.wait_for_transaction_end() if producer._txn_manager is not None else None
    if ending is not None:
        ending.add_done_callback(look_at)
    await let_go(what, producer.stop, producer.client, lambda: [producer._sender.sender_task], limit_s)
    accumulator = producer._message_accumulator
    for batch in [batch for queued in accumulator._batches.values() for batch in queued]:
        accumulator._pending_batches.add(batch)  # one that was queued again is expected there once it fails
        batch._drain_waiter.add_done_callback(look_at)
    accumulator.fail_all(ProducerClosed())  # its flush would wait on in the background
