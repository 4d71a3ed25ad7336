"""What was charged for the requests that engines have, until their completions tell what they truly took.

Completions are advice and may be lost, come twice, or come before the broker has told where the record went. So a charge
is found by the record of the engine's topic, each is settled once, and both tables are bounded: what is pushed out keeps
the charge it has.
"""

from typing import NamedTuple

from dispatcher.core.item import Work
from dispatcher.core.shaping import Band
from schemas.messages import Completion, ServiceClass

CHARGES_MAX = 65_536
EARLY_MAX = 4_096

Place = tuple[str, int, int]  # pool, partition, offset


class Charge(NamedTuple):
    """What was charged for one request.

    Attributes:
        cost_ms: Engine time.
        input_tokens: Of the prompt.
        tokens: Of prompt and answer.
        size_bytes: Of its text; None where its tokens were given.
        band: In which it was served.
        slots: Of the worker that has it.
    """

    tenant: str
    service_class: ServiceClass
    model: str
    cost_ms: float
    input_tokens: float
    tokens: float
    max_output_tokens: int
    size_bytes: int | None
    band: Band
    slots: int


class Done(NamedTuple):
    """A completion, and the start of the worker that tells it."""

    epoch: int
    completion: Completion


class Running:
    """The charges that are not settled yet."""

    def __init__(self) -> None:
        self._sending: dict[Work, tuple[str, int, Charge]] = {}  # the hop bounds them
        self._sent: dict[Place, Charge] = {}
        self._early: dict[Place, Done] = {}

    def __len__(self) -> int:
        """Charges held."""
        return len(self._sending) + len(self._sent)

    def sending(self, work: Work, pool: str, partition: int, charge: Charge) -> None:
        """A request is on its way to a pool's partition."""
        self._sending[work] = pool, partition, charge

    def sent(self, work: Work, offset: int | None) -> tuple[str, int, Charge, Done | None] | None:
        """Take in where it went, None where nobody knows.

        Returns:
            Pool, partition and charge, with the completion where that came earlier; None for what is not known here.
        """
        known = self._sending.pop(work, None)
        if known is None:
            return None
        pool, partition, charge = known
        if offset is None:
            return pool, partition, charge, None
        early = self._early.pop((pool, partition, offset), None)
        if early is None:
            self._sent[pool, partition, offset] = charge
            if len(self._sent) > CHARGES_MAX:
                del self._sent[next(iter(self._sent))]
        return pool, partition, charge, early

    def completed(self, pool: str, done: Done) -> Charge | None:
        """Give the charge to be settled by a completion; None where it is not known, or not yet."""
        place = pool, done.completion.partition, done.completion.offset
        charge = self._sent.pop(place, None)
        if charge is None and self._sending:
            self._early[place] = done
            if len(self._early) > EARLY_MAX:
                del self._early[next(iter(self._early))]
        return charge
