"""Whoever is killed, nothing stays behind: shown on real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local import ready
from deploy.local.errors import NotReady
from deploy.local.guard import Log
from deploy.local.program import Program, Running

LIMIT_S = 20.0
# A program with a child in a session of its own, as some engines have; both write their pids and wait for ever.
PARENT = """
import os, subprocess, sys, signal, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"],
                         start_new_session=True)
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
while True:
    signal.pause()
"""
# Something that starts the program above and is killed then, as a supervisor may be.
OWNER = """
import signal, sys
from deploy.local.program import Program, Running
running = Running(Program("p", [sys.executable, "-S", "-c", *sys.argv[3:5], "willing"], sys.argv[1], grace_s=1.0))
open(sys.argv[2], "w").write(str(running.guard_pid))
signal.pause()
"""

# A supervisor of the program above, whose guard is killed twice; says which of its children stay as zombies.
SUPERVISOR = """
import os, signal, sys, time
from pathlib import Path
from deploy.local import guard
from deploy.local.plan import Plan
from deploy.local.program import Program
from deploy.local.supervisor import Child, Supervisor
folder, text = Path(sys.argv[1]), sys.argv[2]
program = Program("p", [sys.executable, "-S", "-c", text, str(folder / "pids"), "willing"], str(folder / "p.log"))
plan = Plan(home=str(folder), broker="given", kafka="", redis="", delivery="exactly_once", services=[], ensure=program,
            processes=[], engines={})
guard.adopt_orphans()
supervisor, child = Supervisor(plan), Child(program)
supervisor._stages = [[child]]

def until(what, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not what() and time.monotonic() < end:
        supervisor._tick()
    return what()

def zombies():
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == os.getpid():
            found.append(entry.parent.name)
    return found

for _ in range(2):
    until(lambda: child.running is not None and (folder / "pids").exists())
    (folder / "pids").unlink()
    before = child.running
    os.kill(before.guard_pid, signal.SIGKILL)
    until(lambda: child.running not in (None, before))
well = until(lambda: not zombies(), 5.0)
print("left:", *zombies())
supervisor._take_down("stopped")
sys.exit(0 if well else 1)
"""
# A program that goes on, after it has left behind a child of a child that ends at once.
LEAVES = """
import os, signal, sys
if os.fork() == 0:
    if os.fork() == 0:
        open(sys.argv[1] + ".part", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
    os._exit(0)
os.wait()
while True:
    signal.pause()
"""


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return not stat.parent.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_gone(*pids: int) -> None:
    ready.until(lambda: not any(lives(pid) for pid in pids), LIMIT_S, f"the end of {pids}")


def pids_in(path: Path) -> list[int]:
    ready.until(lambda: path.exists() and bool(path.read_text()), LIMIT_S, str(path))
    return [int(word) for word in path.read_text().split()]


def start(folder: Path, kind: str = "willing", grace_s: float = 5.0) -> tuple[Running, list[int]]:
    argv = [sys.executable, "-S", "-c", PARENT, str(folder / "pids"), kind]
    running = Running(Program("p", argv, str(folder / "p.log"), grace_s=grace_s))
    pids = pids_in(folder / "pids")
    assert pids[0] == running.pid
    return running, pids


def test_stop_ends_program_and_what_came_from_it(tmp_path):
    running, pids = start(tmp_path)
    running.stop()
    assert running.exit_code == 128 + signal.SIGTERM
    assert not any(lives(pid) for pid in pids)


def test_one_that_does_not_listen_is_killed_after_its_grace(tmp_path):
    running, pids = start(tmp_path, "stubborn", grace_s=0.2)
    running.stop()
    assert running.exit_code == 128 + signal.SIGKILL
    assert not any(lives(pid) for pid in pids)


def test_a_killed_program_takes_its_children_along(tmp_path):
    running, pids = start(tmp_path)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert not any(lives(pid) for pid in pids)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_owner_leaves_nothing(tmp_path, kind):
    argv = [sys.executable, "-c", OWNER, str(tmp_path / "p.log"), str(tmp_path / "guard"), PARENT, str(tmp_path / "pids")]
    with subprocess.Popen(argv) as owner:
        (guard_pid,) = pids_in(tmp_path / "guard")
        pids = pids_in(tmp_path / "pids")
        owner.send_signal(kind)
    until_gone(guard_pid, *pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_a_killed_guard_takes_its_program_along(tmp_path):
    running, (program, child) = start(tmp_path)
    os.kill(running.guard_pid, signal.SIGKILL)
    until_gone(program)
    assert running.wait(LIMIT_S) == 128 + signal.SIGKILL
    if lives(child):  # the supervisor adopts and ends this one; here nobody does
        os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a process the orphans of its own")
def test_a_supervisor_keeps_no_zombies_of_killed_guards(tmp_path):
    argv = [sys.executable, "-c", SUPERVISOR, str(tmp_path), PARENT]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "left:\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a process the orphans of its own")
def test_a_guard_keeps_no_zombies_of_what_its_program_left(tmp_path):
    running = Running(Program("p", [sys.executable, "-S", "-c", LEAVES, str(tmp_path / "pid")], str(tmp_path / "p.log")))
    (left,) = pids_in(tmp_path / "pid")
    ready.until(lambda: not Path(f"/proc/{left}").exists(), LIMIT_S, "the end of the zombie")
    assert running.exit_code is None
    running.stop()


def test_exit_status_and_output_are_kept(tmp_path):
    program = Program("p", [sys.executable, "-c", "print('last words'); raise SystemExit(7)"], str(tmp_path / "p.log"))
    running = Running(program)
    assert running.wait(LIMIT_S) == 7
    assert (tmp_path / "p.log").read_text() == "last words\n"


def test_a_program_that_is_not_there_is_told_in_one_line(tmp_path):
    with pytest.raises(NotReady, match="cannot start p: see"):
        Running(Program("p", [str(tmp_path / "missing")], str(tmp_path / "p.log")))
    assert "cannot start" in (tmp_path / "p.log").read_text()


def test_the_log_is_bounded(tmp_path):
    path = tmp_path / "p.log"
    log = Log(path, bytes_max=1_000)
    for i in range(100):
        log.write(b"%099d\n" % i)
    log.close()
    assert path.stat().st_size <= 1_000
    assert path.with_name("p.log.1").stat().st_size <= 1_000
    assert path.read_bytes().splitlines()[-1] == b"%099d" % 99
