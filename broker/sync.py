"""The client for programs without asyncio: the same calls, blocking, over an event loop in a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from broker.assembly import StreamItem
from broker.client import CLOSED, IN_FLIGHT_MAX, Client
from broker.errors import ClientClosed
from broker.requests import RequestLike
from broker.subscription import Start
from broker.transport.settings import Settings
from schemas.control import Change
from schemas.messages import InferenceResult, ServiceClass

T = TypeVar("T")

CLOSE_S = 60.0


class SyncStream:
    """A request's tokens as they come, as an iterator; see `ResultStream`.

    Attributes:
        result: The terminal result, once the stream has ended.
    """

    def __init__(self, client: "SyncClient", request: RequestLike | None, arguments: dict[str, Any]) -> None:
        self._client = client
        self._inner = client.inner.stream(request, **arguments)
        self.id = self._inner.id

    @property
    def result(self) -> InferenceResult | None:
        """The terminal result, once the stream has ended."""
        return self._inner.result

    def __iter__(self) -> Iterator[StreamItem]:
        """Give the items; leaving early stops listening."""
        return self._client.each(self._inner)


class SyncClient:
    """Blocking calls; may be used from several threads.

    Args:
        arguments: As for `Client`.

    Raises:
        ConfigError: Naming the file, the field's path and what was expected.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401 - those of Client
        self.inner = Client(*arguments, **named)
        self._loop = asyncio.new_event_loop()
        self._gate = threading.Lock()  # what gets past it before `close` does is on the loop before `close` is
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-client", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        timeout_s: float | None = None,
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> InferenceResult:
        """Send a request and wait for its terminal result; see `Client.submit`."""
        return self.wait(self.inner.submit(request, service_class=service_class, timeout_s=timeout_s, **fields))

    def stream(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        timeout_s: float | None = None,
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> SyncStream:
        """Send a request and give its tokens as they come; see `Client.stream`."""
        return SyncStream(self, request, {"service_class": service_class, "timeout_s": timeout_s, **fields})

    def send(
        self,
        request: RequestLike | None = None,
        *,
        service_class: ServiceClass = "interactive",
        **fields: Any,  # noqa: ANN401 - the schema checks them
    ) -> str:
        """Send a request and give its id; see `Client.send`."""
        return self.wait(self.inner.send(request, service_class=service_class, **fields))

    def send_many(
        self,
        requests: Iterable[RequestLike],
        *,
        service_class: ServiceClass = "batch",
        in_flight_max: int = IN_FLIGHT_MAX,
        batch: str | None = None,
    ) -> Generator[str, None, None]:
        """Send many requests and give each id once it is acknowledged; see `Client.send_many`."""
        sending = self.inner.send_many(requests, service_class=service_class, in_flight_max=in_flight_max, batch=batch)
        return self.each(sending)

    def cancel(self, id: str | None = None, *, tenant: str | None = None, batch: str | None = None) -> None:  # noqa: A002
        """Cancel requests; see `Client.cancel`."""
        self.wait(self.inner.cancel(id, tenant=tenant, batch=batch))

    def settings(self) -> Settings:
        """What was changed while it runs; see `Client.settings`."""
        return self.wait(self.inner.settings())

    def steer(self, change: Change) -> Settings:
        """Change the settings of a tenant or an engine; see `Client.steer`."""
        return self.wait(self.inner.steer(change))

    def results(
        self,
        from_: Start = "latest",
        *,
        follow: bool = True,
        ids: Collection[str] | None = None,
        replays: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> Generator[InferenceResult, None, None]:
        """Read results; see `Client.results`. Where reading begins is fixed before this returns."""
        subscription = self.inner.results(from_, follow=follow, ids=ids, replays=replays, timeout_s=timeout_s)
        self.wait(subscription.open())
        return self.each(subscription)

    def close(self) -> None:
        """Let go of everything; other threads that still wait get `ClientClosed`."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(_end(self.inner), self._loop).result(CLOSE_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            self._loop.close()

    def __enter__(self) -> Self:
        """Connect."""
        try:
            self.wait(self.inner.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go."""
        self.close()

    def wait(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the client's loop to its end; when this thread is interrupted, it is cancelled.

        Raises:
            ClientClosed: The client was closed before, or meanwhile.
        """
        with self._gate:
            if self._closed:
                coroutine.close()
                raise ClientClosed(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            if self._closed:
                raise ClientClosed(CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise

    def each(self, source: Any) -> Generator[Any, None, None]:  # noqa: ANN401 - whatever the source gives
        """Give what an async iterator gives; leaving early closes it."""
        try:
            while True:
                try:
                    yield self.wait(_next(source))
                except StopAsyncIteration:
                    return
        finally:
            with contextlib.suppress(ClientClosed):
                self.wait(source.aclose(), CLOSE_S)


async def _next(source: AsyncIterator[T] | AsyncGenerator[T, None]) -> T:
    return await anext(source)


async def _end(client: Client) -> None:
    """Close a client, and cancel what else runs on its loop: nobody would run it on once the loop stands still."""
    try:
        await client.close()
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
