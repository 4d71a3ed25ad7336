"""What a dispatcher says of a request that it has in hand."""

from collections.abc import Iterable, Mapping

from dispatcher.core.item import NEVER_MS, Item
from schemas.questions import Stage, Where, Why

FOUND_MAX = 100  # of one id: tenants may share it, and a client may use it again and again


def matching(items: Iterable[Item], request_id: str, tenant: str | None) -> list[Item]:
    """Find the requests of an id, the oldest first, and no more than `FOUND_MAX`."""
    found = [item for item in items if item.envelope.id == request_id and tenant in {None, item.tenant}]
    return sorted(found, key=lambda item: (item.envelope.received_at_ms, item.work))[:FOUND_MAX]


def where(
    item: Item,
    why: Why,
    until_ms: float | None = None,
    *,
    ahead: int | None = None,
    engines: Mapping[str, str] | None = None,
) -> Where:
    """Say where a request is that waits.

    Args:
        item: The request.
        why: Why it waits.
        until_ms: When that is over by itself, where it is.
        ahead: How many are expected to go before it.
        engines: What stands in the way of each pool that may serve it.
    """
    envelope, ((topic, partition), offset) = item.envelope, item.work
    return Where(
        id=envelope.id,
        stage=Stage.DELAYED if why is Why.RETRY else Stage.WAITING,
        tenant=envelope.tenant,
        service_class=envelope.service_class,
        received_at_ms=envelope.received_at_ms,
        deadline_ms=item.deadline_ms if item.deadline_ms < NEVER_MS else None,
        ahead=ahead,
        why=why,
        until_ms=None if until_ms is None or until_ms >= NEVER_MS else int(until_ms),
        engines=dict(engines or {}),
        record=(topic, partition, offset),
        attempts=envelope.attempts,
        hop=envelope.hop,
    )
