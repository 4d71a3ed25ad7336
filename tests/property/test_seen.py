"""What may never happen to a request that comes several times, whatever fails between: that none of its records runs.

A model of the dispatcher's terms: records are read in any order, finished and committed later, the log is written
behind and may be lost, a crash forgets the term and brings every unfinished record again.
"""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from dispatcher.core.seen import Seen

NAMES = 3
steps = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(0, NAMES - 1)),
        st.tuples(st.just("read"), st.integers(0, 50)),
        st.tuples(st.just("commit"), st.integers(0, 50)),
        st.tuples(st.just("write"), st.just(0)),
        st.tuples(st.just("crash"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 600)),
    ),
    max_size=80,
)


class Terms:
    """Dispatchers one after the other, over partitions of one record each: nothing is committed in any order."""

    def __init__(self, entries_max):
        self.entries_max, self.now_ms = entries_max, 0
        self.produced, self.finished, self.ran = [], set(), Counter()
        self.log = {}
        self.begin(is_log_read=True)

    def begin(self, *, is_log_read):
        self.seen = Seen(1_000, self.entries_max)
        self.in_hand, self.unwritten, self.reading = {}, {}, set()
        if is_log_read:
            for key, (origin, at_ms) in self.log.items():
                self.seen.remember(key, origin, at_ms)

    def step(self, what, n):
        if what == "produce":
            self.produced.append((b"%d" % n, ("requests", len(self.produced), 0), self.now_ms))
        elif what == "wait":
            self.now_ms += n
        elif what == "read":
            self.read([r for r in self.produced if r[1] not in self.finished and r[1] not in self.in_hand], n)
        elif what == "commit" and self.in_hand:
            origin = sorted(self.in_hand)[n % len(self.in_hand)]
            key, runs = self.in_hand.pop(origin)
            self.finished.add(origin)
            if runs:
                self.ran[key] += 1
                self.unwritten[key] = origin, self.now_ms
        elif what == "write":
            self.log |= self.unwritten
            self.unwritten = {}
        elif what == "crash":
            self.begin(is_log_read=n)
        assert len(self.seen) <= self.entries_max

    def read(self, unread, n):
        if not unread:
            return
        key, origin, _ = unread[n % len(unread)]
        is_repeat = self.seen.is_repeat(key, origin, self.now_ms)
        if not is_repeat:
            self.seen.remember(key, origin, self.now_ms)
        self.in_hand[origin] = key, not is_repeat

    def settle(self):
        while len(self.finished) < len(self.produced):
            self.step("read", 0)
            self.step("commit", 0)


# the first is marked and not committed; a term that knows nothing of it runs the second and commits the first as its
# repeat; were the mark of the first believed now, the second would be its repeat
BELIEVED_TOO_SOON = [
    *[("produce", 0)] * 2,
    *[("read", 0), ("write", 0), ("crash", False)],
    *[("read", 1), ("read", 0), ("commit", 0), ("crash", True)],
]


@given(steps, st.integers(1, 4))
@example(BELIEVED_TOO_SOON, 4)
def test_of_the_records_of_one_name_at_least_one_is_run_whatever_crashes(steps, entries_max):
    terms = Terms(entries_max)
    for step in steps:
        terms.step(*step)
    terms.settle()
    assert set(terms.ran) == {key for key, _, _ in terms.produced}


@given(steps)
def test_without_crashes_exactly_one_is_run_in_each_window(steps):
    terms, run_at = Terms(100), {}
    for what, n in steps:
        if what == "crash":
            continue
        before = set(terms.in_hand)
        terms.step(what, n)
        for origin in set(terms.in_hand) - before:
            key, runs = terms.in_hand[origin]
            assert runs is (key not in run_at or terms.now_ms - run_at[key] >= 1_000)
            if runs:
                run_at[key] = terms.now_ms
