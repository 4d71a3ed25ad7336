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
from dispatcher.core.events import Arrived, Cancelled, Dropped, Effect, Event, Finish, Forward, Sent, StatusSeen, Steered, Tick
from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.fleet import Fleet, Worker
from dispatcher.core.item import Demand, Item, Work
from dispatcher.core.routing import LeastLoaded, Policy
from dispatcher.core.whereabouts import matching, where
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo, ServiceClass
from schemas.policy import TenantConfig
from schemas.questions import DispatcherState, QueueSeen, Where, Why, WorkerSeen, public, without_completions

_PLAIN_TENANT = TenantConfig()
_EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed while it waited", "deadline")
_CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "cancelled while it waited")
GONE_SPARE = 64  # so many that left the hand are never worth a sweep


class Dispatcher:
    """Queues requests and decides where each goes.

    Args:
        config: Weights, bounds and engines.
        policy: Who serves whom; the least loaded by default.
    """

    def __init__(self, config: Config, policy: Policy | None = None) -> None:
        self._config = config
        self._policy = policy or LeastLoaded(config)
        classes = {"interactive": config.classes.interactive_weight, "batch": config.classes.batch_weight}
        self._queue = FairQueue(classes.__getitem__, lambda tenant: self._tenant(tenant).weight or 1.0)
        self._steered = Steered({}, {})
        self._paused: dict[str, list[Item]] = {}  # tenant -> what had its turn meanwhile
        self._fleet = Fleet(config.dispatcher.runway_factor, config.dispatcher.status_stale_ms)
        self._in_hand: dict[Work, Item] = {}  # queued or delayed
        self._deadlines = Deadlines(self._in_hand)
        self._delayed: list[tuple[int, int, Item]] = []
        self._gone = 0  # left the hand since the last sweep, and may still stand in the queue or among the delayed
        self._sending: dict[Work, tuple[str, int]] = {}  # forwarded, not durable yet -> pool, partition
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
            self._fleet.seen(event.status, now_ms)
        elif isinstance(event, Dropped):
            self._dropped(event.work)
        elif isinstance(event, Cancelled):
            return self._cancelled(event.covers)
        elif isinstance(event, Steered):
            self._steer(event)
        elif isinstance(event, Tick):
            return self._decide(now_ms)
        return []

    def where(self, request_id: str, tenant: str | None, now_ms: int) -> list[Where]:
        """Say where the requests of an id are, and why they wait, of those that are in hand.

        Args:
            request_id: The id.
            tenant: Whose; None for anybody's.
            now_ms: Unix time.
        """
        delayed = {item.work: not_before_ms for not_before_ms, _, item in self._delayed if not item.dropped}
        found = []
        for item in matching(self._in_hand.values(), request_id, tenant):
            if item.work in delayed:
                found.append(where(item, Why.RETRY, delayed[item.work]))
                continue
            ahead = sum(_goes_before(other, item) for other in self._in_hand.values() if other.work not in delayed)
            why, engines = Why.TURN, {}
            if self._tenant(item.tenant).paused:
                why = Why.TENANT_PAUSED
            elif self._policy.pick(item, self._fleet, now_ms) is None:
                engines = self._policy.standing(item, self._fleet, now_ms)
                why = Why.ENGINES_FULL if "full" in engines.values() else Why.NO_ENGINE
            found.append(where(item, why, ahead=ahead, engines=engines))
        return found

    def state(self, now_ms: int) -> DispatcherState:
        """Give all that routing goes by."""
        counts: dict[tuple[ServiceClass, str], int] = {}
        for item in self._in_hand.values():
            key = item.service_class, item.tenant
            counts[key] = counts.get(key, 0) + 1
        return DispatcherState(
            at_ms=now_ms,
            config=public(self._config),
            tenants=dict(self._steered.tenants),
            pools=dict(self._steered.pools),
            workers=[
                WorkerSeen(without_completions(worker.status), worker.heard_ms, worker.load)
                for pool in self._config.pools
                for worker in self._fleet.workers(pool)
            ],
            queues=[QueueSeen(*key, count) for key, count in sorted(counts.items())],
        )

    def _arrived(self, item: Item, now_ms: int) -> list[Effect]:
        error = self._policy.refusal(item.demand) or self._policy.final_error(item, self._fleet)
        if error is not None:
            return [Finish(item, "rejected", error)]
        if item.envelope.hop >= self._config.dispatcher.max_hops:
            message = f"handed back {item.envelope.hop} times: no engine kept it"
            return [Finish(item, "failed", ErrorInfo(ErrorCode.UNHEALTHY, message))]
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

    def _tenant(self, tenant: str) -> TenantConfig:
        return self._steered.tenants.get(tenant) or self._config.tenants.get(tenant, _PLAIN_TENANT)

    def _steer(self, steered: Steered) -> None:
        """Go by other settings from now on."""
        self._steered = steered
        for tenant in [tenant for tenant in self._paused if not self._tenant(tenant).paused]:
            for item in self._paused.pop(tenant):
                if not item.dropped:
                    self._queue.push(item)

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
        blocked: set[Demand] = set()
        while (head := self._queue.head(blocked)) is not None:
            if head.dropped:
                self._queue.discard(head)
            elif self._tenant(head.tenant).paused:
                self._queue.discard(head)
                self._paused.setdefault(head.tenant, []).append(head)
            elif (choice := self._policy.pick(head, self._fleet, now_ms)) is None:
                blocked.add(head.demand)
            else:
                effects.append(self._forward(head, *choice))
        return effects

    def _forward(self, item: Item, pool: str, worker: Worker) -> Forward:
        partition = worker.partition
        if partition is None:
            message = "a policy picked a worker that owns no partition"
            raise AssertionError(message)
        self._queue.serve(item)
        del self._in_hand[item.work]
        self._sending[item.work] = pool, partition
        self._fleet.sending(pool, partition)
        return Forward(item, pool, worker.status.worker, partition)


def _goes_before(other: Item, item: Item) -> bool:
    """Whether another request of the same tenant and class is served first."""
    if (other.tenant, other.service_class) != (item.tenant, item.service_class) or other is item:
        return False
    mine, others = (item.deadline_ms, item.envelope.received_at_ms), (other.deadline_ms, other.envelope.received_at_ms)
    return (others, other.work) < (mine, item.work)
