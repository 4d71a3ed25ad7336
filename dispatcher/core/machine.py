r"""The dispatcher as one machine: `handle(event, now_ms) -> effects`.

    a request:   arrived -> delayed (a retry before its time) -> queued -> forwarded -> durable -> settled
                     \-> finished (refused), or diverted (its tenant has enough in hand) -> durable in a lane
                 while delayed or queued: finished (expired, cancelled), or diverted (it is in the way of others)
                 at any time: dropped (its partition went to somebody else)

It decides late: a request leaves the queue only when a worker has room for it, so order, shares and routing are decided
with fresh knowledge and the engine topics stay shallow. What it costs is predicted when it is forwarded, and charged to
its tenant and to the pool; its completion, where one comes, settles what it truly cost.
"""

import copy
import heapq
from collections.abc import Callable

from dispatcher.core.deadlines import Deadlines
from dispatcher.core.events import (
    Arrived,
    Cancelled,
    Divert,
    Dropped,
    Effect,
    Event,
    Finish,
    Forward,
    LaneRead,
    LaneSeen,
    Sent,
    StatusSeen,
    Steered,
    Tick,
)
from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.fleet import Fleet
from dispatcher.core.item import Item, Work
from dispatcher.core.lanes import Lanes, Refusal
from dispatcher.core.limits import Limits
from dispatcher.core.prediction import Predictor
from dispatcher.core.routing import Choice, Router
from dispatcher.core.running import Charge, Done, Running
from dispatcher.core.shaping import PoolRates, Shaper
from dispatcher.core.turns import BlockKey
from dispatcher.core.view import look
from dispatcher.core.whereabouts import Whereabouts
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import EngineStatus, ErrorInfo
from schemas.questions import DispatcherState, Where
from schemas.topics import Topics

_EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed while it waited", "deadline")
_CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "cancelled while it waited")
_CANCELLED_EARLY = ErrorInfo(ErrorCode.CANCELLED, "cancelled before it was queued")
RUN_MS_MAX, TOKENS_MAX = 86_400_000.0, 100_000_000  # of one run: a completion that says more is not believed
GONE_SPARE = 64  # so many that left the hand are never worth a sweep


class Dispatcher:
    """Queues requests and decides where each goes.

    Args:
        config: Weights, bounds and engines.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tenants, self._pools = dict(config.tenants), config.pool_settings
        self._shaper = Shaper(config.dispatcher.cell, self._tenants)
        self._rates = PoolRates(self._pools)
        self._queue = FairQueue(config.classes, self._shaper)
        self._fleet = Fleet(config.dispatcher.runway_factor, config.dispatcher.status_stale_ms)
        self._predictor = Predictor(config.profiles)
        self._router = Router(config, self._fleet, self._predictor, self._rates)
        self._lanes = Lanes(config.dispatcher.lanes, config.dispatcher.hop, Topics(config.kafka.topic_prefix).lanes)
        self._limits = Limits(config.dispatcher.admission, self._tenants, self._queue, self._lanes, self._router)
        self._whereabouts = Whereabouts(self._tenants, self._queue, self._shaper, self._router, self._rates)
        self._running = Running()
        self._in_hand: dict[Work, Item] = {}  # queued or delayed
        self._deadlines = Deadlines(self._in_hand)
        self._delayed: list[tuple[int, int, Item]] = []
        self._gone = 0  # left the hand since the last sweep, and may still stand in the queue or among the delayed
        self._count = self._now_ms = 0
        self._is_decided = False  # nothing came since the last decision that could change it

    @property
    def queued(self) -> int:
        """Requests that wait, those before their time included."""
        return len(self._in_hand)

    def takes(self, lane: int) -> bool:
        """Whether the next record of a lane may come."""
        return self._lanes.takes(lane)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take in what happened; give what is to be done."""
        kind = type(event)
        if kind is Arrived:
            return self._arrived(event, now_ms)  # type: ignore[arg-type]
        if kind is Sent:
            self._sent(event.work, event.offset, now_ms)  # type: ignore[union-attr]
        elif isinstance(event, Tick):
            return self._decide(now_ms)
        elif isinstance(event, StatusSeen):
            self._seen(event.status, now_ms)
        elif isinstance(event, Dropped):
            self._dropped(event.work, now_ms)
        elif isinstance(event, Cancelled):
            return self._cancelled(event.covers)
        elif isinstance(event, Steered):
            self._steered(event, now_ms)
        elif isinstance(event, LaneSeen):
            self._lanes.seen(event.partition, event.owner, event.end, event.position)
        elif isinstance(event, LaneRead):
            self._lanes.read(event.partition, event.position)
        return []

    def where(self, request_id: str, tenant: str | None, now_ms: int) -> list[Where]:
        """Say where the requests of an id are that are in hand, and why they wait.

        Args:
            request_id: The id.
            tenant: Whose; None for anybody's.
            now_ms: Unix time.
        """
        delayed_ms = {item.work: at_ms for at_ms, _, item in self._delayed if not item.dropped}
        return self._whereabouts.find(self._in_hand.values(), delayed_ms, request_id, tenant, now_ms)

    def state(self, tenant: str | None, now_ms: int) -> DispatcherState:
        """Give all that routing goes by; of what was learned of answers only one tenant's, where it is given."""
        held = self._tenants, self._pools, self._router, self._predictor, self._shaper, self._rates, self._in_hand.values()
        return look(self._config, *held, tenant, now_ms)

    # -- a request comes ----------------------------------------------------------------------------------------------

    def _arrived(self, event: Arrived, now_ms: int) -> list[Effect]:
        item = event.item
        effects: list[Effect] = []
        self._lanes.came(item)
        if item.size_bytes is not None:
            item.input_tokens = self._predictor.input_tokens(item.demand.model, item.size_bytes)
        refused = Finish(item, "cancelled", _CANCELLED_EARLY) if event.is_cancelled else self._refusal(item, now_ms)
        if refused is not None:
            return [refused]
        if not self._is_decided and self._lanes.has_excess(item):
            effects = self._decide(now_ms)  # what can be dispatched makes room
        place = self._lanes.place(item, now_ms)
        if isinstance(place, Refusal):
            effects.append(Finish(item, "rejected", self._limits.no_lane(item, place.value)))
        elif place is not None:
            effects.append(Divert(item, place))
        else:
            self._take_in(item, now_ms)
        return effects

    def _refusal(self, item: Item, now_ms: int) -> Finish | None:
        """Learn what a request needs; end it where it cannot be served, or should not be taken in."""
        item.demand = demand = self._router.demand(item)
        error = self._router.refusal(demand) or self._router.final_error(item)
        if error is not None:
            return Finish(item, "rejected", error)
        if item.envelope.hop >= self._config.dispatcher.max_hops:
            message = f"handed back {item.envelope.hop} times: no engine kept it"
            return Finish(item, "failed", ErrorInfo(ErrorCode.UNHEALTHY, message))
        item.output_tokens = self._predictor.expected_output(item.tenant, demand.model, item.max_output_tokens)
        error = self._limits.refusal(item, now_ms) if item.is_new else None
        return None if error is None else Finish(item, "rejected", error)

    def _take_in(self, item: Item, now_ms: int) -> None:
        self._is_decided = False
        self._in_hand[item.work] = item
        self._deadlines.push(item)
        latest_ms = now_ms + self._config.dispatcher.retry_backoff_ms_max  # whoever wrote it may have another time
        if item.envelope.not_before_ms > now_ms:
            self._count += 1
            heapq.heappush(self._delayed, (min(item.envelope.not_before_ms, latest_ms), self._count, item))
        else:
            self._queue.push(item)

    # -- it goes ------------------------------------------------------------------------------------------------------

    def _decide(self, now_ms: int) -> list[Effect]:
        effects = self._expired(now_ms) + self._held_back(now_ms)
        was_set_back, self._now_ms = now_ms < self._now_ms, now_ms
        while self._delayed and (was_set_back or self._delayed[0][0] <= now_ms):  # on another clock nobody knows how long
            item = heapq.heappop(self._delayed)[2]
            if not item.dropped:
                self._queue.push(item)
        blocked: set[BlockKey] = set()
        sent = 0
        while (head := self._queue.head(blocked, now_ms)) is not None:
            if head.dropped:
                self._queue.discard(head)
            elif (choice := self._router.pick(head, now_ms)) is None:
                blocked.add((head.service_class, head.demand))
            else:
                effects.append(self._forward(head, choice, now_ms))
                sent += 1
        self._limits.paced(sent, now_ms)
        self._is_decided = True
        return effects

    def _forward(self, item: Item, choice: Choice, now_ms: int) -> Forward:
        pool, partition = choice.pool, choice.worker.partition
        if partition is None:
            message = "a policy picked a worker that owns no partition"
            raise AssertionError(message)
        tokens = item.input_tokens + item.output_tokens
        band = self._queue.serve(item, choice.cost_ms)
        self._shaper.charge(item.tenant, tokens, now_ms, band)
        self._rates.charge(pool, tokens, now_ms)
        del self._in_hand[item.work]
        self._lanes.left(item)
        charge = Charge(
            item.tenant,
            item.service_class,
            item.demand.model,
            choice.cost_ms,
            item.input_tokens,
            tokens,
            item.max_output_tokens,
            item.size_bytes,
            band,
            choice.worker.slots,
        )
        self._running.sending(item.work, pool, partition, charge)
        self._fleet.sending(pool, partition, item.service_class)
        return Forward(item, pool, choice.worker.status.worker, partition, choice.placement)

    def _sent(self, work: Work, offset: int | None, now_ms: int) -> None:
        known = self._running.sent(work, offset)
        if known is None:
            self._lanes.sent(work, offset)
            return
        pool, partition, charge, done = known
        self._fleet.sent(pool, partition, charge.service_class, offset)
        self._is_decided = False
        if done is not None:
            self._settle(pool, charge, done, now_ms)

    # -- what engines say ---------------------------------------------------------------------------------------------

    def _seen(self, status: EngineStatus, now_ms: int) -> None:
        pool = status.pool
        for completion in self._fleet.seen(status, now_ms):
            self._router.completed(pool, status.worker, status.epoch, completion.code, now_ms)
            done = Done(status.epoch, completion)
            charge = self._running.completed(pool, done)
            if charge is not None:
                self._settle(pool, charge, done, now_ms)
        self._is_decided = False

    def _settle(self, pool: str, charge: Charge, done: Done, now_ms: int) -> None:
        """Charge what a run truly took instead of what was expected, and learn; what cannot be true changes nothing."""
        run = done.completion
        if not (0 <= run.run_ms <= RUN_MS_MAX and 0 <= run.input_tokens <= TOKENS_MAX and 0 <= run.output_tokens <= TOKENS_MAX):
            return
        cost_ms = run.run_ms / charge.slots - charge.cost_ms
        prompt = run.input_tokens if run.code is None else charge.input_tokens  # of a failed run it is not told
        tokens = prompt + run.output_tokens - charge.tokens
        self._queue.correct(charge.service_class, charge.tenant, cost_ms, charge.band)
        self._shaper.correct(charge.tenant, tokens, now_ms, charge.band)
        self._rates.correct(pool, tokens, now_ms)
        self._predictor.observe(
            pool, done.epoch, charge.model, charge.tenant, run, charge.size_bytes, now_ms, charge.max_output_tokens
        )

    def _steered(self, event: Steered, now_ms: int) -> None:
        """Go by other settings from now on."""
        self._tenants.clear()
        self._tenants.update(self._config.tenants)
        self._tenants.update(event.tenants)
        self._pools.clear()
        self._pools.update(self._config.pool_settings)
        self._pools.update(event.pools)
        self._shaper.steered(now_ms)
        self._rates.steered(now_ms)
        self._queue.steered()
        self._router.steer(event.pools)
        self._is_decided = False

    # -- it ends otherwise --------------------------------------------------------------------------------------------

    def _dropped(self, work: Work, now_ms: int) -> None:
        item = self._in_hand.get(work)
        if item is not None:
            self._let_go(item)
        self._sent(work, None, now_ms)

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

    def _held_back(self, now_ms: int) -> list[Effect]:
        """Move to a lane what keeps the position of its partition back."""
        effects: list[Effect] = []
        for item, lane in self._lanes.held_back(now_ms):
            effects.append(Divert(copy.copy(item), lane))
            self._let_go(item)
        return effects

    def _let_go(self, item: Item) -> None:
        """Take a request out of hand, wherever it stands; it leaves the queue when it surfaces, or with a sweep."""
        del self._in_hand[item.work]
        self._lanes.left(item)
        item.dropped = True
        item.value = b""  # what stands in the queue for a while yet shall not hold memory
        self._gone += 1
        if self._gone > len(self._in_hand) + GONE_SPARE:
            self._gone = 0
            self._queue.sweep()
            self._delayed = [entry for entry in self._delayed if not entry[2].dropped]
            heapq.heapify(self._delayed)
