"""Which experts stay resident: heat, urgency by the order of layers, foresight, budgets."""

import random

import pytest

from engine_consumers.core.experts import Residents

WINDOW_S = 300.0


def filled(places, layers=(4, 4), chosen=1, **options):
    residents = Residents(layers, chosen, places, **options)
    for key in [(layer, expert) for layer, experts in enumerate(layers) for expert in range(experts)][:places]:
        residents.admit(key)
    return residents


def warm(residents, layer, expert, times, now_s=0.0):
    for _ in range(times):
        residents.visit(layer, {expert}, now_s)


def test_what_is_absent_is_told_and_what_is_there_is_not():
    residents = filled(3)
    assert residents.visit(0, {1, 3}, 0.0) == [(0, 3)]
    assert list(residents) == [(0, 0), (0, 1), (0, 2)]


def test_the_hot_one_stays_and_a_cold_newcomer_is_the_next_to_go():
    residents = filled(4, layers=(6,))
    for expert in range(4):
        warm(residents, 0, expert, 10)
    assert residents.visit(0, {4}, 0.0) == [(0, 4)]
    gone = residents.admit((0, 4))
    assert gone in [(0, expert) for expert in range(4)]
    assert residents.admit((0, 5)) == (0, 4)


def test_activations_of_an_hour_ago_do_not_count_beside_those_of_now():
    residents = filled(2, layers=(3,))
    warm(residents, 0, 0, 100, now_s=0.0)
    warm(residents, 0, 1, 5, now_s=3600.0)
    assert residents.admit((0, 2)) == (0, 0)
    assert residents.hottest(1)[0][:2] == (0, 1)


def test_a_pause_alone_changes_no_heat():
    residents = filled(2, layers=(3,))
    warm(residents, 0, 0, 30, now_s=0.0)
    residents.visit(0, {0}, 10 * WINDOW_S)
    assert residents.hottest(1) == [(0, 0, pytest.approx(1.0, abs=1e-3))]


def test_of_two_as_hot_the_one_whose_layer_comes_later_goes():
    residents = Residents((2, 2, 2), 1, 2)
    for layer in range(3):
        warm(residents, layer, 0, 10)
    residents.admit((0, 0))
    residents.admit((1, 0))
    residents.visit(0, {0}, 0.0)
    assert residents.admit((2, 0)) == (0, 0)  # layer 1 is next, layer 0 comes after all others


def test_what_is_foreseen_is_fetched_where_it_is_likely_and_something_else_is_less_urgent():
    residents = filled(4, layers=(4, 4))  # all of layer 0
    for expert in (0, 1):
        warm(residents, 0, expert, 10)
    residents.foresee(1, [[2, 0]])
    assert residents.fetch_ahead(1, 4) == []  # nobody knows yet how often a router is right
    for _ in range(400):
        residents.foresee(1, [[2, 0]])
        residents.visit(1, {2}, 0.0, [[2]])
        residents.visit(0, {0}, 0.0)
    residents.foresee(1, [[2, 0]])
    assert residents.fetch_ahead(1, 4) == [(1, 2)]
    assert residents.is_worth((1, 2))
    assert residents.admit((1, 2)) in [(0, 2), (0, 3)]  # the cold ones of layer 0


def test_a_router_that_was_wrong_is_believed_no_more():
    residents = filled(4, layers=(4, 4))
    for right in (True, False):
        for _ in range(400):
            residents.foresee(1, [[2, 0]])
            residents.visit(1, {2 if right else 1}, 0.0, [[2 if right else 1]])
        residents.foresee(1, [[2, 0]])
        assert bool(residents.fetch_ahead(1, 4)) is right
        residents.visit(1, set(), 0.0)


def test_two_of_the_same_heat_do_not_chase_each_other_out():
    residents = filled(1, layers=(2, 2))
    for layer in (0, 1):
        for expert in (0, 1):
            warm(residents, layer, expert, 20)
    assert residents.distance((0, 0)) == pytest.approx(residents.distance((0, 1)), rel=0.1)
    assert not residents.is_worth((0, 1))


def test_the_budget_shrinks_to_one_and_comes_back():
    residents = filled(6, layers=(4, 4))
    warm(residents, 1, 1, 20)
    gone = residents.resize(0)
    assert residents.places == len(residents) == 1
    assert list(residents) == [(1, 1)]
    assert len(gone) == len(set(gone)) == 5
    assert residents.resize(3) == []
    assert residents.admit((0, 0)) is None
    assert residents.is_worth((0, 1))


def rate(visits, layers, places, *, least_recently_used=False):
    """The share of needed experts that are resident, without foresight; by our order, or the usual one."""
    residents, used = Residents([layers[1]] * layers[0], 2, places), {}
    hits = asked = 0
    for number, (layer, needed) in enumerate(visits):
        absent = residents.visit(layer, needed, number * 0.01)
        asked, hits = asked + len(needed), hits + len(needed) - len(absent)
        for key in absent:
            residents.admit(key)
    if not least_recently_used:
        return hits / asked
    hits = 0
    for number, (layer, needed) in enumerate(visits):
        for expert in sorted(needed):
            hits += (layer, expert) in used
            used.pop((layer, expert), None)
            if len(used) == places:
                del used[next(iter(used))]
            used[layer, expert] = number
    return hits / asked


def test_on_layers_visited_in_turn_it_hits_far_more_often_than_the_least_recently_used():
    dice = random.Random(1)
    weights = [1 / (n + 1) for n in range(8)]
    visits = [(layer, set(dice.choices(range(8), weights, k=8))) for _ in range(400) for layer in range(4)]
    ours, usual = rate(visits, (4, 8), 18), rate(visits, (4, 8), 18, least_recently_used=True)
    assert ours > 0.6
    assert ours > usual + 0.2


def test_it_follows_a_change_of_what_is_hot():
    dice = random.Random(2)
    visits = [(0, {dice.choice(range(4))}) for _ in range(600)] + [(0, {dice.choice(range(4, 8))}) for _ in range(600)]
    residents, absent = filled(4, layers=(8,)), []
    for number, (layer, needed) in enumerate(visits):
        absent.append(residents.visit(layer, needed, float(number)))  # a visit a second: ten minutes and ten minutes
        for key in absent[-1]:
            residents.admit(key)
    assert sum(map(bool, absent[-100:])) < 30
    assert {expert for _, expert in residents} == {4, 5, 6, 7}
