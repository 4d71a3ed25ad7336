"""The ledger against a model: any order of finishes, gaps, crashes and takeovers; damaged and foreign metadata."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.transport.ledger import METADATA_BYTES_MAX, NOTE_MAX, TAKEOVERS_MAX, Ledger
from broker.transport.protocol import Committed

steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 6)),
        st.tuples(st.just("finish"), st.integers(0, 50)),
        st.just(("commit", 0)),
        st.tuples(st.just("crash"), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(gaps=st.lists(st.integers(1, 4), min_size=60, max_size=60), first=st.integers(0, 2**40), steps=steps)
def test_no_record_is_lost_or_run_after_its_finish_was_committed(gaps, first, steps):
    offsets, at = [], first
    for gap in gaps:
        offsets.append(at)
        at += gap
    committed: Committed | None = None
    done_durably: set[int] = set()
    claimed: dict[int, int] = {}
    owner, writer, in_hand, held = 1, 0, set(), set()
    ledger, running, finished = Ledger(None, first, owner), [], set()
    for what, n in steps:
        if what == "read":
            for offset in [o for o in offsets if o >= ledger.position][:n]:
                known = ledger.admit(offset)
                assert (known is None) == (offset in done_durably)
                if known is not None:
                    assert known.takeovers == (claimed[offset] + 1 if offset in claimed else 0)
                    assert known.crashed == (offset in held)
                    running.append((offset, known.takeovers))
        elif what == "finish" and running:
            offset, _ = running.pop(n % len(running))
            ledger.finish(offset)
            finished.add(offset)
        elif what == "commit":
            committed = ledger.snapshot()
            assert committed.offset <= ledger.position  # records are deleted below it, and the reader stands there
            done_durably |= finished
            claimed = {o: c for o, c in claimed.items() if o >= ledger.position} | dict(running)
            in_hand, writer = {o for o, _ in running}, owner
        elif what == "crash":
            ledger, running, finished = Ledger(committed, first, owner=n + 2), [], set()
            assert ledger.claimer == (writer if in_hand else 0)
            ledger.crashed, owner, held = True, n + 2, set(in_hand)
    open_now = {o for o, _ in running}
    for offset in offsets:
        if offset not in open_now and offset < ledger.position:
            assert ledger.is_finished(offset)
            assert offset in done_durably | finished


@given(
    st.lists(st.integers(1, 2**20), min_size=1, max_size=400),
    st.sampled_from([0, 1, 200, TAKEOVERS_MAX]),
    st.integers(0, NOTE_MAX),
)
def test_four_hundred_unfinished_records_always_fit(spacing, takeovers, note):
    ledger, at, offsets = Ledger(None, 0, 2**32 - 1), 0, []
    for gap in spacing:
        at += gap
        ledger.admit(at)
        offsets.append(at)
    ledger._open = dict.fromkeys(ledger._open, takeovers << 4 | note)  # as after so many takeovers
    snapshot = ledger.snapshot()
    assert len(snapshot.metadata) <= METADATA_BYTES_MAX
    again = Ledger(snapshot)
    assert again.unfinished == len(spacing)
    found = [again.admit(offset) for offset in offsets]
    assert found == [(min(takeovers + 1, TAKEOVERS_MAX), note, False)] * len(offsets)


@given(st.one_of(st.text(max_size=200), st.binary(max_size=60).map(lambda b: "f2." + b.hex())))
def test_foreign_metadata_is_read_as_empty(text):
    ledger = Ledger(Committed(7, text))
    assert ledger.position == 7
    assert ledger.snapshot() == Committed(7, "")
    assert ledger.admit(7) == (0, 0, False)


@given(st.data())
def test_a_damaged_byte_is_read_as_empty(data):
    ledger = Ledger(None, 100)
    for offset in range(100, 140):
        ledger.admit(offset)
    for offset in range(105, 140, 3):
        ledger.finish(offset)
    metadata = ledger.snapshot().metadata
    at = data.draw(st.integers(3, len(metadata) - 1))
    other = data.draw(st.sampled_from(string.ascii_letters + string.digits + "+/=!").filter(lambda c: c != metadata[at]))
    damaged = Ledger(Committed(100, metadata[:at] + other + metadata[at + 1 :]))
    assert damaged.unfinished in {0, ledger.unfinished}  # the last character may carry bits that mean nothing
    assert not damaged.is_finished(101)


def test_finishing_twice_is_our_own_fault_and_is_told():
    ledger = Ledger(None, 0)
    ledger.admit(0)
    ledger.finish(0)
    with pytest.raises(KeyError):
        ledger.finish(0)


def test_inherited_records_that_were_trimmed_are_given_up_once_read_past():
    ledger = Ledger(None, 0)
    for offset in range(6):
        ledger.admit(offset)
    ledger.finish(1)
    again = Ledger(ledger.snapshot())
    assert again.admit(4) == (1, 0, False)
    assert again.snapshot().offset == 4


def test_the_committed_offset_never_lies_above_what_was_read():
    ledger = Ledger(None, 0)
    for offset in range(60):
        ledger.admit(offset)
    for offset in set(range(60)) - {0, 50}:
        ledger.finish(offset)
    again = Ledger(ledger.snapshot())
    again.admit(0)
    again.finish(0)
    snapshot = again.snapshot()
    assert snapshot.offset == 1  # records are deleted below it, and the reader stands there: not at 50
    third = Ledger(snapshot)
    assert [o for o in range(60) if not third.is_finished(o)] == [50]
    assert third.admit(50) == (1, 0, False)
    third.finish(50)
    assert third.snapshot().offset == 51
    assert Ledger(third.snapshot()).is_finished(59)


def test_only_what_a_crashed_owner_had_in_hand_counts_as_crashed():
    first = Ledger(None, 0, owner=7)
    for offset in range(4):
        first.admit(offset)
    first.note(2, 5)
    second = Ledger(first.snapshot(), owner=8)
    assert second.claimer == 7
    second.crashed = True
    assert second.admit(0) == (1, 0, True)
    third = Ledger(second.snapshot(), owner=9)  # it had only the first in hand
    assert third.claimer == 8
    third.crashed = True
    assert [third.admit(offset) for offset in range(4)] == [(2, 0, True), (1, 0, False), (1, 5, False), (1, 0, False)]


def test_an_owner_that_let_go_did_not_crash():
    ledger = Ledger(None, 0, owner=7)
    ledger.admit(0)
    ledger.note(0, 4)
    again = Ledger(ledger.snapshot(let_go=True), owner=8)
    assert again.claimer == 0
    assert again.admit(0) == (1, 4, False)
