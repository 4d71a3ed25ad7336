"""Who waits for a terminal result: one future, or one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from broker.assembly import Assembly, StreamItem
from schemas.messages import InferenceResult, TokenChunk

STREAM_ITEMS_MAX = 10_000  # items that a slow reader may leave lying; beyond that the result completes the text


class Waiter:
    """One request of ours whose terminal result is awaited.

    Args:
        request_id: Its id.
        tenant: Its tenant: another tenant's request of the same id is none of our business.
        streams: Whether its chunks are wanted.
    """

    def __init__(self, request_id: str, tenant: str, *, streams: bool = False) -> None:
        self.request_id, self.tenant, self.streams = request_id, tenant, streams
        self.outcome: asyncio.Future[InferenceResult] = asyncio.get_running_loop().create_future()
        self._assembly = Assembly(request_id)
        self._items: deque[StreamItem] = deque()
        self._news = asyncio.Event()

    def chunk(self, chunk: TokenChunk) -> None:
        """Take in a chunk from the reader."""
        if self.outcome.done():
            return
        if len(self._items) >= STREAM_ITEMS_MAX:
            self._assembly.lose()
        self._items += self._assembly.chunk(chunk)
        self._news.set()

    def result(self, result: InferenceResult) -> None:
        """Take in the terminal result."""
        if self.outcome.done():
            return
        if self.streams:
            self._items += self._assembly.result(result)
        self.outcome.set_result(result)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the wait with an error."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # whoever has stopped waiting need not be told
        self._news.set()

    async def next_item(self) -> StreamItem | None:
        """Give the next item of the stream, or None once the result is there and all was given.

        Raises:
            ClientError: As given to `fail`.
        """
        while not self._items:
            if self.outcome.done():
                self.outcome.result()
                return None
            self._news.clear()
            await self._news.wait()
        return self._items.popleft()


class ResultStream:
    """A request's tokens as they come: an async iterator of `TokenChunk` and, rarely, `StreamRestarted`.

    It ends with the terminal result, which then stands in `result`; the texts given (since the last restart) make up
    its output. Leave it early with `aclose`, or use it as an async context manager.

    Attributes:
        id: The request's id.
        result: The terminal result, once the stream has ended.
    """

    def __init__(self, request_id: str, items: AsyncGenerator[StreamItem | InferenceResult, None]) -> None:
        self.id = request_id
        self.result: InferenceResult | None = None
        self._items = items

    def __aiter__(self) -> Self:
        """Iterate over the stream itself."""
        return self

    async def __anext__(self) -> StreamItem:
        """Give the next item; the first call sends the request."""
        item = await anext(self._items)
        if isinstance(item, InferenceResult):
            self.result = item
            await self._items.aclose()
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """Stop listening; the request itself goes on."""
        await self._items.aclose()

    async def __aenter__(self) -> Self:
        """Nothing to do yet."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop listening."""
        await self.aclose()
