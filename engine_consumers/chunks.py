"""Token chunks on their way to the streams topic, coalesced in time and size.

Chunks are outside any transaction: what a killed run wrote stays, and the reader keeps the newest run. The first
piece of a stream goes out at once, later ones together every `chunk_ms`.
"""

import asyncio
import logging

from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing, Producer
from schemas import codecs, headers
from schemas.config import WorkerConfig
from schemas.headers import Headers
from schemas.messages import FinishReason, TokenChunk

log = logging.getLogger("forebay.worker")


class ChunkStream:
    """The chunks of one run."""

    def __init__(
        self, publisher: "ChunkPublisher", request_id: str, run_id: str, content_type: str, partition: int | None
    ) -> None:
        self._publisher, self._request_id, self._run_id = publisher, request_id, run_id
        self._partition = partition
        self._content_type = headers.MSGPACK if content_type == headers.MSGPACK else headers.JSON
        self._headers: Headers = ((headers.CONTENT_TYPE, self._content_type.encode()), (headers.RUN_ID, run_id.encode()))
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._seq = self._bytes = 0

    async def add(self, token_ids: list[int], text: str, finish_reason: FinishReason | None) -> None:
        """Take in a piece; write at once what is first, last, or much."""
        self._token_ids += token_ids
        self._texts.append(text)
        self._bytes += len(text)
        if self._seq == 0 or finish_reason is not None or self._bytes >= self._publisher.bytes_max:
            await self.write(finish_reason)
        else:
            self._publisher.later(self)

    async def write(self, finish_reason: FinishReason | None = None) -> None:
        """Send what has gathered."""
        if not self._token_ids and not self._texts and finish_reason is None:
            return
        chunk = TokenChunk(self._request_id, self._run_id, self._seq, self._token_ids, "".join(self._texts), finish_reason)
        self._seq += 1
        self._token_ids, self._texts, self._bytes = [], [], 0
        await self._publisher.send(
            codecs.encode(chunk, self._content_type), self._request_id.encode(), self._headers, self._partition
        )


class ChunkPublisher:
    """Writes the chunks of all runs of a worker.

    Args:
        producer: Where they go out; streams are advice, so a failed write is logged and not tried again.
        topic: The streams topic.
        config: How long chunks gather, and how much.
    """

    def __init__(self, producer: Producer, topic: str, config: WorkerConfig) -> None:
        self._producer, self._topic = producer, topic
        self._every_s, self.bytes_max = config.chunk_ms / 1000, config.chunk_bytes_max
        self._waiting: dict[ChunkStream, None] = {}
        self._wake = asyncio.Event()

    def open(self, request_id: str, run_id: str, content_type: str, partition: int | None) -> ChunkStream:
        """Begin the stream of one run."""
        return ChunkStream(self, request_id, run_id, content_type, partition)

    def later(self, stream: ChunkStream) -> None:
        """Write the stream's chunk when the time has come."""
        self._waiting[stream] = None
        self._wake.set()

    async def send(self, value: bytes, key: bytes, record_headers: Headers, partition: int | None) -> None:
        """Queue one record; its acknowledgement is not waited for."""
        try:
            acknowledged = await self._producer.send(Outgoing(self._topic, value, key, record_headers, partition))
        except TransportError as error:
            log.warning("chunk_lost error=%s", error)
            return
        if isinstance(acknowledged, asyncio.Future):
            acknowledged.add_done_callback(_note_loss)

    async def run(self) -> None:
        """Write, every `chunk_ms`, what has gathered since."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._every_s)
            self._wake.clear()
            waiting, self._waiting = self._waiting, {}
            for stream in waiting:
                await stream.write()


def _note_loss(acknowledged: "asyncio.Future[tuple[int, int]]") -> None:
    if not acknowledged.cancelled() and (error := acknowledged.exception()):
        log.warning("chunk_lost error=%r", error)
