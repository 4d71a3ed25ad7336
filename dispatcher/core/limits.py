"""What is refused at once instead of being left to wait in vain: too many of one tenant, and what cannot be in time.

Only a request that comes from its client is asked; whatever the system has taken in before is served, or expires.
"""

from collections.abc import Mapping

from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.item import NEVER_MS, Item
from dispatcher.core.lanes import Lanes
from dispatcher.core.routing import Router
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo
from schemas.policy import AdmissionConfig, TenantConfig

RETRY_AFTER_MS_MIN, RETRY_AFTER_MS_MAX = 100, 600_000
PACE_SPAN_MS = 1_000  # over which dispatches are counted at least


class Limits:
    """Refuses.

    Args:
        config: What is refused.
        tenants: The tenants that have settings.
        queue: What waits in memory.
        lanes: What waits in lanes.
        router: Tells what engines are predicted to take.
    """

    def __init__(
        self, config: AdmissionConfig, tenants: Mapping[str, TenantConfig], queue: FairQueue, lanes: Lanes, router: Router
    ) -> None:
        self._config, self._tenants, self._queue, self._lanes, self._router = config, tenants, queue, lanes, router
        self._since_ms: int | None = None
        self._sent = 0
        self._gap_ms = float(RETRY_AFTER_MS_MIN)  # between two dispatches of late

    def refusal(self, item: Item, now_ms: int) -> ErrorInfo | None:
        """Say why a new request is refused, or None."""
        given = self._tenants.get(item.tenant)
        most = (given.queue_max if given is not None else None) or self._config.queue_max
        if most is not None and (waiting := self.waiting(item)) >= most:
            name = (
                f"tenants.{item.tenant}.queue_max" if given is not None and given.queue_max else "dispatcher.admission.queue_max"
            )
            message = f"tenant {item.tenant!r} has {waiting} requests waiting: at most {most} may ({name})"
            return ErrorInfo(ErrorCode.CAPACITY_EXCEEDED, message, "tenant", self._retry_after_ms(item))
        if item.deadline_ms < NEVER_MS and self._config.deadline == "refuse" and item.deadline_ms > now_ms:
            soonest = self._router.soonest(item, now_ms)
            left_ms = item.deadline_ms - now_ms
            if soonest is not None and soonest.run_ms > left_ms:
                message = f"its deadline is in {left_ms} ms, and the soonest engine is predicted to take {soonest.run_ms:.0f} ms"
                return ErrorInfo(ErrorCode.CAPACITY_EXCEEDED, message, "deadline")
        return None

    def no_lane(self, item: Item, reason: str) -> ErrorInfo:
        """The refusal of a request that can wait nowhere."""
        return ErrorInfo(ErrorCode.CAPACITY_EXCEEDED, reason, "tenant", self._retry_after_ms(item))

    def waiting(self, item: Item) -> int:
        """How many requests of its tenant and class wait, in memory and in lanes."""
        service_class, tenant = item.service_class, item.tenant
        return self._queue.count(service_class, tenant) + self._lanes.count(service_class, tenant)

    def paced(self, sent: int, now_ms: int) -> None:
        """So many were dispatched now."""
        if self._since_ms is None or now_ms < self._since_ms:
            self._since_ms, self._sent = now_ms, 0
        self._sent += sent
        if now_ms - self._since_ms >= PACE_SPAN_MS and self._sent:
            self._gap_ms = (now_ms - self._since_ms) / self._sent
            self._since_ms, self._sent = now_ms, 0

    def _retry_after_ms(self, item: Item) -> int:
        """When one of its tenant's will have gone, if all that wait go on as they went of late."""
        own = max(self._queue.count(item.service_class, item.tenant), 1)
        return int(min(max(self._gap_ms * len(self._queue) / own, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX))
