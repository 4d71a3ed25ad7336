"""The worker's pure parts: who runs, and what becomes of a failed run."""

import pytest

from broker.transport.ledger import Inherited
from broker.transport.suspicion import ALONE_FROM, CRASHES_MAX, after_crash, crashes_of, note_of
from engine_consumers.core.lifecycle import Abort, Dropped, Ended, Lifecycle, Run, Taken, order
from engine_consumers.core.outcome import Retry, Runner, Terminal, after_failure
from schemas import ErrorInfo
from schemas.config import DispatcherConfig
from schemas.errors import ErrorCode
from schemas.messages import Envelope

RUNNER = Runner("llama", "llama", "w1", epoch=7)
CONFIG = DispatcherConfig()
NOW = 1_000_000


def envelope(**fields):
    return Envelope("r", "t", "batch", ("forebay.requests.batch", 0, 0), NOW, **fields)


def test_slots_are_given_by_class_then_deadline_then_as_they_were_read():
    machine = Lifecycle(slots=3)
    for ticket in (-1, -2, -3):
        assert machine.handle(Taken(ticket, order("batch", 10))) == [Run(ticket)]
    for ticket, rank in ((1, order("batch", 5)), (2, order("interactive", 99)), (3, order("interactive", 99))):
        assert machine.handle(Taken(ticket, rank)) == []
    assert machine.handle(Taken(4, order("interactive", 98))) == []
    order_of_runs = [effect.ticket for ticket in (-1, -2, -3, 4) for effect in machine.handle(Ended(ticket))]
    assert order_of_runs == [4, 2, 3, 1]


@pytest.mark.parametrize(
    ("alone_one", "others"), [(order("interactive", 9), order("interactive", 5)), (order("batch", 0), order("interactive", 0))]
)
def test_nobody_is_passed_for_ever_by_what_is_more_urgent(alone_one, others):
    slots = 3
    machine = Lifecycle(slots)
    running = [effect.ticket for n in range(slots) for effect in machine.handle(Taken(n, others))]
    machine.handle(Taken(99, alone_one))
    passed = 0
    for ticket in range(100, 200):
        machine.handle(Taken(ticket, others))
        (began,) = machine.handle(Ended(running.pop(0)))
        if began.ticket == 99:
            break
        passed += 1
        running.append(began.ticket)
    assert passed == slots


def test_a_line_that_never_empties_keeps_nobody_who_left():
    machine = Lifecycle(2)
    running = [0, 1]
    for n in running:
        machine.handle(Taken(n, order("interactive", 1)))
    for ticket in range(2, 5_000):
        machine.handle(Taken(ticket, order("interactive", ticket % 7)))
        if ticket > 8:
            (began,) = machine.handle(Ended(running.pop(0)))
            running.append(began.ticket)
    assert machine.waiting == 7
    assert len(machine._line) < 100
    assert sum(map(len, machine._turns)) < 100


def test_a_dropped_run_holds_its_slot_until_it_has_ended():
    machine = Lifecycle(slots=1)
    machine.handle(Taken(1, order("batch", 0)))
    machine.handle(Taken(2, order("batch", 0)))
    assert machine.handle(Dropped(1)) == [Abort(1)]
    assert machine.running == 1
    assert machine.handle(Ended(1)) == [Run(2)]


def test_a_request_dropped_while_it_waits_never_runs():
    machine = Lifecycle(slots=1)
    machine.handle(Taken(1, order("batch", 0)))
    machine.handle(Taken(2, order("batch", 0)))
    assert machine.handle(Dropped(2)) == []
    assert machine.waiting == 0
    assert machine.handle(Ended(1)) == []


@pytest.mark.parametrize(
    "code", [ErrorCode.UNHEALTHY, ErrorCode.CAPACITY_EXCEEDED, ErrorCode.PREEMPTED, ErrorCode.CONTEXT_OVERFLOW]
)
def test_an_engine_that_cannot_is_not_the_requests_fault(code):
    verdict = after_failure(envelope(attempts=2), ErrorInfo(code, "no"), RUNNER, CONFIG, NOW)
    assert isinstance(verdict, Retry)
    assert verdict.envelope.attempts == 2
    assert verdict.envelope.hop == 1
    assert verdict.envelope.excluded == {"llama": 7}
    assert verdict.envelope.received_at_ms == NOW


def test_its_own_failures_are_tried_again_later_and_bounded():
    seen, now = envelope(), NOW
    waits = []
    for _ in range(CONFIG.max_attempts - 1):
        verdict = after_failure(seen, ErrorInfo(ErrorCode.INTERNAL, "broke"), RUNNER, CONFIG, now)
        assert isinstance(verdict, Retry)
        seen = verdict.envelope
        waits.append(seen.not_before_ms - now)
    assert waits == sorted(waits)
    assert all(CONFIG.retry_backoff_ms // 2 <= w <= 2 * CONFIG.retry_backoff_ms * 2 for w in waits)
    last = after_failure(seen, ErrorInfo(ErrorCode.INTERNAL, "broke"), RUNNER, CONFIG, now)
    assert isinstance(last, Terminal)
    assert (last.status, last.dead_letter) == ("failed", True)
    assert len(last.route) == CONFIG.max_attempts


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.INVALID_REQUEST, "rejected"),
        (ErrorCode.MODEL_NOT_FOUND, "rejected"),
        (ErrorCode.CANCELLED, "cancelled"),
        (ErrorCode.EXPIRED, "expired"),
        (ErrorCode.POISON, "failed"),
    ],
)
def test_the_clients_own_faults_are_final(code, status):
    verdict = after_failure(envelope(), ErrorInfo(code, "no", "prompt"), RUNNER, CONFIG, NOW)
    assert isinstance(verdict, Terminal)
    assert verdict.status == status
    assert verdict.dead_letter == (status == "failed")


def test_the_jitter_repeats_for_a_request_and_differs_between_requests():
    def wait(name):
        sent = Envelope(name, "t", "batch", ("x", 0, 0), NOW, attempts=0)
        return after_failure(sent, ErrorInfo(ErrorCode.INTERNAL, "x"), RUNNER, CONFIG, NOW).envelope.not_before_ms

    assert wait("a") == wait("a")
    assert len({wait(f"r{n}") for n in range(50)}) > 10


def test_a_suspect_runs_alone_and_nobody_overtakes_it_for_ever():
    machine = Lifecycle(slots=4)
    assert machine.handle(Taken(1, order("batch", 9))) == [Run(1)]
    assert machine.handle(Taken(2, order("batch", 9), alone=True)) == []
    assert machine.handle(Taken(3, order("batch", 9))) == []  # it stands behind the suspect
    assert machine.handle(Taken(4, order("interactive", 9))) == [Run(4)]  # and this one before
    assert machine.handle(Ended(1)) == []
    assert machine.handle(Ended(4)) == [Run(2, alone=True)]
    assert machine.handle(Taken(5, order("interactive", 0))) == []
    assert machine.handle(Ended(2)) == [Run(5), Run(3)]


def test_a_dropped_suspect_gives_way():
    machine = Lifecycle(slots=4)
    machine.handle(Taken(1, order("batch", 9)))
    machine.handle(Taken(2, order("batch", 9), alone=True))
    machine.handle(Taken(3, order("batch", 9)))
    assert machine.handle(Dropped(2)) == [Run(3)]
    machine.handle(Taken(4, order("batch", 9), alone=True))
    machine.handle(Ended(1))
    assert machine.handle(Ended(3)) == [Run(4, alone=True)]
    assert machine.handle(Dropped(4)) == [Abort(4)]
    assert machine.handle(Ended(4)) == []
    assert machine.handle(Taken(6, order("batch", 9))) == [Run(6)]


def test_only_a_crash_while_it_ran_alone_counts_once_it_is_a_suspect():
    crashes = 0
    for _ in range(9):
        crashes = after_crash(crashes, alone=False)
    assert crashes == ALONE_FROM
    assert after_crash(crashes, alone=True) == ALONE_FROM + 1
    assert after_crash(CRASHES_MAX, alone=True) == CRASHES_MAX


@pytest.mark.parametrize(
    ("carried", "inherited", "crashes"),
    [
        (0, Inherited(), 0),
        (1, Inherited(), 1),
        (1, Inherited(1, note_of(1, alone=False), crashed=True), 2),
        (0, Inherited(1, note_of(2, alone=False), crashed=True), 2),
        (0, Inherited(1, note_of(2, alone=True), crashed=True), 3),
        (0, Inherited(4, note_of(2, alone=True), crashed=False), 2),
        (2, Inherited(1, 0, crashed=False), 2),
    ],
)
def test_crashes_are_told_by_envelope_and_ledger(carried, inherited, crashes):
    assert crashes_of(carried, inherited) == crashes
