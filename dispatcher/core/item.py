"""A request as the dispatcher holds it: what scheduling needs, and the client's bytes unread beside it."""

from typing import NamedTuple

from msgspec import Struct

from broker.transport.protocol import TopicPartition
from schemas.headers import Headers
from schemas.messages import Envelope, Fallback, ServiceClass

Work = tuple[TopicPartition, int]  # names the record in hand: its partition and offset
NEVER_MS = 1 << 62


class Excluded(NamedTuple):
    """Who handed a request back: one worker since its start, asked again only where nobody else is there, or a whole pool.

    Attributes:
        epoch: Of the worker; one that has started since is another one.
        worker: Its name; None where what it said holds for its whole pool, whose workers are all alike in that.
    """

    pool: str
    epoch: int
    worker: str | None


class Demand(NamedTuple):
    """What a request asks of an engine: requests of one demand can go to the same places.

    Attributes:
        excluded: Who handed it back, the latest last.
        features: What the engine must have, sorted.
        context: Tokens that the engine must take: one more than the next lower limit that an engine has, so that there are
            few demands and an engine with a limit between is not ruled out; 0 where any will do.
        is_timed: Whether it has a deadline, for which it may wait where those without one need not.
    """

    model: str
    hint: str
    fallback: Fallback
    excluded: tuple[Excluded, ...] = ()
    features: tuple[str, ...] = ()
    context: int = 0
    is_timed: bool = False


class Item(Struct):
    """One unfinished request.

    Attributes:
        work: The record it came in.
        deadline_ms: Unix time after which no answer is wanted; NEVER_MS where there is none.
        input_tokens: Of the prompt, estimated where it is text.
        max_output_tokens: Bound of the answer.
        size_bytes: Of the prompt's text; None where its tokens were given.
        slo_ms: Latency wished for.
        output_tokens: Expected of the answer; the machine fills it in on arrival.
        seen_key: Names the request among those seen lately; None where it is run in any case.
        dropped: The record is not ours to finish any more.
    """

    work: Work
    envelope: Envelope
    demand: Demand
    input_tokens: float
    max_output_tokens: int
    deadline_ms: int
    value: bytes
    headers: Headers
    size_bytes: int | None = None
    slo_ms: int | None = None
    output_tokens: float = 0.0
    seen_key: bytes | None = None
    dropped: bool = False

    @property
    def is_new(self) -> bool:
        """Whether this is the record that its client produced."""
        (topic, partition), offset = self.work
        return self.envelope.origin == (topic, partition, offset)

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.envelope.tenant

    @property
    def service_class(self) -> ServiceClass:
        """Interactive or batch."""
        return self.envelope.service_class
