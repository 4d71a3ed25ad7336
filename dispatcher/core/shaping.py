"""Token buckets over tenants and pools: what is guaranteed, what may be borrowed, and what has to wait.

A bucket fills with its rate up to `rate * burst_s`, and something is let through while it is above zero, whatever its
size: the bucket goes into debt and has to come out of it first. So over any time t no more than rate * t + a burst + one
request passes, and one that always has something waiting gets rate * t less one request. What tokens a request truly
took is known later, and `correct` gives back or takes the difference.

Tenants have two rates each, as classes of HTB have (Devera, Hierarchical Token Bucket, 2002): what is served under the
guarantee pays the guarantee, what is borrowed does not, so whoever borrowed all day still has its guarantee at once when
others come. Both pay the ceiling and the cell. All start empty, since whoever decided before may have given a burst
already: a guarantee counts from the first millisecond's worth on, until then the tenant borrows.

Buckets fill when they are looked at. A clock that is set back costs nobody what it has, and time counts on from there;
one that jumps ahead gives a burst at most. Only who has a rate has buckets: the number of tenants is the clients' choice.
"""

import math
from collections.abc import Mapping
from enum import IntEnum

from msgspec import Struct

from schemas.policy import WEIGHT_MAX, WEIGHT_MIN, CellConfig, PoolSettings, TenantConfig

WAIT_MS_MAX = 86_400_000.0  # whoever waits is looked at again after so long
RATE_MIN = 1e-9  # per second; less is as good as nothing, and is reckoned as this
_PLAIN_TENANT, _PLAIN_POOL = TenantConfig(), PoolSettings()


class Band(IntEnum):
    """How a tenant's next request stands: under its guarantee, on idle capacity, or not yet."""

    GUARANTEED = 0
    BORROWING = 1
    WAITING = 2


class TenantState(Struct, frozen=True):
    """What is known of a tenant's rates; a level below zero is a debt.

    Attributes:
        weight: Its share beside others.
        assured: Unit -> what is left of the guarantee.
        ceilings: Unit -> what is left up to the ceiling.
    """

    band: str
    weight: float
    assured: dict[str, float]
    ceilings: dict[str, float]


class _Bucket:
    """Fills with time, pays for what passes."""

    __slots__ = ("at_ms", "capacity", "level", "per_ms")

    def __init__(self, per_s: float, burst_s: float, at_ms: float) -> None:
        self.level, self.at_ms = 0.0, at_ms
        self.set(per_s, burst_s)

    def set(self, per_s: float, burst_s: float) -> None:
        self.per_ms, self.capacity = max(per_s, RATE_MIN) / 1000.0, per_s * burst_s
        self.level = min(self.level, self.capacity)

    def fill(self, now_ms: float) -> float:
        """Give the level at that time."""
        if now_ms > self.at_ms:
            self.level = min(self.capacity, self.level + self.per_ms * (now_ms - self.at_ms))
        self.at_ms = now_ms  # also where the clock was set back: how long ago is known to nobody
        return self.level

    def add(self, amount: float, now_ms: float) -> None:
        """Take out what is below zero, or give back."""
        self.level = min(self.capacity, self.fill(now_ms) + amount)

    def ready_ms(self, now_ms: float) -> float:
        """When it will be above zero: now, or a whole millisecond later than now."""
        level = self.fill(now_ms)
        if level > 0:
            return now_ms
        return math.floor(now_ms + min(-level / self.per_ms, WAIT_MS_MAX)) + 1.0


class _Rates:
    """The bounds of one thing, in requests and in tokens, where they are set."""

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets: tuple[_Bucket | None, _Bucket | None] = (None, None)

    def set(self, requests_per_s: float | None, tokens_per_s: float | None, burst_s: float, now_ms: float) -> None:
        """Change the rates; what was saved up, or is owed, stays."""
        buckets: list[_Bucket | None] = []
        for bucket, per_s in zip(self.buckets, (requests_per_s, tokens_per_s), strict=True):
            if per_s is None:
                buckets.append(None)
            elif bucket is None:
                buckets.append(_Bucket(per_s, burst_s, now_ms))
            else:
                bucket.fill(now_ms)
                bucket.set(per_s, burst_s)
                buckets.append(bucket)
        self.buckets = (buckets[0], buckets[1])

    def __bool__(self) -> bool:
        return self.buckets != (None, None)

    def ready_ms(self, now_ms: float) -> float:
        """When all are above zero; now where none is set."""
        of_requests, of_tokens = self.buckets
        ready_ms = now_ms if of_requests is None else of_requests.ready_ms(now_ms)
        return ready_ms if of_tokens is None else max(ready_ms, of_tokens.ready_ms(now_ms))

    def charge(self, requests: float, tokens: float, now_ms: float) -> None:
        of_requests, of_tokens = self.buckets
        if of_requests is not None:
            of_requests.add(-requests, now_ms)
        if of_tokens is not None:
            of_tokens.add(-tokens, now_ms)

    def levels(self, now_ms: float) -> dict[str, float]:
        names = ("requests", "tokens")
        return {name: bucket.fill(now_ms) for name, bucket in zip(names, self.buckets, strict=True) if bucket is not None}


class _Tenant:
    """The buckets of one tenant."""

    __slots__ = ("assured", "ceilings", "paused")

    def __init__(self) -> None:
        self.assured, self.ceilings, self.paused = _Rates(), _Rates(), False

    def set(self, given: TenantConfig, now_ms: float) -> None:
        self.assured.set(given.requests_per_s, given.tokens_per_s, given.burst_s, now_ms)
        self.ceilings.set(given.requests_per_s_max, given.tokens_per_s_max, given.burst_s, now_ms)
        self.paused = given.paused


class Shaper:
    """Says how each tenant stands.

    Args:
        cell: Bounds of all together; guaranteed requests pay it too, and pass when it is in debt.
        tenants: The tenants that have settings; read again when `steered`. Whoever is not in it has no rates.
    """

    def __init__(self, cell: CellConfig, tenants: Mapping[str, TenantConfig]) -> None:
        self._config, self._settings = cell, tenants
        self._cell = _Rates()
        self._tenants: dict[str, _Tenant] = {}  # of those that have rates, once they were seen
        self._since_ms = math.nan  # from here all buckets fill
        self.has_cell = cell.requests_per_s_max is not None or cell.tokens_per_s_max is not None
        self.rated: set[str] = set()  # who has a rate, or is paused: all others borrow, always
        self._read()

    def weight(self, tenant: str) -> float:
        """The share of a tenant beside others."""
        return self._weights.get(tenant, 1.0)

    def credit_ms(self, tenant: str) -> float:
        """Engine time that a tenant may be behind its share and catch up on, after it could not be served: one burst."""
        return self._settings.get(tenant, _PLAIN_TENANT).burst_s * 1000.0

    def band(self, tenant: str, now_ms: float) -> Band:
        """How a tenant's next request stands."""
        band = self.standing(tenant, now_ms)[0]
        return Band.WAITING if band is Band.BORROWING and not self.lends(now_ms) else band

    def standing(self, tenant: str, now_ms: float) -> tuple[Band, float]:
        """How a tenant stands, the cell aside, and when it will stand better by time alone (never: inf)."""
        if tenant not in self.rated:
            return Band.BORROWING, math.inf
        known = self._known(tenant, now_ms)
        if known.paused:
            return Band.WAITING, math.inf
        ready_ms = known.ceilings.ready_ms(now_ms)
        assured_ms = known.assured.ready_ms(now_ms) if known.assured else math.inf
        if ready_ms > now_ms:
            return Band.WAITING, ready_ms
        return (Band.BORROWING, assured_ms) if assured_ms > now_ms else (Band.GUARANTEED, math.inf)

    def lends(self, now_ms: float) -> bool:
        """Whether the cell has something left to be borrowed."""
        return not self.has_cell or self.lends_at_ms(now_ms) <= now_ms

    def lends_at_ms(self, now_ms: float) -> float:
        """When the cell has something left to be borrowed."""
        self._begin(now_ms)
        return self._cell.ready_ms(now_ms)

    def ready_ms(self, tenant: str, now_ms: float) -> float:
        """When a tenant may be served next: now, or later; inf while it is paused."""
        band, better_ms = self.standing(tenant, now_ms)
        if band is Band.GUARANTEED:
            return now_ms
        lends_ms = self.lends_at_ms(now_ms) if self.has_cell else now_ms
        if band is Band.BORROWING:
            return min(lends_ms, better_ms)
        return max(better_ms, min(lends_ms, self._assured_ms(tenant, now_ms)))

    def charge(self, tenant: str, tokens: float, now_ms: float, band: Band) -> None:
        """Pay for one request.

        Args:
            tenant: Whose it is.
            tokens: Of its prompt, and those expected of its answer.
            now_ms: Unix time.
            band: In which it was served.
        """
        self._pay(tenant, 1.0, tokens, now_ms, band)

    def correct(self, tenant: str, tokens: float, now_ms: float, band: Band) -> None:
        """Pay the tokens that a request took beyond what was charged, or get back (below zero) what it did not take.

        Args:
            tenant: Whose it is.
            tokens: The difference.
            now_ms: Unix time.
            band: In which it was served.
        """
        self._pay(tenant, 0.0, tokens, now_ms, band)

    def steered(self, now_ms: float) -> None:
        """Read the settings again; levels stay, new buckets are empty."""
        self._begin(now_ms)
        before = set(self.rated)
        self._read()
        for tenant in list(self._tenants):
            if tenant in self.rated:
                self._tenants[tenant].set(self._settings[tenant], now_ms)
            else:
                del self._tenants[tenant]
        for tenant in self.rated - before:
            self._tenants[tenant] = _Tenant()
            self._tenants[tenant].set(self._settings[tenant], now_ms)

    def state(self, now_ms: float) -> dict[str, TenantState]:
        """How all stand that have settings, by name."""
        found = {}
        for tenant in sorted(self._settings):
            levels: tuple[dict[str, float], dict[str, float]] = ({}, {})
            if tenant in self.rated:
                known = self._known(tenant, now_ms)
                levels = known.assured.levels(now_ms), known.ceilings.levels(now_ms)
            found[tenant] = TenantState(self.band(tenant, now_ms).name.lower(), self.weight(tenant), *levels)
        return found

    def _read(self) -> None:
        rates = [one.tokens_per_s for one in self._settings.values() if one.tokens_per_s is not None]
        mean = max(sum(rates) / len(rates), RATE_MIN) if rates else 1.0
        self._weights = {
            name: one.weight or min(max((one.tokens_per_s or mean) / mean, WEIGHT_MIN), WEIGHT_MAX)
            for name, one in self._settings.items()
        }
        self.rated.clear()
        self.rated.update(name for name, one in self._settings.items() if one.paused or any(_rates_of(one)))

    def _begin(self, now_ms: float) -> None:
        if math.isnan(self._since_ms):
            self._since_ms = now_ms
            self._cell.set(self._config.requests_per_s_max, self._config.tokens_per_s_max, self._config.burst_s, now_ms)

    def _known(self, tenant: str, now_ms: float) -> _Tenant:
        known = self._tenants.get(tenant)
        if known is None:
            self._begin(now_ms)
            known = self._tenants[tenant] = _Tenant()
            known.set(self._settings[tenant], self._since_ms)
        return known

    def _assured_ms(self, tenant: str, now_ms: float) -> float:
        assured = self._known(tenant, now_ms).assured
        return assured.ready_ms(now_ms) if assured else math.inf

    def _pay(self, tenant: str, requests: float, tokens: float, now_ms: float, band: Band) -> None:
        if self.has_cell:
            self._begin(now_ms)
            self._cell.charge(requests, tokens, now_ms)
        if tenant in self.rated:
            known = self._known(tenant, now_ms)
            known.ceilings.charge(requests, tokens, now_ms)
            if band is Band.GUARANTEED:
                known.assured.charge(requests, tokens, now_ms)


class PoolRates:
    """Says which pools may be sent something.

    Args:
        pools: The pools' settings; read again when `steered`. One that is not in it has no bounds.
    """

    def __init__(self, pools: Mapping[str, PoolSettings]) -> None:
        self._settings = pools
        self._pools: dict[str, _Rates] = {}  # of those that have rates, once they were seen

    def allows(self, pool: str, now_ms: float) -> bool:
        """Whether a pool may be sent a request now."""
        return self.ready_ms(pool, now_ms) <= now_ms

    def ready_ms(self, pool: str, now_ms: float) -> float:
        """When a pool may be sent the next request: now, or later; inf while it is paused."""
        given = self._settings.get(pool, _PLAIN_POOL)
        if given.paused:
            return math.inf
        rates = self._rates(pool, given, now_ms)
        return now_ms if rates is None else rates.ready_ms(now_ms)

    def charge(self, pool: str, tokens: float, now_ms: float) -> None:
        """Pay for one request and its tokens."""
        self._pay(pool, 1.0, tokens, now_ms)

    def correct(self, pool: str, tokens: float, now_ms: float) -> None:
        """Pay the tokens that a request took beyond what was charged, or get back (below zero) what it did not take."""
        self._pay(pool, 0.0, tokens, now_ms)

    def steered(self, now_ms: float) -> None:
        """Read the settings again; levels stay, new buckets are empty."""
        for pool in list(self._pools):
            given = self._settings.get(pool, _PLAIN_POOL)
            self._pools[pool].set(given.requests_per_s_max, given.tokens_per_s_max, given.burst_s, now_ms)
            if not self._pools[pool]:
                del self._pools[pool]

    def _rates(self, pool: str, given: PoolSettings, now_ms: float) -> _Rates | None:
        rates = self._pools.get(pool)
        if rates is None and (given.requests_per_s_max is not None or given.tokens_per_s_max is not None):
            rates = self._pools[pool] = _Rates()
            rates.set(given.requests_per_s_max, given.tokens_per_s_max, given.burst_s, now_ms)
        return rates

    def _pay(self, pool: str, requests: float, tokens: float, now_ms: float) -> None:
        rates = self._rates(pool, self._settings.get(pool, _PLAIN_POOL), now_ms)
        if rates is not None:
            rates.charge(requests, tokens, now_ms)


def _rates_of(given: TenantConfig) -> tuple[float | None, ...]:
    return given.requests_per_s, given.tokens_per_s, given.requests_per_s_max, given.tokens_per_s_max
