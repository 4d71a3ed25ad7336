"""A request in a worker's hands."""

import asyncio

from msgspec import Struct

from broker.transport.handler import Work
from broker.transport.protocol import Record
from engine_consumers.core.lifecycle import Order
from engine_consumers.generation import Generation
from schemas.messages import Envelope, ErrorInfo, InferenceRequest


class Job(Struct):
    """One take-in of a request.

    Attributes:
        ticket: Names it to the lifecycle.
        envelope: As it came, with the crashes that the ledger tells of.
        run: The run's id, by which readers order runs.
        alone: It runs, and nothing beside it.
        entered: The engine has taken it in.
        moved_s: When it last moved, on the loop's clock; infinity while it waits for the broker.
        verdict: Why its run is being ended from outside.
        generation: What its run has produced so far.
    """

    ticket: int
    work: Work
    record: Record
    envelope: Envelope
    request: InferenceRequest
    run: str
    order: Order
    task: asyncio.Task[None] | None = None
    alone: bool = False
    entered: bool = False
    moved_s: float = 0.0
    verdict: ErrorInfo | None = None
    generation: Generation | None = None
