"""Whatever is visited, foreseen, admitted and resized: the places are kept, and what is told agrees with what is there."""

from hypothesis import given
from hypothesis import strategies as st

from engine_consumers.core.experts import Residents

EXPERTS = 4
experts = st.sets(st.integers(0, EXPERTS - 1), min_size=1)
tokens = st.lists(st.permutations(range(EXPERTS)).map(lambda one: one[:2]), max_size=3)
visit = st.tuples(st.just("visit"), experts, tokens)
foresee = st.tuples(st.just("foresee"), tokens, st.integers(0, 3))
resize = st.tuples(st.just("resize"), st.integers(-1, 14), st.none())


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 2), st.one_of(visit, foresee, resize), st.floats(0, 1e4)), max_size=40),
)
def test_residents_never_exceed_their_places_and_are_told_rightly(places, events):
    residents, there, now_s = Residents([EXPERTS] * 3, 2, places), set(), 0.0

    def let_in(key):
        gone = residents.admit(key)
        if gone is not None:
            there.remove(gone)
        there.add(key)

    for layer, (kind, first, second), pause_s in events:
        now_s += pause_s
        if kind == "visit":
            absent = residents.visit(layer, first, now_s, second)
            assert absent == sorted({(layer, expert) for expert in first} - there)
            for key in absent:
                let_in(key)
        elif kind == "foresee":
            residents.foresee(layer, first)
            found = residents.fetch_ahead(layer, second)
            assert len(found) <= second
            assert not there & set(found)
            for key in found:
                if residents.is_worth(key):
                    let_in(key)
        else:
            gone = residents.resize(first)
            assert there >= set(gone)
            there -= set(gone)
        assert set(residents) == there
        assert len(residents) == len(there) <= residents.places
        assert all(0 <= heat <= 1 for _, _, heat in residents.hottest(99))
        assert all(residents.distance(key) >= 0 for key in there)
