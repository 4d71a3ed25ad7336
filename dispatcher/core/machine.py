r"""The dispatcher as one machine: `handle(event, now_ms) -> effects`.

    a request:   arrived -> delayed (a retry before its time) -> queued -> forwarded -> durable
                     \-> finished (refused)
                 while delayed or queued: finished (expired, cancelled)
                 at any time: dropped (its partition went to somebody else)

It decides late: a request leaves the queue only when a worker has room for it, so order, shares and routing are
decided with fresh knowledge and the engine topics stay shallow.
"""

import heapq
from collections.abc import Callable

from dispatcher.core.deadlines import Deadlines
from dispatcher.core.events import Arrived, Cancelled, Dropped, Effect, Event, Finish, Forward, Sent, StatusSeen, Tick
from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.fleet import Fleet
from dispatcher.core.item import Item, Work
from dispatcher.core.prediction import Predictor
from dispatcher.core.routing import Choice, Router
from dispatcher.core.shaping import PoolRates, Shaper
from dispatcher.core.turns import BlockKey
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo, ServiceClass

_EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed while it waited", "deadline")
_CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "cancelled while it waited")
GONE_SPARE = 64  # so many that left the hand are never worth a sweep


class Dispatcher:
    """Queues requests and decides where each goes.

    Args:
        config: Weights, bounds and engines.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shaper = Shaper(config.dispatcher.cell, config.tenants)
        self._queue = FairQueue(config.classes, self._shaper)
        self._fleet = Fleet(config.dispatcher.runway_factor, config.dispatcher.status_stale_ms)
        profiles = {config.pool(name): (engine.kind, engine.profile) for name, engine in sorted(config.engines.items())}
        self._rates = PoolRates({config.pool(name): engine.settings for name, engine in sorted(config.engines.items())})
        self._policy = Router(config, self._fleet, Predictor(profiles), self._rates)
        self._in_hand: dict[Work, Item] = {}  # queued or delayed
        self._deadlines = Deadlines(self._in_hand)
        self._delayed: list[tuple[int, int, Item]] = []
        self._gone = 0  # left the hand since the last sweep, and may still stand in the queue or among the delayed
        self._sending: dict[Work, tuple[str, int, ServiceClass]] = {}  # forwarded, not durable yet -> pool, partition
        self._count = self._now_ms = 0

    @property
    def queued(self) -> int:
        """Requests that wait, those before their time included."""
        return len(self._in_hand)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take in what happened; give what is to be done."""
        kind = type(event)
        if kind is Arrived:
            return self._arrived(event.item, now_ms)  # type: ignore[union-attr]
        if kind is Sent:
            self._sent(event.work, event.offset)  # type: ignore[union-attr]
        elif isinstance(event, StatusSeen):
            status = event.status
            for done in self._fleet.seen(status, now_ms):
                self._policy.completed(status.pool, status.worker, status.epoch, done.code, now_ms)
        elif isinstance(event, Dropped):
            self._dropped(event.work)
        elif isinstance(event, Cancelled):
            return self._cancelled(event.covers)
        elif isinstance(event, Tick):
            return self._decide(now_ms)
        return []

    def _arrived(self, item: Item, now_ms: int) -> list[Effect]:
        error = self._policy.refusal(item.demand) or self._policy.final_error(item)
        if error is not None:
            return [Finish(item, "rejected", error)]
        if item.envelope.hop >= self._config.dispatcher.max_hops:
            message = f"handed back {item.envelope.hop} times: no engine kept it"
            return [Finish(item, "failed", ErrorInfo(ErrorCode.UNHEALTHY, message))]
        item.demand = self._policy.demand(item)
        self._in_hand[item.work] = item
        self._deadlines.push(item)
        latest_ms = now_ms + self._config.dispatcher.retry_backoff_ms_max  # whoever wrote it may have another time
        if item.envelope.not_before_ms > now_ms:
            self._count += 1
            heapq.heappush(self._delayed, (min(item.envelope.not_before_ms, latest_ms), self._count, item))
        else:
            self._queue.push(item)
        return []

    def _sent(self, work: Work, offset: int | None) -> None:
        place = self._sending.pop(work, None)
        if place is not None:
            self._fleet.sent(*place, offset)

    def _dropped(self, work: Work) -> None:
        item = self._in_hand.get(work)
        if item is not None:
            self._let_go(item)
        self._sent(work, None)

    def _cancelled(self, covers: Callable[[Item], bool]) -> list[Effect]:
        found = [item for item in self._in_hand.values() if covers(item)]
        for item in found:
            self._let_go(item)
        return [Finish(item, "cancelled", _CANCELLED) for item in found]

    def _expired(self, now_ms: int) -> list[Effect]:
        found = self._deadlines.passed(now_ms)
        for item in found:
            self._let_go(item)
        return [Finish(item, "expired", _EXPIRED) for item in found]

    def _let_go(self, item: Item) -> None:
        """Take a request out of hand, wherever it stands; it leaves the queue when it surfaces, or with a sweep."""
        del self._in_hand[item.work]
        item.dropped = True
        item.value = b""  # what stands in the queue for a while yet shall not hold memory
        self._gone += 1
        if self._gone > len(self._in_hand) + GONE_SPARE:
            self._gone = 0
            self._queue.sweep()
            self._delayed = [entry for entry in self._delayed if not entry[2].dropped]
            heapq.heapify(self._delayed)

    def _decide(self, now_ms: int) -> list[Effect]:
        effects = self._expired(now_ms)
        was_set_back, self._now_ms = now_ms < self._now_ms, now_ms
        while self._delayed and (was_set_back or self._delayed[0][0] <= now_ms):  # on another clock nobody knows how long
            item = heapq.heappop(self._delayed)[2]
            if not item.dropped:
                self._queue.push(item)
        blocked: set[BlockKey] = set()
        while (head := self._queue.head(blocked, now_ms)) is not None:
            if head.dropped:
                self._queue.discard(head)
            elif (choice := self._policy.pick(head, now_ms)) is None:
                blocked.add((head.service_class, head.demand))
            else:
                effects.append(self._forward(head, choice, now_ms))
        return effects

    def _forward(self, item: Item, choice: Choice, now_ms: int) -> Forward:
        pool, partition = choice.pool, choice.worker.partition
        if partition is None:
            message = "a policy picked a worker that owns no partition"
            raise AssertionError(message)
        band = self._queue.serve(item, choice.cost_ms)
        self._shaper.charge(item.tenant, item.cost, now_ms, band)
        self._rates.charge(pool, item.cost, now_ms)
        del self._in_hand[item.work]
        self._sending[item.work] = pool, partition, item.service_class
        self._fleet.sending(pool, partition, item.service_class)
        return Forward(item, pool, choice.worker.status.worker, partition, choice.placement)
