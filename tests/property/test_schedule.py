"""Of the slot loop's schedule, whatever comes and goes: nobody starves, no row has two owners, rows are packed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_consumers.core.schedule import FAIR_EVERY, Schedule

SLOTS, PIECE = st.integers(1, 6), st.integers(1, 20)
READERS = st.integers(2, 4)
COMING = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 1), st.integers(1, 12)), max_size=3)  # tokens, priority, answer
STEPS = st.lists(st.tuples(COMING, st.integers(0, 9)), min_size=1, max_size=40)


class Loop:
    """Does what the slot loop does with its rows, and looks whether each request finds its own state there."""

    def __init__(self, slots, readers, piece):
        self.schedule = Schedule(slots, readers, piece)
        self.slots, self.readers, self.piece = slots, readers, piece
        self.free = [slots + n for n in range(readers)]
        self.rows = {}  # what each row holds
        self.at = {}  # readers' rows
        self.cleared = {}
        self.left = {}  # tokens of the answer
        self.count = 0

    def come(self, tokens, priority, answer):
        self.count += 1
        self.left[self.count] = answer
        self.schedule.add(self.count, tokens, priority)
        return self.count

    def go(self, run):
        del self.left[run]
        moved = self.schedule.leave(run)
        if moved is not None:
            source, target = moved
            self.rows[target] = self.rows[source]
        if run in self.at:
            self.free.append(self.at.pop(run))

    def step(self):
        schedule = self.schedule
        for run in schedule.admit():
            row = self.at[run] = self.free.pop()
            self.rows[row] = run
            self.cleared[run] = self.cleared.get(run, 0) + 1
        assert len(schedule.reading) + len(schedule.decoding) <= self.slots
        assert len(schedule.reading) <= self.readers
        assert sum(tokens > self.piece for tokens in schedule.reading.values()) <= max(1, self.readers - 1)
        taken = list(schedule.decoding)
        assert [self.rows[row] for row in range(len(taken))] == taken, "rows are not packed in the order of the step"
        read, had = 0, bool(schedule.reading)
        while (found := schedule.next_piece(read)) is not None:
            run, tokens = found
            assert tokens == min(self.piece, schedule.reading[run]), "a piece was cut to fit"
            read += tokens
            assert self.rows[self.at[run]] == run
            if schedule.read(run, tokens):
                row = self.at.pop(run)
                self.rows[len(schedule.decoding) - 1] = run
                self.free.append(row)
        assert had <= read <= self.piece, f"{read} tokens in one step"
        for run in taken:
            self.left[run] -= 1
            if self.left[run] == 0:
                self.go(run)
        assert len(set(self.at.values()) | set(self.free)) == self.readers == len(self.at) + len(self.free)


@given(SLOTS, READERS, PIECE, STEPS)
def test_whatever_comes_and_goes_all_end_and_no_row_has_two_owners(slots, readers, piece, steps):
    loop = Loop(slots, readers, piece)
    for coming, leaves in steps:
        for one in coming:
            loop.come(*one)
        if loop.left and leaves == 0:
            loop.go(min(loop.left))
        loop.step()
    for _ in range(90 * (loop.count + 1) * FAIR_EVERY + 12 * loop.count):
        if not loop.left:
            break
        loop.step()
    assert not loop.left, "somebody starves"
    assert set(loop.cleared.values()) <= {1}
    assert not loop.schedule.reading
    assert not loop.schedule.waiting


@settings(max_examples=30)
@given(READERS, st.integers(2, 12), st.integers(1, 6))
def test_a_long_prompt_ends_under_an_endless_stream_of_short_ones(readers, pieces, per_step):
    """It ends within `FAIR_EVERY` steps for each of its pieces from when it has a place."""
    loop = Loop(64, readers, 10)
    long = loop.come(10 * pieces, 0, 10**6)
    loop.step()
    for _ in range(FAIR_EVERY * pieces):
        for _ in range(per_step):
            loop.come(1, 0, 1)
        loop.step()
    assert long in loop.schedule.decoding


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(11, 10_000))
def test_a_short_prompt_waits_for_few_steps_however_many_long_ones_there_are(longs, tokens):
    """All places of readers may be taken by some that are at their last piece; the next step is its own."""
    loop = Loop(64, 3, 10)
    for _ in range(longs):
        loop.come(tokens, 0, 5)
    loop.step()
    short = loop.come(5, 0, 5)
    loop.step()
    loop.step()
    assert short in loop.schedule.decoding or loop.left[short] < 5
