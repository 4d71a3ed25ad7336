"""The fleet: loads by class, waits, completions told once, slow starts, and who is stale."""

import pytest

from dispatcher.core.fleet import BUSY_MS, FORGOTTEN_MS, FULL, Fleet
from schemas import EngineStatus
from schemas.errors import ErrorCode
from schemas.messages import Completion

NOW = 1_000_000
STALE_MS = 3_000


def status(worker="w1", pool="llama", **fields):
    plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0], "slots": 4, "completed": 1}
    return EngineStatus(engine=pool, kind="transformer", pool=pool, worker=worker, **{**plain, **fields})


def fleet(*statuses, factor=1.5):
    made = Fleet(factor, STALE_MS)
    for one in statuses:
        made.seen(one, NOW)
    return made


def worker(made, name="w1", pool="llama"):
    return made.pool(pool).workers[name]


def send(made, count, service_class="interactive", partition=0):
    for _ in range(count):
        made.sending("llama", partition, service_class)


def done(offset, run_ms=100.0, code=None):
    return Completion(0, offset, 10, 10, 0.0, 5.0, run_ms, code=code)


def test_batch_leaves_the_slots_that_are_not_its_own():
    made = fleet(status(interactive_slots=1))
    one = worker(made)
    assert (one.limit, one.batch_limit) == (6, 4)
    send(made, 3, "batch")
    assert one.batch_key >= BUSY_MS
    assert one.interactive_key < BUSY_MS
    send(made, 1, "batch")
    assert one.batch_key == FULL
    assert one.interactive_key < BUSY_MS, "what waits of batch stands behind"
    send(made, 1)
    assert BUSY_MS <= one.interactive_key < FULL
    send(made, 1)
    assert one.interactive_key == one.batch_key == FULL


def test_a_snapshot_counts_what_it_has_read_and_keeps_what_it_has_not():
    made = fleet(status())
    send(made, 2, "batch")
    send(made, 1)
    made.sent("llama", 0, "batch", 0)
    made.sent("llama", 0, "batch", 1)
    made.sent("llama", 0, "interactive", None)
    one = worker(made)
    assert (one.load, one.batch_load) == (2, 2)
    made.seen(status(updated_at_ms=NOW + 1, positions={0: 1}, running=1, batch_load=1), NOW + 1)
    assert (one.load, one.batch_load) == (2, 2)
    made.seen(status(updated_at_ms=NOW + 2, positions={0: 2}, running=1, batch_load=1), NOW + 2)
    assert (one.load, one.batch_load) == (1, 1)


@pytest.mark.parametrize(
    ("load", "batch_load", "interactive", "batch"),
    [
        (0, 0, 0, 0),
        (3, 0, 0, 0),
        (4, 0, 100, 100),
        (3, 3, 0, 100),
        (4, 4, 0, 200),
        (5, 4, 100, 200),
        (5, 0, 200, 200),
    ],
)
def test_a_wait_is_the_runs_before_a_slot_is_free_shared_by_the_slots(load, batch_load, interactive, batch):
    made = fleet(status(interactive_slots=1, running=load, batch_load=batch_load, avg_latency_ms=400.0), factor=2)
    one = worker(made)
    assert one.wait_ms("interactive") == interactive
    assert one.wait_ms("batch") == batch


def test_the_mean_run_follows_the_completions_and_is_believed_before():
    made = fleet(status(completed=0, running=4))
    pool = made.pool("llama")
    assert worker(made).wait_ms("batch") == 0.0
    made.believe(pool, 800.0)
    assert worker(made).wait_ms("batch") == 200.0
    told = [done(n, 100.0) for n in range(2)] + [done(2, 9_000.0, ErrorCode.INTERNAL)]
    made.seen(status(running=4, completed=3, completions=told, updated_at_ms=NOW + 1), NOW + 1)
    assert pool.mean_run_ms == 100.0, "what was believed counts for nothing now, and what failed never"
    for n in range(200):
        made.seen(status(completed=4 + n, completions=[done(9, 300.0)], updated_at_ms=NOW + 2 + n), NOW + 2 + n)
    assert pool.mean_run_ms == pytest.approx(300.0, rel=0.01)


@pytest.mark.parametrize("wrong_ms", [float("nan"), float("inf"), -1.0, 1e300])
def test_what_cannot_be_true_of_runs_is_not_believed(wrong_ms):
    made = fleet(status(avg_latency_ms=wrong_ms))
    assert made.pool("llama").mean_run_ms == 0
    made.seen(status(updated_at_ms=NOW + 1, completed=3, completions=[done(0), done(1, run_ms=wrong_ms)]), NOW)
    assert made.pool("llama").mean_run_ms == 100.0
    assert worker(made).batch_key < FULL


def test_completions_are_told_once():
    made = fleet()
    assert made.seen(status(completed=2, completions=[done(1), done(2)]), NOW) == [done(1), done(2)]
    assert made.seen(status(completed=2, completions=[done(1), done(2)]), NOW) == []
    later = status(completed=4, completions=[done(n) for n in (2, 3, 4)], updated_at_ms=NOW + 5)
    assert made.seen(later, NOW + 5) == [done(3), done(4)]
    missed = status(completed=9, completions=[done(8), done(9)], updated_at_ms=NOW + 6)
    assert made.seen(missed, NOW + 6) == [done(8), done(9)]
    anew = status(completed=1, completions=[done(1)], epoch=2, updated_at_ms=NOW + 7)
    assert made.seen(anew, NOW + 7) == [done(1)]


def test_two_snapshots_of_one_millisecond_lose_no_completion():
    made = fleet()
    assert made.seen(status(completed=1, completions=[done(1)]), NOW) == [done(1)]
    assert made.seen(status(completed=2, completions=[done(1), done(2)]), NOW) == [done(2)]
    assert made.seen(status(completed=1, completions=[done(1)]), NOW) == []
    assert made.seen(status(completed=2, completions=[done(1), done(2)], positions={0: 5}), NOW) == []
    assert worker(made).status.positions == {0: 5}


def test_a_worker_that_was_started_anew_starts_slowly_and_doubles_with_what_it_finishes():
    made = fleet(status(slots=16))
    one = worker(made)
    assert one.limit == 24
    made.seen(status(slots=16, epoch=2, completed=0, updated_at_ms=NOW + 1), NOW + 1)
    limits = [one.limit]
    for n in range(2, 12):
        send(made, one.limit - one.load)
        for offset in range(one.load):
            made.sent("llama", 0, "interactive", n * 1_000 + offset)
        made.seen(status(slots=16, epoch=2, updated_at_ms=NOW + n, positions={0: (n + 1) * 1_000}), NOW + n)
        limits.append(one.limit)
    assert limits[:4] == [1, 2, 8, 24]
    assert set(limits[3:]) == {24}


def test_what_fails_does_not_speed_up_a_start():
    made = fleet(status(slots=16))
    made.seen(status(slots=16, epoch=2, completed=0, updated_at_ms=NOW + 1), NOW + 1)
    send(made, 1)
    made.sent("llama", 0, "interactive", 1)
    failed = [done(1, code=ErrorCode.INTERNAL)]
    anew = {"slots": 16, "epoch": 2, "positions": {0: 2}}
    made.seen(status(**anew, completed=1, completions=failed, updated_at_ms=NOW + 2), NOW + 2)
    assert worker(made).limit == 1


def test_only_what_comes_later_or_recovers_starts_slowly():
    made = fleet(status("w1", completed=0), status("w2", completed=0, partitions=[1]))
    late = NOW + STALE_MS + 1
    made.seen(status("w3", completed=0, partitions=[2], updated_at_ms=late), late)
    made.seen(status("w4", completed=7, partitions=[3], updated_at_ms=late), late)
    made.seen(status("w1", completed=0, updated_at_ms=NOW + 60_000), NOW + 60_000)
    assert {name: one.limit for name, one in made.pool("llama").workers.items()} == {"w1": 6, "w2": 6, "w3": 1, "w4": 6}
    made.seen(status("w2", partitions=[1], is_healthy=False, updated_at_ms=NOW + 60_001), NOW + 60_001)
    made.seen(status("w2", partitions=[1], updated_at_ms=NOW + 60_002), NOW + 60_002)
    assert worker(made, "w2").limit == 1


def test_a_start_may_be_asked_for():
    made = fleet(status())
    made.start_slowly(worker(made), 2)
    assert worker(made).limit == 2


def test_who_is_not_heard_of_is_stale_until_it_is_heard_again_and_at_last_forgotten():
    made = fleet(status())
    one = worker(made)
    made.settle(NOW + STALE_MS)
    assert one.is_fresh
    assert made.fresh_until_ms == NOW + STALE_MS + 1
    version = made.version
    made.settle(NOW + STALE_MS + 1)
    assert not one.is_fresh
    assert made.version > version
    assert not made.is_served("llama")
    made.seen(status(updated_at_ms=NOW + 9_000), NOW + 9_000)
    assert one.is_fresh
    made.settle(NOW - 5_000)
    assert not one.is_fresh, "it was heard of at a time that has not come"
    made.settle(NOW + 9_000)
    assert one.is_fresh
    made.settle(NOW + 9_001 + FORGOTTEN_MS)
    assert list(made.workers("llama")) == []
    made.sending("llama", 0, "batch")


def test_the_version_changes_with_what_a_worker_is_and_not_with_its_load():
    made = fleet(status())
    version = made.version
    send(made, 3)
    made.seen(status(running=3, gpu_temperature_c=70.0, updated_at_ms=NOW + 1), NOW + 1)
    assert made.version == version
    for n, change in enumerate(({"slots": 5}, {"features": ["chat"]}, {"is_healthy": False}, {"partitions": [0, 1]})):
        made.seen(status(updated_at_ms=NOW + 2 + n, **change), NOW + 2 + n)
        assert made.version > version
        version = made.version


def test_of_like_workers_the_least_loaded_is_first_and_a_worker_without_partition_is_never():
    made = fleet(status("w1"), status("w2", partitions=[1]), status("w3", partitions=[]))
    send(made, 1)
    keys = {name: one.interactive_key for name, one in made.pool("llama").workers.items()}
    assert keys["w2"] < keys["w1"] < BUSY_MS
    assert keys["w3"] == FULL


def test_batch_leaves_room_for_interactive_however_many_slots_there_are():
    one = worker(fleet(status(slots=1_000, interactive_slots=10)))
    assert one.limit - one.batch_limit >= 10
