"""Token chunks on their way to the streams topic, coalesced in time and size.

Chunks are outside any transaction: what a killed run wrote stays, and the reader keeps the newest run. The first
piece of a stream goes out at once, later ones together every `chunk_ms`.
"""

import asyncio
import logging
import math

from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing, Producer
from engine_consumers.core.stream import Coalescer
from engine_consumers.engine import Piece
from schemas import codecs, headers
from schemas.config import WorkerConfig
from schemas.headers import Headers
from schemas.messages import TokenChunk

log = logging.getLogger("forebay.worker")

TELL_MS = 1_000


class ChunkStream:
    """The chunks of one run."""

    def __init__(self, publisher: "ChunkPublisher", chunks: Coalescer, content_type: str, partition: int | None) -> None:
        self._publisher, self._chunks, self._partition = publisher, chunks, partition
        self._content_type = headers.MSGPACK if content_type == headers.MSGPACK else headers.JSON

    async def add(self, piece: Piece) -> None:
        """Take in a piece; write at once what is first, last, or much."""
        now_ms = _now_ms()
        await self._write(self._chunks.add(piece.token_ids, piece.text, now_ms, piece.logprobs))
        if piece.finish_reason is not None:
            await self._write(self._chunks.finish(piece.finish_reason, now_ms))
        elif self._chunks.due_ms is not None:
            self._publisher.later(self)

    async def flush(self) -> bool:
        """Write what has gathered, where its time has come; give whether some still waits."""
        await self._write(self._chunks.flush(_now_ms()))
        return self._chunks.due_ms is not None

    async def _write(self, chunk: TokenChunk | None) -> None:
        if chunk is not None:
            run: Headers = ((headers.CONTENT_TYPE, self._content_type.encode()), (headers.RUN_ID, chunk.run_id.encode()))
            value = codecs.encode(chunk, self._content_type)
            await self._publisher.send(value, chunk.request_id.encode(), run, self._partition)


class ChunkPublisher:
    """Writes the chunks of all runs of a worker.

    Args:
        producer: Where they go out; streams are advice, so a failed write is logged and not tried again.
        topic: The streams topic.
        config: How long chunks gather, and how much.
    """

    def __init__(self, producer: Producer, topic: str, config: WorkerConfig) -> None:
        self._producer, self._topic = producer, topic
        self._chunk_ms, self._bytes_max = config.chunk_ms, config.chunk_bytes_max
        self._waiting: dict[ChunkStream, None] = {}
        self._wake = asyncio.Event()
        self._lost, self._told_ms = 0, -math.inf

    def open(self, request_id: str, run_id: str, content_type: str, partition: int | None) -> ChunkStream:
        """Begin the stream of one run."""
        chunks = Coalescer(request_id, run_id, self._chunk_ms, self._bytes_max)
        return ChunkStream(self, chunks, content_type, partition)

    def later(self, stream: ChunkStream) -> None:
        """Write the stream's chunk when the time has come."""
        self._waiting[stream] = None
        self._wake.set()

    async def send(self, value: bytes, key: bytes, record_headers: Headers, partition: int | None) -> None:
        """Queue one record; its acknowledgement is not waited for."""
        try:
            acknowledged = await self._producer.send(Outgoing(self._topic, value, key, record_headers, partition))
        except TransportError as error:
            self._lose(error)
            return
        if isinstance(acknowledged, asyncio.Future):
            acknowledged.add_done_callback(self._note)

    def _note(self, acknowledged: "asyncio.Future[tuple[int, int]]") -> None:
        if not acknowledged.cancelled() and (error := acknowledged.exception()):
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        """Count what was lost, and say so once in a while: in an outage it is everything."""
        self._lost += 1
        now_ms = _now_ms()
        if now_ms - self._told_ms >= TELL_MS:
            log.warning("chunks_lost count=%d error=%r", self._lost, error)
            self._lost, self._told_ms = 0, now_ms

    async def run(self) -> None:
        """Write, every `chunk_ms`, what has gathered since."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._chunk_ms / 1000)
            self._wake.clear()
            waiting, self._waiting = self._waiting, {}
            for stream in waiting:
                if await stream.flush():
                    self.later(stream)


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000
