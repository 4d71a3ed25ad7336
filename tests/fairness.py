"""The dispatcher's fairness driven at random and held against its theorems: by the property tests, long, and with bugs planted.

Each drive takes the dice and a number of steps, and gives how much of the bound it came to use, 1.0 being all of it.
What goes beyond is a `Broken`, which names what was promised and by how much it was missed.
"""

import math
from collections import deque

from broker.transport.protocol import TopicPartition
from dispatcher.core.fair_queue import FairQueue
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.shaping import Band, Shaper
from schemas.messages import Envelope
from schemas.policy import CellConfig, ClassConfig, TenantConfig

ANY, OTHER = Demand("auto", "auto", "any"), Demand("other", "auto", "any")
SOURCE = TopicPartition("requests", 0)
CLOSE = 1e-6  # what floats lose on the way, as a share of the bound
CAPACITY_MS = 40.0  # engine time that there is for each step at most


class Broken(AssertionError):
    """A bound that does not hold."""


def item(n, tenant, service_class="batch", demand=ANY, deadline_ms=NEVER_MS):
    envelope = Envelope(id=f"r{n}", tenant=tenant, service_class=service_class, origin=("requests", 0, n), received_at_ms=n)
    return Item((SOURCE, n), envelope, demand, 1.0, 0, deadline_ms, b"", ())


def queue(tenants=None, cell=None, **classes):
    """A queue and its shaper; `tenants`: name -> settings, or its weight."""
    given = {name: one if isinstance(one, TenantConfig) else TenantConfig(weight=one) for name, one in (tenants or {}).items()}
    shaper = Shaper(cell or CellConfig(), given)
    return FairQueue(ClassConfig(**classes), shaper), shaper


def hold(what, value, bound):
    """Give the share of the bound that is used.

    Raises:
        Broken: It is more than all.
    """
    if value > bound * (1 + CLOSE) + CLOSE:
        message = f"{what}: {value:.6g} where {bound:.6g} is the most"
        raise Broken(message)
    return value / bound if bound else 0.0


class Range:
    """How far a figure rose and fell over any stretch of time."""

    def __init__(self, value):
        self.value = self.least = self.most = value
        self.rise = self.fall = 0.0

    def move(self, change):
        self.value += change
        self.least, self.most = min(self.least, self.value), max(self.most, self.value)
        self.rise, self.fall = max(self.rise, self.value - self.least), max(self.fall, self.most - self.value)


class Gaps:
    """Between each two that wait all the while, the difference of what they got for their weights.

    Args:
        weights: Name -> weight.
        bound: Of two names, how far the difference may move over any stretch of time.
        what: The promise.
        strict: Whether more than the bound is broken.
    """

    def __init__(self, weights, bound, what, *, strict=True):
        self._weights, self._bound, self._what, self._strict = weights, bound, what, strict
        self._ranges = {}
        self.used = 0.0

    def waits(self, name, others):
        """One came to wait, beside those that do."""
        for other in others:
            if other != name:
                self._ranges[name, other] = Range(0.0)

    def stops(self, name):
        """One does not wait any more."""
        for pair in [pair for pair in self._ranges if name in pair]:
            del self._ranges[pair]

    def got(self, name, work):
        """One was served so much."""
        for pair, moved in self._ranges.items():
            if name in pair:
                moved.move(work / self._weights[name] * (1 if pair[0] == name else -1))
                wide = max(moved.rise, moved.fall)
                bound = self._bound(*pair)
                self.used = max(self.used, hold(f"{self._what} of {pair}", wide, bound) if self._strict else wide / bound)


def tenants_of(dice, most=5):
    """Names with weights, and the greatest cost of each."""
    names = "abcde"[: dice.randint(2, most)]
    weights = {name: dice.choice((0.5, 1.0, 1.0, 3.0, 10.0)) for name in names}
    largest = {name: dice.choice((1.0, 10.0, 10.0, 100.0)) for name in names}
    return weights, largest


def cost_of(dice, largest):
    return largest if dice.random() < 0.5 else largest * dice.uniform(0.05, 1.0)


def share_among_tenants(dice, steps, policy=None):
    """Random arrivals, weights, demands and capacity: the bound of start-time fair queueing between any two that wait.

    `policy` puts another queue in the place of ours, which is measured and held against nothing.
    """
    weights, largest = tenants_of(dice)
    other = {name: dice.choice((0.0, 0.5, 1.0)) for name in weights}  # of its requests, the share of the other demand
    q = policy(weights) if policy else queue(weights)[0]
    gaps = Gaps(weights, lambda i, j: largest[i] / weights[i] + largest[j] / weights[j], "the gap", strict=policy is None)
    waiting = dict.fromkeys(weights, 0)
    busy = dice.choice((0.3, 1.0, 2.0))
    n, credit = 0, 0.0
    for _ in range(steps):
        for name in weights:
            for _ in range(dice.choice((0, 0, 0, 1, 2, 10)) if dice.random() < busy / 2 else 0):
                if waiting[name] < 100:
                    n += 1
                    q.push(item(n, name, demand=OTHER if dice.random() < other[name] else ANY))
                    waiting[name] += 1
                    if waiting[name] == 1:
                        gaps.waits(name, [other for other in weights if waiting[other]])
        credit = min(credit, 0.0) + dice.choice((0.0, CAPACITY_MS / 4, CAPACITY_MS))
        while credit > 0 and (head := q.head((), n)) is not None:
            name = head.tenant
            cost = cost_of(dice, largest[name])
            q.serve(head, cost)
            credit -= cost
            gaps.got(name, cost)
            waiting[name] -= 1
            if not waiting[name]:
                gaps.stops(name)
    return gaps.used


def share_true_work(dice, steps):
    """Costs are guessed and corrected later: the bound holds for true work but for twice what is not corrected yet."""
    weights, largest = tenants_of(dice)
    q, _ = queue(weights)
    wrong = {name: largest[name] * dice.choice((0.1, 1.0, 3.0)) for name in weights}
    open_max = dice.choice((1, 4, 8))  # of each tenant; all of them are less than the credit

    def slack(name):
        return (largest[name] + 2 * open_max * wrong[name]) / weights[name]

    gaps = Gaps(weights, lambda i, j: slack(i) + slack(j), "the gap in true work")
    running = {name: deque() for name in weights}
    n = 0
    waiting = dict.fromkeys(weights, 0)
    lean = {name: dice.choice((-1, 0, 1)) for name in weights}  # guesses may all be wrong to one side
    for _ in range(steps):
        for name in weights:
            if waiting[name] < 20 and dice.random() < 0.6:
                n += 1
                q.push(item(n, name))
                waiting[name] += 1
                if waiting[name] == 1:
                    gaps.waits(name, [other for other in weights if waiting[other]])
        for _ in range(dice.choice((0, 1, 2))):
            head = q.head((), 0)
            if head is None:
                break
            name = head.tenant
            cost = cost_of(dice, largest[name])
            error = wrong[name] * (lean[name] or dice.uniform(-1, 1))  # true less guessed
            guess = max(cost - error, 0.0)
            band = q.serve(head, guess)
            gaps.got(name, cost)
            waiting[name] -= 1
            if not waiting[name]:
                gaps.stops(name)
            running[name].append((cost - guess, band))
        for name, ones in running.items():
            while len(ones) >= open_max or (ones and dice.random() < 0.3):
                error, band = ones.popleft() if dice.random() < 0.5 else ones.pop()
                q.correct("batch", name, error, band)
    return gaps.used


def share_between_classes(dice, steps):
    """Interactive runs ahead by the head start and no further, however it comes and goes; batch never runs ahead of its share."""
    weights = {"interactive": dice.choice((1.0, 4.0, 9.0)), "batch": dice.choice((0.5, 1.0, 2.0))}
    largest = {name: dice.choice((1.0, 10.0, 50.0)) for name in weights}
    head_start = dice.choice((0.0, 100.0, 1_000.0))
    q, _ = queue(interactive_weight=weights["interactive"], batch_weight=weights["batch"], interactive_head_start_ms=head_start)
    plain = sum(largest[name] / weights[name] for name in weights)
    ahead = head_start / weights["interactive"]
    waiting = dict.fromkeys(weights, 0)
    lead = behind = None  # of interactive before batch: while both wait; while batch does
    used, n = 0.0, 0
    pushes = {"interactive": dice.choice((0.2, 1.0, 2.0)), "batch": dice.choice((0.1, 1.0))}
    for _ in range(steps):
        for name in weights:
            if waiting[name] < 50 and dice.random() < pushes[name]:
                for _ in range(dice.choice((1, 3))):
                    n += 1
                    q.push(item(n, f"t{n % 3}", name))
                    waiting[name] += 1
        if lead is None and all(waiting.values()):
            lead = Range(0.0)
        if behind is None and waiting["batch"]:
            behind = Range(0.0)
        for _ in range(dice.choice((0, 1, 3))):
            head = q.head((), 0)
            if head is None:
                break
            name = head.service_class
            cost = cost_of(dice, largest[name])
            q.serve(head, cost)
            waiting[name] -= 1
            move = cost / weights[name] * (1 if name == "interactive" else -1)
            if behind is not None:
                behind.move(move)
                used = max(used, hold("batch behind its share", behind.rise, plain + ahead))
                behind = behind if waiting["batch"] else None
            if lead is not None:
                lead.move(move)
                used = max(used, hold("batch before its share", lead.fall, plain))
                lead = lead if all(waiting.values()) else None
    return used


class Fluid:
    """What a bucket promises over all stretches of time at once: no more than rate * t + burst + one request."""

    def __init__(self, per_s, most, what):
        self._per_ms, self._most, self._what = per_s / 1_000, most, what
        self.beyond = Range(0.0)  # what passed, less rate * t

    def later(self, ms):
        self.beyond.move(-self._per_ms * ms)

    def passed(self, amount):
        self.beyond.move(amount)
        return hold(self._what, self.beyond.rise, self._most)


def buckets_of_a_tenant(dice, steps):
    """Ceilings and guarantees as their fluid models say, within a burst; a clock that is set back changes neither."""
    largest = {"requests": 1.0, "tokens": dice.choice((10.0, 1_000.0))}
    rate = {unit: largest[unit] * dice.uniform(0.5, 30.0) for unit in largest}
    units = dice.choice((("requests",), ("tokens",), ("requests", "tokens")))
    burst_s, more = dice.choice((0.05, 1.0, 3.0)), dice.choice((1.0, 2.0, 10.0))
    given = {f"{unit}_per_s": rate[unit] for unit in units} | {f"{unit}_per_s_max": rate[unit] * more for unit in units}
    shaper = Shaper(CellConfig(), {"a": TenantConfig(burst_s=burst_s, **given)})
    most = {unit: rate[unit] * burst_s + largest[unit] for unit in units}
    ceilings = [
        Fluid(rate[unit] * more, most[unit] + rate[unit] * burst_s * (more - 1), f"{unit} to the ceiling") for unit in units
    ]
    assured = [Fluid(rate[unit], most[unit], f"{unit} guaranteed") for unit in units]
    borrows, idles, jumps = (dice.random() < 0.4 for _ in range(3))
    now, used = float(dice.randrange(10**12)), 0.0
    shaper.band("a", now)
    for _ in range(steps):
        ms = dice.choice((0.0, 0.25, 1.0, 7.0, 40.0, 1_000.0 if idles else 1.0))
        now += ms
        for fluid in ceilings + assured:
            fluid.later(ms)
        if jumps and dice.random() < 0.05:
            shaper.band("a", now)  # what has passed until then is known
            now -= dice.choice((5.0, 3_600_000.0))
        if idles and dice.random() < 0.5:
            continue
        while (band := shaper.band("a", now)) is Band.GUARANTEED or (borrows and band is Band.BORROWING):
            true = {"requests": 1.0, "tokens": cost_of(dice, largest["tokens"])}
            guess = true["tokens"] * dice.choice((1.0, 1.0, 0.5, 2.0))
            shaper.charge("a", guess, now, band)
            shaper.correct("a", true["tokens"] - guess, now, band)
            for unit, ceiling, guarantee in zip(units, ceilings, assured, strict=True):
                used = max(used, ceiling.passed(true[unit]))
                if band is Band.GUARANTEED:
                    used = max(used, guarantee.passed(true[unit]))
        if len(units) == 1 and not idles and not borrows:
            hold("a guarantee behind its rate", assured[0].beyond.fall, largest[units[0]] + rate[units[0]] * min(burst_s, 0.041))
        ready_ms, debt_ms = shaper.ready_ms("a", now), max(2_000 * largest[unit] / rate[unit] for unit in units)
        if (band is Band.WAITING) != (ready_ms > now) or ready_ms > now + debt_ms + 2:
            message = f"ready {ready_ms - now} ms from now, where the band is {band.name}"
            raise Broken(message)
    return used


class Guarantees:
    """Tenants with guarantees and ceilings that come and go, on capacity that is enough for the guarantees.

    Each gets its guarantee while it waits, nobody more than its ceiling, all together no more than the cell allows, and
    who borrows does so by weight.
    """

    TOKENS, BURST_S = 10.0, 0.1  # of every request; of every rate

    def __init__(self, dice):
        names = "abcdef"[: dice.randint(2, 6)]
        self.dice, self.cost_ms = dice, dice.choice((0.5, 5.0))
        self.rate = {name: dice.choice((None, 100.0, 1_000.0, 4_000.0)) for name in names}
        self.ceiling = {
            name: (self.rate[name] or 100.0) * dice.choice((1.0, 1.5)) if dice.random() < 0.3 else None for name in names
        }
        needed = sum(one or 0.0 for one in self.rate.values())
        self.per_ms = needed / 1_000 / self.TOKENS * self.cost_ms + dice.choice((0.02, 0.5, 2.0)) * self.cost_ms
        cell = CellConfig(tokens_per_s_max=max(needed, 500.0) * dice.choice((1.1, 2.0))) if dice.random() < 0.5 else CellConfig()
        rates = {name: {"tokens_per_s": self.rate[name], "tokens_per_s_max": self.ceiling[name]} for name in names}
        self.queue, self.shaper = queue({name: TenantConfig(burst_s=self.BURST_S, **one) for name, one in rates.items()}, cell)
        weights = {name: self.shaper.weight(name) for name in names}
        self.gaps = Gaps(weights, lambda i, j: self.cost_ms * (1 / weights[i] + 1 / weights[j]), "the gap in what is borrowed")
        self.under = {name: self.fluid(one, self.TOKENS, f"{name} to its ceiling") for name, one in self.ceiling.items() if one}
        saved = self.BURST_S * needed + self.TOKENS * (len(names) + 1)  # guarantees are met where nothing is lent
        if cell.tokens_per_s_max:
            burst = cell.tokens_per_s_max * cell.burst_s
            self.under["the cell"] = Fluid(cell.tokens_per_s_max, burst + saved, "all to the cell's bound")
        self.got = {}  # of those that wait
        self.n, self.now, self.credit_ms = 0, float(dice.randrange(10**12)), 0.0

    def fluid(self, per_s, more, what):
        return Fluid(per_s, per_s * self.BURST_S + more, what)

    def comes(self, name):
        if not self.got.get(name):
            self.got[name] = Fluid(self.rate[name] or 0.0, math.inf, "")
            self.gaps.waits(name, [other for other in self.got if not self.ceiling[other] and not self.ceiling[name]])
        self.n += 1
        self.queue.push(item(self.n, name))

    def later(self):
        ms = self.dice.choice((1.0, 1.0, 3.0, 20.0))
        self.now += ms
        self.credit_ms = min(self.credit_ms, 0.0) + self.per_ms * ms
        for fluid in (*self.got.values(), *self.under.values()):
            fluid.later(ms)

    def set_back(self):
        self.now -= self.dice.choice((5.0, 3_600_000.0))
        for name in self.got:  # what filled until then may be lost to it, and nothing from then on
            self.got[name] = Fluid(self.rate[name] or 0.0, math.inf, "")

    def serve(self, head, *, stays):
        name = head.tenant
        band = self.queue.serve(head, self.cost_ms)
        self.shaper.charge(name, self.TOKENS, self.now, band)
        self.credit_ms -= self.cost_ms
        for fluid in (self.got[name], self.under.get(name), self.under.get("the cell")):
            if fluid is not None:
                fluid.passed(self.TOKENS)
        if band is Band.BORROWING and not self.ceiling[name]:
            self.gaps.got(name, self.cost_ms)
        if stays:
            self.comes(name)
        else:
            del self.got[name]
            self.gaps.stops(name)

    def check(self):
        ready_ms = self.queue.next_ready_ms(self.now)
        if self.got and self.credit_ms > 0 and not self.now < ready_ms <= self.now + 1e5:
            message = f"nobody is ready, but the next would be {ready_ms - self.now} ms from now"
            raise Broken(message)
        for name, fluid in self.got.items():
            if self.rate[name] and not self.ceiling[name]:
                hold(f"{name} behind its guarantee", fluid.beyond.fall, self.rate[name] * self.BURST_S + 2 * self.TOKENS)


def share_of_guarantees(dice, steps):
    """See `Guarantees`."""
    cell = Guarantees(dice)
    stays, jumps = {}, dice.random() < 0.3
    sleepy = dice.choice((0.0, 0.002, 0.02))
    for _ in range(steps):
        for name in cell.rate:
            if dice.random() < sleepy or name not in stays:
                stays[name] = name not in stays or not stays[name]
            if stays[name] and name not in cell.got:
                cell.comes(name)
        cell.later()
        while cell.credit_ms > 0 and (head := cell.queue.head((), cell.now)) is not None:
            cell.serve(head, stays=stays[head.tenant])
        cell.check()
        if jumps and dice.random() < 0.02:
            cell.set_back()
    return cell.gaps.used


DRIVES = {
    drive.__name__: drive
    for drive in (share_among_tenants, share_true_work, share_between_classes, buckets_of_a_tenant, share_of_guarantees)
}
