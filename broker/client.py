"""The client: sends requests, waits for their results, streams their tokens, reads results.

async with Client() as client:
    result = await client.submit("What is a forebay?", model="smollm2")
    async for item in client.stream("Say it slowly"):
        ...
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from msgspec import structs

from broker.assembly import StreamItem
from broker.discovery import discover
from broker.errors import ClientClosed, ClientTimeout
from broker.inbox import Inbox
from broker.requests import Prepared, RequestLike, cancelling, prepare, request_bytes_max
from broker.sending import Sender
from broker.steering import read_settings, steering
from broker.subscription import Start, Subscription
from broker.transport.blobs import BlobError, Blobs
from broker.transport.connect import connect
from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing, Transport
from broker.transport.settings import Settings
from broker.waiting import ResultStream, Waiter
from schemas import codecs, headers
from schemas.addresses import check_bootstrap
from schemas.config import Config
from schemas.control import Change, batch_name
from schemas.errors import ConfigError, ErrorCode, InvalidMessage
from schemas.headers import Headers
from schemas.ids import new_id
from schemas.messages import ErrorInfo, InferenceResult, ServiceClass
from schemas.topics import Topics

TIMEOUT_S = 600.0
DEADLINE_GRACE_S = 2.0  # a terminal result that says the same with more detail may be on its way
IN_FLIGHT_MAX = 1_000
CLOSED = "the client is closed: make a new one"


class Client:
    """One process's way to Forebay. Use it as an async context manager, or call `start` and `close`.

    Args:
        config: The configuration, or its file; else it is looked for as `broker.discovery.find_config` says.
        bootstrap: Kafka's address, before the configuration's.
        client_id: By its hash the partition is chosen in which this client's results come; a fresh one by default.
        content_type: How requests are written, and results with them: JSON or msgpack.
        timeout_s: How long `submit` and `stream` wait where they are not told.
        transport: A transport of one's own; it is closed with the client.
        clock: Unix time in seconds, for deadlines.

    Raises:
        ConfigError: Naming the file, the field's path and what was expected.
    """

    def __init__(
        self,
        config: Config | Path | str | None = None,
        *,
        bootstrap: str | None = None,
        client_id: str | None = None,
        content_type: str = headers.JSON,
        timeout_s: float = TIMEOUT_S,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        found = config if isinstance(config, Config) else discover(Path(config) if config else None)
        if bootstrap is not None:
            try:
                check_bootstrap(bootstrap)
            except ValueError as error:
                message = f"`bootstrap`: {error}"
                raise ConfigError(message) from None
            found = structs.replace(found, kafka=structs.replace(found.kafka, bootstrap=bootstrap))
        self.config = found
        self.topics = Topics(found.kafka.topic_prefix)
        self._client_id = client_id or new_id()
        self._content_type, self._timeout_s, self._clock = content_type, timeout_s, clock
        self._given_transport = transport
        self._blobs = Blobs(found.blobs)
        self._open: _Parts | None = None
        self._starting: asyncio.Lock | None = None
        self._closed = False

    async def start(self) -> Self:
        """Connect, where that was not done yet; every other call does so too.

        Raises:
            Unreachable: With Kafka's address and what to do.
            ClientClosed: The client was closed before.
        """
        if self._closed:
            raise ClientClosed(CLOSED)
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._open is None:
                transport = self._given_transport or connect(self.config.kafka)
                try:
                    await transport.check()
                except BaseException:
                    await transport.close()
                    raise
                self._open = _Parts(transport, Sender(transport), Inbox(transport, self.topics, self._client_id, self._blobs))
        return self

    async def close(self) -> None:
        """Let go of everything; whoever still waits gets `ClientClosed`."""
        self._closed = True
        parts, self._open = self._open, None
        if parts is not None:
            await parts.inbox.close()
            await parts.sender.close()
            await parts.transport.close()

    async def __aenter__(self) -> Self:
        """Connect."""
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go."""
        await self.close()

    # -- one request ----------------------------------------------------------------------------------------------

    async def submit(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        timeout_s: float | None = None,
        traceparent: str | None = None,
        batch: str | None = None,
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> InferenceResult:
        """Send a request and wait for its terminal result, whatever its status is.

        The id makes it idempotent: until the result has come, another call of this client with the same id, tenant and
        content, be it beside this one or after its timeout, is not run a second time but gets this one's result.

        Args:
            request: An `InferenceRequest`, a mapping of its fields, or just the prompt.
            service_class: `interactive` or `batch`.
            timeout_s: How long to wait; the client's own by default. The request's `deadline` ends the wait too, with
                a result that is `expired`.
            traceparent: Passed through to the result's headers (W3C trace context).
            batch: A name by which `cancel` takes requests together.
            fields: Fields of the request, before those of `request`.

        Raises:
            InvalidMessage: The schema refuses the request, or another one of the same id is awaited; nothing was sent.
            ClientTimeout: No result came in time; it may still come.
            TransportError: Kafka refused the request, or could not be reached.
        """
        prepared = self._prepare(request, fields)
        named = _headers(traceparent=traceparent, batch=batch)
        async with contextlib.aclosing(self._run(prepared, service_class, timeout_s, named, streams=False)) as items:
            async for item in items:
                if isinstance(item, InferenceResult):
                    return item
        message = "the wait ended without a result"
        raise ClientClosed(message)

    def stream(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        timeout_s: float | None = None,
        traceparent: str | None = None,
        batch: str | None = None,
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> ResultStream:
        """Send a request and give its tokens as they come; arguments and errors as for `submit`.

        Returns:
            An async iterator of `TokenChunk` and, rarely, `StreamRestarted`; at its end `.result` is the terminal result.
        """
        prepared = self._prepare(request, {**fields, "stream": True})
        named = _headers(traceparent=traceparent, batch=batch)
        return ResultStream(prepared.id, self._run(prepared, service_class, timeout_s, named, streams=True))

    async def send(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        result_partition: int | None = None,
        traceparent: str | None = None,
        replay: bool = False,
        batch: str | None = None,
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> str:
        """Send a request and give its id once Kafka has acknowledged it; read its result with `results`.

        An id that was sent within `dispatcher.idempotency_window_ms` is not run again: the earlier result answers it.

        Args:
            request: An `InferenceRequest`, a mapping of its fields, or just the prompt.
            service_class: `interactive` or `batch`.
            result_partition: Where the result shall come; by the id's hash by default.
            traceparent: Passed through to the result's headers.
            replay: Run it again although its id was sent before.
            batch: A name by which `cancel` takes requests together.
            fields: Fields of the request, before those of `request`.

        Raises:
            InvalidMessage: The schema refuses the request; nothing was sent.
            TransportError: Kafka refused the request, or could not be reached.
        """
        prepared = await self._checked_in(self._prepare(request, fields))
        extra = _headers(result_partition, traceparent, batch, replay=replay)
        await self.start()
        await (await self._queue(prepared, service_class, extra))
        return prepared.id

    async def send_many(
        self,
        requests: Iterable[RequestLike] | AsyncIterable[RequestLike],
        *,
        service_class: ServiceClass = "batch",
        result_partition: int | None = None,
        in_flight_max: int = IN_FLIGHT_MAX,
        replay: bool = False,
        batch: str | None = None,
    ) -> AsyncGenerator[str, None]:
        """Send many requests and give each id, in order, once Kafka has acknowledged it; ids are taken as by `send`.

        Args:
            requests: Taken in only as fast as they are acknowledged.
            service_class: `interactive` or `batch`.
            result_partition: Where the results shall come; by the ids' hashes by default.
            in_flight_max: How many may be unacknowledged.
            replay: Run them again although their ids were sent before.
            batch: A name by which `cancel` takes requests together.

        Raises:
            InvalidMessage: The schema refuses a request; those before it were sent.
            TransportError: Kafka refused a request, or could not be reached.
        """
        extra = _headers(result_partition, batch=batch, replay=replay)
        await self.start()
        pending: deque[tuple[str, asyncio.Task[None]]] = deque()
        try:
            async for request in _each(requests):
                prepared = await self._checked_in(self._prepare(request, {}))
                pending.append((prepared.id, await self._queue(prepared, service_class, extra)))
                while pending and (len(pending) >= in_flight_max or pending[0][1].done()):
                    sent, acknowledged = pending.popleft()
                    await acknowledged
                    yield sent
            while pending:
                sent, acknowledged = pending.popleft()
                await acknowledged
                yield sent
        finally:
            for _, acknowledged in pending:
                acknowledged.cancel()

    # -- cancel -----------------------------------------------------------------------------------------------------

    async def cancel(self, id: str | None = None, *, tenant: str | None = None, batch: str | None = None) -> None:  # noqa: A002
        """Cancel requests; at least one of the three is given, and what answers to all that are given is cancelled.

        Returns once Kafka has acknowledged it. Each request that had not ended by then, wherever it is, ends as
        `cancelled`, or in another way if that came first: its one result tells. What is sent later is not touched.

        Args:
            id: A request's id; alone, that of any tenant.
            tenant: Whose requests; alone, all of them.
            batch: The name given as `batch` when they were sent.

        Raises:
            InvalidMessage: Nothing is given, or a name cannot be one; nothing was cancelled.
            TransportError: Kafka refused it, or could not be reached.
        """
        record = cancelling(id, tenant, batch, self.topics)
        await self.start()
        await (await self._parts.sender.queue(record))

    # -- steering ---------------------------------------------------------------------------------------------------

    async def settings(self) -> Settings:
        """What was changed of the configuration's tenants and engines while it runs.

        Raises:
            TransportError: Kafka could not be reached, or the control topic not be read.
        """
        return await read_settings(await self._started(), self.config)

    async def steer(self, change: Change) -> Settings:
        """Change the settings of a tenant or an engine; gives all that hold once Kafka has acknowledged it.

        The active dispatcher goes by it within a second, and so does every one after it.

        Args:
            change: Made by `tenant_change` or `engine_change`.

        Raises:
            InvalidMessage: No configuration may say that, or there is no such engine; nothing was changed.
            TransportError: Kafka refused it, or could not be reached.
        """
        record = steering(change, await self.settings(), self.config)
        await (await self._parts.sender.queue(record))
        return await self.settings()

    # -- results --------------------------------------------------------------------------------------------------

    async def result_partition(self) -> int:
        """The partition of the results topic in which this client's results come."""
        await self.start()
        return await self._parts.inbox.open()

    async def result_offsets(self) -> dict[int, int]:
        """The end of each partition of the results now: what is sent after this call is answered beyond it."""
        await self.start()
        async with self.results(from_="latest", follow=False) as ends:
            return dict(ends.positions)

    def results(
        self,
        from_: Start = "latest",
        *,
        follow: bool = True,
        ids: Collection[str] | None = None,
        replays: Collection[str] | None = None,
        partitions: Collection[int] | None = None,
        timeout_s: float | None = None,
    ) -> Subscription:
        """Read results, each request's first one only, as an async iterator.

        Args:
            from_: `beginning`, `latest`, one offset for all partitions, or partition -> offset (see `positions`).
            follow: Whether to wait for those to come; else it ends at what is there when it begins.
            ids: Only these requests' results; it ends once all were given.
            replays: Only the results of what was put back from these dead letters (`partition/offset`), likewise.
            partitions: Only these partitions of the results topic.
            timeout_s: How long to wait for the next one; `TimeoutError` then. For ever by default.

        Raises:
            TransportError: From the iterator: the cluster cannot be reached, or the topic is missing.
        """
        return Subscription(
            self._started,
            self.topics.results,
            blobs=self._blobs,
            start=from_,
            follow=follow,
            ids=ids,
            replays=replays,
            partitions=partitions,
            timeout_s=timeout_s,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _started(self) -> Transport:
        await self.start()
        return self._parts.transport

    @property
    def _parts(self) -> "_Parts":
        if self._open is None:
            raise ClientClosed(CLOSED)
        return self._open

    def _prepare(self, request: RequestLike | None, fields: dict[str, Any]) -> Prepared:
        return prepare(request, fields, content_type=self._content_type, bytes_max=request_bytes_max(self.config))

    async def _checked_in(self, prepared: Prepared) -> Prepared:
        """Put an input that is too large for a record into the store."""
        if len(prepared.value) <= self.config.value_bytes_max:
            return prepared
        try:
            request = await self._blobs.shrink(prepared.request)
        except BlobError as error:
            raise (InvalidMessage if error.code is ErrorCode.INVALID_REQUEST else TransportError)(error.message) from None
        return Prepared(prepared.id, request, codecs.encode(request, self._content_type))

    async def _queue(self, prepared: Prepared, service_class: ServiceClass, extra: Headers) -> "asyncio.Task[None]":
        out = ((headers.CONTENT_TYPE, self._content_type.encode()), *extra)
        topic = self.topics.requests(service_class)
        return await self._parts.sender.queue(Outgoing(topic, prepared.value, prepared.id.encode(), out))

    async def _run(
        self,
        prepared: Prepared,
        service_class: ServiceClass,
        timeout_s: float | None,
        named: Headers,
        *,
        streams: bool,
    ) -> AsyncGenerator[StreamItem | InferenceResult, None]:
        """Give the stream's items, then the terminal result."""
        await self.start()  # has a time limit, and a message, of its own
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        deadline = prepared.request.deadline
        expires = None if deadline is None else loop.time() + deadline.timestamp() - self._clock() + DEADLINE_GRACE_S
        limit = until if expires is None else min(until, expires)
        waiter: Waiter | None = None
        inbox: Inbox | None = None
        try:
            async with asyncio.timeout_at(limit):
                prepared = await self._checked_in(prepared)
                waiter = Waiter(prepared.id, prepared.request.tenant, prepared.value, streams=streams)
                inbox = self._parts.inbox
                partition = await inbox.open()
                await inbox.expect(waiter)
                extra = (*named, *_headers(partition, asker=waiter.asker))
                await (await self._queue(prepared, service_class, extra))
            while True:
                async with asyncio.timeout_at(limit):
                    item = await waiter.next_item()
                if item is None:
                    break
                yield item
            yield waiter.outcome.result()
        except TimeoutError as error:
            if isinstance(error, ClientTimeout) or limit == until:
                raise ClientTimeout(prepared.id, wait_s) from None
            yield _expired(prepared)
        finally:
            if inbox is not None and waiter is not None:
                inbox.forget(waiter)


class _Parts(NamedTuple):
    """What an open client consists of."""

    transport: Transport
    sender: Sender
    inbox: Inbox


def _headers(
    partition: int | None = None,
    traceparent: str | None = None,
    batch: str | None = None,
    *,
    asker: bytes | None = None,
    replay: bool = False,
) -> Headers:
    """What a request's record says beside its content type."""
    out: list[tuple[str, bytes]] = []
    if partition is not None:
        out.append((headers.RESULT_PARTITION, headers.pack_number(partition)))
    if traceparent is not None:
        out.append((headers.TRACEPARENT, traceparent.encode()))
    if batch is not None:
        out.append((headers.BATCH, batch_name(batch).encode()))
    if asker is not None:
        out.append((headers.CLIENT, asker))
    if replay:
        out.append((headers.REPLAY, b"1"))
    return tuple(out)


def _expired(prepared: Prepared) -> InferenceResult:
    """The result that the client gives itself when the deadline has passed without one."""
    message = f"the deadline {prepared.request.deadline} passed without a result"
    error = ErrorInfo(ErrorCode.EXPIRED, message, "deadline")
    return InferenceResult(prepared.id, "expired", prepared.request.tenant, error=error, metadata=dict(prepared.request.metadata))


async def _each(requests: Iterable[RequestLike] | AsyncIterable[RequestLike]) -> AsyncGenerator[RequestLike, None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
