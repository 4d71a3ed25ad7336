"""What a dispatcher says of the requests that it has in hand: why each waits, and what stands in its way."""

from collections.abc import Iterable, Mapping

from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.item import NEVER_MS, Item, Work
from dispatcher.core.routing import Explanation, Rates, Router
from dispatcher.core.routing.explain import WorkerView
from dispatcher.core.shaping import Band, Shaper
from schemas.policy import TenantConfig
from schemas.questions import Stage, Where, Why

FOUND_MAX = 100  # of one id: tenants may share it, and a client may use it again and again

# What keeps a worker from a request -> why it waits; of several the nearest to being served is told.
_OF_FILTERS = {"rate": Why.ENGINES_RATE, "breaker": Why.ENGINES_BROKEN, "unpaused": Why.ENGINES_PAUSED}
_NEAREST = (Why.ENGINES_FULL, Why.ENGINES_RATE, Why.ENGINES_BROKEN, Why.ENGINES_PAUSED, Why.NO_ENGINE)


class Whereabouts:
    """Says where requests are.

    Args:
        tenants: The tenants that have settings.
        queue: What waits.
        shaper: When tenants may be served.
        router: Who may serve them.
        rates: When pools may be sent something.
    """

    def __init__(
        self, tenants: Mapping[str, TenantConfig], queue: FairQueue, shaper: Shaper, router: Router, rates: Rates
    ) -> None:
        self._tenants, self._queue, self._shaper, self._router, self._rates = tenants, queue, shaper, router, rates

    def find(
        self, in_hand: Iterable[Item], delayed_ms: Mapping[Work, int], request_id: str, tenant: str | None, now_ms: int
    ) -> list[Where]:
        """Say where the requests of an id are, and why they wait, the oldest first.

        Args:
            in_hand: All that is in hand.
            delayed_ms: When those before their time may be tried again.
            request_id: The id.
            tenant: Whose; None for anybody's.
            now_ms: Unix time.
        """
        found = [item for item in in_hand if item.envelope.id == request_id and tenant in {None, item.tenant}]
        found.sort(key=lambda item: (item.envelope.received_at_ms, item.work))
        return [self._where(item, delayed_ms.get(item.work), now_ms) for item in found[:FOUND_MAX]]

    def _where(self, item: Item, delayed_ms: int | None, now_ms: int) -> Where:
        if delayed_ms is not None:
            return _told(item, Why.RETRY, delayed_ms)
        ahead, given = self._queue.ahead(item), self._tenants.get(item.tenant)
        if given is not None and given.paused:
            return _told(item, Why.TENANT_PAUSED, ahead=ahead)
        if self._shaper.band(item.tenant, now_ms) is Band.WAITING:
            return _told(item, Why.TENANT_RATE, self._shaper.ready_ms(item.tenant, now_ms), ahead=ahead)
        explanation = self._router.explain(item, now_ms)
        if explanation.pool is not None:
            return _told(item, Why.TURN, ahead=ahead)
        engines = obstacles(explanation)
        whys = {pool: why for pool, (why, _) in engines.items()}
        why = next((one for one in _NEAREST if one in whys.values()), Why.NO_ENGINE)
        until_ms: float | None = None
        if why is Why.ENGINES_RATE:
            until_ms = min(self._rates.ready_ms(pool, now_ms) for pool, of_pool in whys.items() if of_pool is why)
        elif why is Why.ENGINES_BROKEN:
            until_ms = self._router.breakers.turn_ms
        return _told(item, why, until_ms, ahead=ahead, engines={pool: said for pool, (_, said) in engines.items()})


def obstacles(explanation: Explanation) -> dict[str, tuple[Why, str]]:
    """Say of each pool that may answer a request what keeps it from there, in a word and in words."""
    found = {}
    for pool in explanation.pools:
        if pool.tier != "none":
            each = [_obstacle(worker) for worker in pool.workers]
            found[pool.pool] = min(each, key=lambda one: _NEAREST.index(one[0]), default=(Why.NO_ENGINE, "has no worker"))
    return found


def _obstacle(worker: WorkerView) -> tuple[Why, str]:
    failed = {name: why for name, why in worker.filters.items() if why is not None}
    if not failed:
        return Why.ENGINES_FULL, "full"
    whys = {name: _OF_FILTERS.get(name, Why.NO_ENGINE) for name in failed}
    name = max(whys, key=lambda name: _NEAREST.index(whys[name]))  # all of them must be over
    return whys[name], failed[name]


def _told(
    item: Item,
    why: Why,
    until_ms: float | None = None,
    *,
    ahead: int | None = None,
    engines: Mapping[str, str] | None = None,
) -> Where:
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
