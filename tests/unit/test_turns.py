"""Turns at a device among processes: handed on at step boundaries, and not lost with a holder that is killed or stopped."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine_consumers.core.slices import Table
from engine_consumers.turns import SharedTurn, Unshared, turn_of
from schemas.config import EngineConfig, TimeSlicesConfig
from schemas.errors import ConfigError

LONG_MS = 600_000
HOLDER = """
import sys
from engine_consumers.turns import SharedTurn
from schemas.config import TimeSlicesConfig

turn = SharedTurn(TimeSlicesConfig("gpu", folder=sys.argv[1], slice_ms=0.1))
with turn:
    print("held", flush=True)
    sys.stdin.readline()
print("given", flush=True)
with turn:
    print("held", flush=True)
sys.stdin.readline()
"""


def shared(folder: Path, **more) -> SharedTurn:
    return SharedTurn(
        TimeSlicesConfig(**{"device": "gpu", "folder": str(folder), "slice_ms": 0.1, "patience_ms": LONG_MS} | more)
    )


def table(folder: Path) -> Table:
    """The device's table, as nobody is writing it."""
    with (folder / "gpu" / "table.json").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return msgspec.json.decode(file.read(), type=Table)


def until(holds, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not come to pass"
        os.sched_yield()


def a_slice() -> None:
    """Use the device for longer than a slice."""
    end = time.monotonic_ns() + 200_000
    while time.monotonic_ns() < end:
        pass


class Waiter(threading.Thread):
    """Takes a turn, keeps it until told, and ends the step."""

    def __init__(self, turn: SharedTurn) -> None:
        super().__init__(daemon=True)
        self.turn, self.held, self.enough = turn, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.turn:
            self.held.set()
            self.enough.wait(60)
        self.turn.close()


@pytest.fixture
def holder(tmp_path):
    """Another process in the midst of a step."""
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_a_turn_goes_from_process_to_process_at_the_end_of_a_step(tmp_path, holder):
    waiter = Waiter(shared(tmp_path))
    until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
    assert not waiter.held.is_set()
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "given\n"
    assert waiter.held.wait(30)
    waiter.enough.set()
    assert holder.stdout.readline() == "held\n"  # it came back


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_holder_frees_the_turn(tmp_path, holder, how):
    waiter = Waiter(shared(tmp_path))
    until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
    os.kill(holder.pid, how)
    assert waiter.held.wait(30)  # not after `patience_ms`: that is ten minutes here
    assert len(table(tmp_path).seats) == 1
    waiter.enough.set()
    waiter.join(30)
    turn = shared(tmp_path)  # whoever comes next removes the pipe
    assert len(list((tmp_path / "gpu").glob("*.pipe"))) == 1
    turn.close()
    assert list((tmp_path / "gpu").glob("*.pipe")) == []


def test_a_stopped_holder_loses_its_turn_and_queues_again(tmp_path, holder):
    os.kill(holder.pid, signal.SIGSTOP)
    waiter = Waiter(shared(tmp_path, patience_ms=50))
    assert waiter.held.wait(30)
    os.kill(holder.pid, signal.SIGCONT)
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "given\n"
    until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
    assert waiter.turn._holds
    waiter.enough.set()
    assert holder.stdout.readline() == "held\n"


def test_one_that_is_stopped_while_it_waits_keeps_the_others_once(tmp_path, holder, caplog):
    waiter, second = Waiter(shared(tmp_path)), shared(tmp_path, patience_ms=50)
    until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert waiter.held.wait(30)
    until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
    os.kill(holder.pid, signal.SIGSTOP)
    waiter.enough.set()
    for _ in range(50):
        with second:
            pass
        second.rest()
    assert [record.message.split()[2] for record in caplog.records] == ["reason=stuck"]
    second.close()


def test_a_turn_that_nobody_waits_for_is_kept(tmp_path):
    turn = shared(tmp_path)
    for _ in range(5):
        with turn:
            a_slice()
    assert table(tmp_path).turns == 1
    turn.rest()
    assert table(tmp_path).holder is None
    seat = next(iter(table(tmp_path).seats.values()))
    assert seat.used_ns >= 5 * 200_000
    turn.close()


def test_those_at_a_device_share_out_the_same(tmp_path):
    first = shared(tmp_path, share_of="tokens")
    with pytest.raises(ConfigError, match=r"`time_slices.share_of`: others at 'gpu' share out its tokens: give the same"):
        shared(tmp_path)
    with first:
        first.computed(3)
        a_slice()
    with first:
        first.computed(4)
    first.rest()
    (seat,) = table(tmp_path).seats.values()
    assert (seat.used_tokens, seat.clock) == (7, 7.0)
    first.close()
    shared(tmp_path).close()  # once they are gone it is free to choose


def test_one_that_rests_does_not_wait_for_the_turn_it_was_to_have(tmp_path):
    first, second = shared(tmp_path), shared(tmp_path)
    with first:
        waiter = Waiter(second)
        until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
        a_slice()
    assert waiter.held.wait(30)
    first.rest()  # it was in line for the next turn
    waiter.enough.set()
    waiter.join(30)
    assert table(tmp_path).holder is None
    first.close()


def test_a_lock_that_is_not_let_go_of_stops_nobody(tmp_path):
    turn = shared(tmp_path, patience_ms=20)
    with (tmp_path / "gpu" / "table.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        for _ in range(100):
            with turn:
                pass
            turn.rest()
        assert time.monotonic() - began < 20 * 0.02  # it is waited for once, not at each step
    with turn:
        assert table(tmp_path).holder is not None
    turn.close()


def test_one_that_rests_while_the_lock_is_stuck_is_told_when_it_is_free_and_does_not_believe_that_it_holds(tmp_path):
    turn = shared(tmp_path, patience_ms=20)
    with turn:
        pass
    with (tmp_path / "gpu" / "table.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        turn.rest()
    assert not turn._holds
    turn.rest()
    assert table(tmp_path).holder is None
    turn.close()


def test_those_that_left_leave_no_pipe_open(tmp_path):
    turn, before = shared(tmp_path), None
    for _ in range(5):
        with turn:
            peer = Waiter(shared(tmp_path))
            until(lambda: any(seat.is_waiting for seat in table(tmp_path).seats.values()))
            a_slice()
        assert peer.held.wait(30)
        peer.enough.set()
        peer.join(30)
        turn.rest()
        files = len(list(Path("/proc/self/fd").iterdir()))
        before = before or files
        assert files <= before
    turn.close()


def test_a_table_of_another_version_is_begun_anew(tmp_path):
    turn = shared(tmp_path)
    (tmp_path / "gpu" / "table.json").write_bytes(b'{"seats": 5}' + b" " * 500)
    with turn:
        assert len(table(tmp_path).seats) == 1
    turn.close()


def test_an_engine_without_a_share_waits_for_nobody(tmp_path):
    turn = turn_of(EngineConfig(kind="ssm"))
    assert isinstance(turn, Unshared)
    with turn:
        turn.rest()
    turn.close()
    (tmp_path / "file").write_text("")
    config = EngineConfig(kind="ssm", time_slices=TimeSlicesConfig("gpu", folder=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"`time_slices`: the folder for turns at 'gpu' cannot be used: .*Not a directory"):
        turn_of(config)
