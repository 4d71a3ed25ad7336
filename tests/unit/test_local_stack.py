"""What up, down and status make of a stack that runs already, or whose own word of itself is broken. No program is started."""

import os
import subprocess
import sys

import pytest

from deploy.local import stack
from deploy.local.errors import BrokenState, NotRunning, OtherStack
from deploy.local.home import Home, State
from deploy.local.plan import Wanted
from schemas.errors import ConfigError

# Holds the lock of a home as a supervisor does, says its pid there, and leaves on SIGTERM.
SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from deploy.local.home import Home
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
held = Home(Path(sys.argv[1])).take_lock()
held.write(str(os.getpid()))
held.flush()
print("held", flush=True)
signal.pause()
"""


def state(home, **changed):
    said = {
        "home": str(home.root),
        "pid": os.getpid(),
        "phase": "running",
        "broker": "kafka",
        "kafka": "127.0.0.1:9",
        "redis": "redis://127.0.0.1:9/0",
        "delivery": "exactly_once",
        "engines": {"sim": ["worker-sim-0", "worker-sim-1"]},
    }
    return State(**{**said, **changed})


@pytest.fixture
def home(tmp_path):
    """A home with a supervisor."""
    place = Home(tmp_path / "home")
    place.make()
    place.config.write_text('[engines.sim]\nkind = "sim"\n[redis]\nurl = "redis://127.0.0.1:9/0"\ntimeout_ms = 200\n')
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(place.root)], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout.readline() == b"held\n"
        place.supervisor = supervisor
        yield place
        supervisor.kill()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(engines=["transformer"]), "not the engine transformer"),
        (Wanted(engines=["sim", "transformer"]), "not the engine transformer"),
        (Wanted(workers=1), "not 1 workers of sim"),
        (Wanted(engines=["sim"], workers=0), "not 0 workers of sim"),
        (Wanted(kafka="other:1"), "not Kafka at other:1 but at 127.0.0.1:9"),
        (Wanted(redis="redis://:secret@other:1/0"), "not the Redis given"),
        (Wanted(broker="tansu"), "not the broker tansu but kafka"),
        (Wanted(engines=["transformer"], broker="tansu"), "not the engine transformer, not the broker tansu"),
    ],
)
def test_up_refuses_what_the_running_stack_does_not_have(home, wanted, said):
    home.write_state(state(home))
    with pytest.raises(OtherStack) as caught:
        stack.up(home.root, wanted)
    told = str(caught.value)
    assert told.startswith(f"a stack runs already in {home.root}, with the engines sim (2), and {said}")
    assert "`forebay local down` first, then `forebay local up`" in told
    assert "secret" not in told
    assert home.supervisor.poll() is None


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(engines=["sim"], workers=2, broker="kafka"),
        Wanted(kafka="127.0.0.1:9", redis="redis://127.0.0.1:9/0"),
    ],
)
def test_up_beside_a_stack_that_has_all_of_it_changes_nothing(home, wanted):
    home.write_state(state(home))
    told = []
    assert stack.up(home.root, wanted, report=told.append)["phase"] == "running"
    assert told == [f"a stack runs already in {home.root}, with the engines sim (2); `forebay local down` first to change it"]


@pytest.mark.parametrize("ask", [stack.status, stack.up])
def test_a_broken_state_of_a_running_stack_is_told_with_what_to_do(home, ask):
    home.state.write_text('{"home": ')
    with pytest.raises(BrokenState, match=r"state\.json is broken .*: `forebay local down` and `forebay local up`"):
        ask(home.root)


def test_down_stops_a_stack_also_where_its_state_is_broken(home):
    home.state.write_text('{"home": ')
    assert stack.down(home.root, limit_s=20)
    assert home.supervisor.wait(20) == 0


def test_a_broken_state_without_a_stack_stands_in_nobodys_way(tmp_path):
    place = Home(tmp_path)
    place.make()
    place.state.write_text('{"home": ')
    with pytest.raises(NotRunning, match="no stack runs in"):
        stack.status(tmp_path)
    assert not stack.down(tmp_path)
    told = []
    with pytest.raises(ConfigError, match="no such engine"):
        stack.up(tmp_path, Wanted(engines=["nonsense"]), report=told.append)
    assert told == [f"{place.state} is broken: beginning without it"]


def test_a_supervisor_that_cannot_be_found_is_told_and_not_waited_for(home):
    home.lock.write_text("")
    home.state.write_text('{"home": ')
    with pytest.raises(BrokenState):
        stack.down(home.root, limit_s=20)
    assert home.supervisor.poll() is None


def test_the_pid_of_an_earlier_supervisor_is_forgotten(tmp_path):
    place = Home(tmp_path)
    place.make()
    place.lock.write_text("1")
    with place.take_lock():
        assert place.supervisor_pid() is None
