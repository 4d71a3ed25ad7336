"""Bugs to be planted in the fair queue and the buckets, each one that somebody might really write; the drives find them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

from dispatcher.core.fair_queue import FairQueue, _Wakes
from dispatcher.core.shaping import Band, Shaper, _Bucket
from dispatcher.core.turns import Tenant, Turns

PLANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}

serve, correct, standing, charge = FairQueue.serve, FairQueue.correct, Shaper.standing, Shaper.charge
take, least, fill, put = Turns.take, Turns._least, _Bucket.fill, _Bucket.set


def plant(make: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[object]]:
    """Make a bug known by its function's name."""
    PLANTS[make.__name__] = make
    return make


@plant
def what_is_served_leaves_the_tag_as_it_was():
    return patch.object(Turns, "take", lambda self, line, waiting, cost_ms: take(self, line, waiting, cost_ms and 0.0))


@plant
def every_request_costs_the_same():
    return patch.object(FairQueue, "serve", lambda self, item, _: serve(self, item, 1.0))


@plant
def a_weight_counts_for_nothing():
    return patch.object(Shaper, "weight", lambda *_: 1.0)


@plant
def virtual_time_stands_still():
    def take_alone(self, line, waiting, cost_ms):
        before = self.virtual.copy()
        take(self, line, waiting, cost_ms)
        self.virtual[:] = before

    return patch.object(Turns, "take", take_alone)


@plant
def virtual_time_is_the_finish_of_who_is_served():
    def take_ahead(self, line, waiting, cost_ms):
        tenant = waiting.tenant
        take(self, line, waiting, cost_ms)
        self.virtual[tenant.band] = max(self.virtual[tenant.band], tenant.tags[tenant.band])

    return patch.object(Turns, "take", take_ahead)


@plant
def who_comes_back_has_saved_up_its_share():
    def begin_where_it_was(self, band, tag):
        pass

    return patch.object(Tenant, "begin", begin_where_it_was)


@plant
def who_comes_back_owes_nothing():
    def begin_anew(self, band, tag):
        self.tags[band] = tag

    return patch.object(Tenant, "begin", begin_anew)


@plant
def the_head_start_has_no_end():
    def serve_for_nothing(self, item, cost_ms):
        key = self._interactive.key
        band = serve(self, item, cost_ms)
        self._interactive.key = key
        return band

    return patch.object(FairQueue, "serve", serve_for_nothing)


@plant
def the_head_start_is_had_again_with_each_request():
    def serve_and_begin(self, item, cost_ms):
        band = serve(self, item, cost_ms)
        self._interactive.key = min(self._interactive.key, self._virtual - self._lag)
        return band

    return patch.object(FairQueue, "serve", serve_and_begin)


@plant
def a_correction_has_the_wrong_sign():
    return patch.object(FairQueue, "correct", lambda self, group, tenant, cost, band: correct(self, group, tenant, -cost, band))


@plant
def a_correction_is_forgotten():
    return patch.object(FairQueue, "correct", lambda *_: None)


@plant
def who_borrows_goes_before_who_is_guaranteed():
    return patch.object(Turns, "_least", lambda self, lines, band: least(self, lines, Band(1 - band)))


@plant
def a_guarantee_is_paid_by_what_is_borrowed():
    return patch.object(Shaper, "charge", lambda self, tenant, tokens, now, _: charge(self, tenant, tokens, now, Band.GUARANTEED))


@plant
def who_waits_for_its_time_is_served():
    def impatient(self, tenant, now_ms):
        band, better_ms = standing(self, tenant, now_ms)
        return (Band.BORROWING if band is Band.WAITING else band), better_ms

    return patch.object(Shaper, "standing", impatient)


@plant
def the_cell_lends_without_end():
    return patch.object(Shaper, "lends", lambda *_: True)


@plant
def buckets_fill_twice_as_fast():
    def put_double(self, per_s, burst_s):
        put(self, per_s * 2, burst_s / 2)

    return patch.object(_Bucket, "set", put_double)


@plant
def a_bucket_holds_any_number_of_bursts():
    return patch.object(_Bucket, "set", lambda self, per_s, _: put(self, per_s, 1e9))


@plant
def a_debt_is_forgiven():
    def add_to_zero(self, amount, now_ms):
        self.level = max(0.0, min(self.capacity, self.fill(now_ms) + amount))

    return patch.object(_Bucket, "add", add_to_zero)


@plant
def a_clock_that_was_set_back_freezes_the_buckets():
    def fill_forward(self, now_ms):
        if now_ms > self.at_ms:
            return fill(self, now_ms)
        return self.level

    return patch.object(_Bucket, "fill", fill_forward)


@plant
def a_clock_that_was_set_back_fills_the_buckets():
    def fill_either_way(self, now_ms):
        if now_ms < self.at_ms:
            self.at_ms = 2 * now_ms - self.at_ms
        return fill(self, now_ms)

    return patch.object(_Bucket, "fill", fill_either_way)


@plant
def whoever_waits_on_a_clock_that_was_set_back_is_not_looked_at():
    return patch.object(_Wakes, "names", lambda _: set())


@plant
def who_rises_to_its_guarantee_is_not_looked_at_again():
    def never_better(self, tenant, now_ms):
        band, better_ms = standing(self, tenant, now_ms)
        return band, (better_ms if band is Band.WAITING else float("inf"))

    return patch.object(Shaper, "standing", never_better)
