"""A request in a worker's hands."""

import asyncio

from msgspec import Struct

from broker.transport.handler import Work
from broker.transport.protocol import Record
from engine_consumers.core.lifecycle import Order
from engine_consumers.generation import Generation
from schemas.errors import ErrorCode
from schemas.messages import Completion, Envelope, ErrorInfo, InferenceRequest

NEVER_MS = 1 << 62  # the deadline of a request without one


class Job(Struct):
    """One take-in of a request. Seconds are those of the loop's clock.

    Attributes:
        ticket: Names it to the lifecycle.
        envelope: As it came, with the crashes that the ledger tells of.
        run: The run's id, by which readers order runs.
        read_s: When it was read.
        began_s: When its run began.
        first_s: When its first token came.
        beside: Requests that ran when it began.
        kv_cache_usage: When it began, as last known.
        generation: What its run has produced.
        alone: It runs, and nothing beside it.
        entered: The engine has taken it in.
        moved_s: When it last moved; infinity while it waits for the broker.
        verdict: Why its run is being ended from outside.
        code: Why it failed.
    """

    ticket: int
    work: Work
    record: Record
    envelope: Envelope
    request: InferenceRequest
    run: str
    order: Order
    read_s: float
    began_s: float | None = None
    first_s: float | None = None
    beside: int = 0
    kv_cache_usage: float | None = None
    generation: Generation | None = None
    task: asyncio.Task[None] | None = None
    alone: bool = False
    entered: bool = False
    moved_s: float = 0.0
    verdict: ErrorInfo | None = None
    code: ErrorCode | None = None

    def completion(self, now_s: float) -> Completion:
        """What it took, now that it ends."""
        began_s = now_s if self.began_s is None else self.began_s
        generation = self.generation
        return Completion(
            partition=self.record.partition,
            offset=self.record.offset,
            input_tokens=generation.usage.input_tokens if generation else 0,
            output_tokens=len(generation.token_ids) if generation else 0,
            waited_ms=_ms(began_s - self.read_s),
            ttft_ms=None if self.first_s is None else _ms(self.first_s - began_s),
            run_ms=_ms(now_s - began_s),
            beside=self.beside,
            kv_cache_usage=self.kv_cache_usage,
            code=self.code,
        )


def _ms(seconds: float) -> float:
    """Milliseconds to the microsecond: what is finer costs bytes and tells nothing."""
    return round(seconds * 1000, 3)
