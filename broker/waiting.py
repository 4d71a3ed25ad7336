"""Who waits for a terminal result: one future, or one stream."""

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from broker.assembly import Assembly, StreamItem
from schemas.ids import new_id
from schemas.messages import InferenceResult, TokenChunk

STREAM_ITEMS_MAX = 10_000  # items that a slow reader may leave lying; beyond that the result completes the text


class Waiter:
    """One request of ours whose terminal result is awaited.

    Args:
        request_id: Its id.
        tenant: Its tenant: another tenant's request of the same id is none of our business.
        value: The request as it is sent.
        streams: Whether its chunks are wanted.

    Attributes:
        content: A digest of the request.
        asker: Names the question to the dispatcher; see `Questions`.
    """

    def __init__(self, request_id: str, tenant: str, value: bytes, *, streams: bool = False) -> None:
        self.request_id, self.tenant, self.streams = request_id, tenant, streams
        self.content = hashlib.blake2b(value, digest_size=16).digest()
        self.asker = b""
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


class Questions:
    """The questions asked and not yet answered. The dispatcher runs one of one name once.

    Whoever asks the same again before the answer was read shares its name, also after a timeout: the answer is still to
    come. Who asks later gets a name of its own, and so an answer of its own.

    Args:
        questions_max: Beyond so many the oldest are forgotten: asked again, they are run again.
    """

    def __init__(self, questions_max: int) -> None:
        self._max = questions_max
        self._name, self._count = new_id(), 0  # no name that an earlier process may have used: its answers are gone by
        self._open: OrderedDict[bytes, dict[str, tuple[bytes, bytes]]] = OrderedDict()  # id -> tenant -> content, name

    def __contains__(self, request_id: bytes) -> bool:
        """Whether an answer to that id is to come."""
        return request_id in self._open

    def ask(self, waiter: Waiter) -> bytes:
        """Give the question's name."""
        of_id = self._open.setdefault(waiter.request_id.encode(), {})
        content, name = of_id.get(waiter.tenant, (b"", b""))
        if content != waiter.content:
            self._count += 1
            name = f"{self._name}/{self._count}".encode()
            of_id[waiter.tenant] = waiter.content, name
        if len(self._open) > self._max:
            self._open.popitem(last=False)
        return name

    def answered(self, request_id: bytes, tenant: str) -> None:
        """The answer was read."""
        of_id = self._open.get(request_id, {})
        of_id.pop(tenant, None)
        if not of_id:
            self._open.pop(request_id, None)


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
