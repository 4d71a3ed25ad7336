"""The stack's small parts: cache, ports, pauses between starts, the home folder."""

import socket
import threading
from pathlib import Path

import pytest

from deploy.local.cache import cache_home, locked, make_once
from deploy.local.errors import BrokenState, LocalStackError, NotAvailable
from deploy.local.home import Home, State, home_path
from deploy.local.parts import java, kafka_jars, kafka_runtime
from deploy.local.ports import HOST, free_ports, is_free
from deploy.local.restarts import LAST_S, STEADY_S, Restarts


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"FOREBAY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/forebay")),
        ({}, Path.home() / ".cache" / "forebay"),
    ],
)
def test_where_the_cache_is(environ, expected):
    assert cache_home(environ) == expected


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        (Path("/x"), {"FOREBAY_HOME": "/a"}, Path("/x")),
        (None, {"FOREBAY_HOME": "/a", "XDG_DATA_HOME": "/b"}, Path("/a")),
        (None, {"XDG_DATA_HOME": "/b"}, Path("/b/forebay")),
        (None, {}, Path.home() / ".local" / "share" / "forebay"),
    ],
)
def test_where_the_home_is(given, environ, expected):
    assert home_path(given, environ) == expected


def test_an_entry_is_made_once_however_many_ask(tmp_path):
    made = []
    gate = threading.Barrier(8)

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    def ask() -> None:
        gate.wait()
        assert (make_once("parts/x-1", make, root=tmp_path) / "file").read_text() == "whole"

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_failed_or_killed_make_leaves_no_entry(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        message = "no network"
        raise NotAvailable(message)

    with pytest.raises(NotAvailable):
        make_once("x", fail, root=tmp_path)
    assert not (tmp_path / "x").exists()
    (tmp_path / ".x.part").mkdir()
    (tmp_path / ".x.part" / "left by a killed one").write_text("")
    entry = make_once("x", lambda folder: (folder / "file").touch(), root=tmp_path)
    assert [path.name for path in entry.iterdir()] == ["file"]


def test_a_cache_that_cannot_be_written_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalStackError, match=r"cannot write the cache .*: set FOREBAY_CACHE to a folder of your own"):
        make_once("parts/x", lambda _: None, root=tmp_path / "file")


def test_a_lock_that_is_held_too_long_is_told(tmp_path):
    with (
        locked(tmp_path / "lock", 1),
        pytest.raises(LocalStackError, match="is held by another process"),
        locked(tmp_path / "lock", 0),
    ):
        pass


def test_ports_are_different_and_taken_ones_are_not_given():
    with socket.socket() as taken:
        (port,) = free_ports(1)
        taken.bind((HOST, port))
        taken.listen()
        assert not is_free(port)
        found = free_ports(3, [port])
        assert port not in found
    assert len(set(found)) == 3
    assert free_ports(3, found) == found


def test_pauses_grow_to_a_bound_and_start_over_after_a_steady_run():
    restarts = Restarts()
    pauses = [restarts.ended(1.0) for _ in range(8)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LAST_S, LAST_S]
    assert restarts.ended(STEADY_S) == 0.0
    assert restarts.ended(1.0) == 0.5
    assert restarts.count == 10
    for _ in range(5_000):
        assert restarts.ended(0.0) <= LAST_S


def state(home: Path) -> State:
    return State(
        home=str(home),
        pid=1,
        phase="running",
        broker="kafka",
        kafka="h:1",
        redis="redis://h:2/0",
        delivery="exactly_once",
        engines={"sim": ["worker-sim-0"]},
    )


def test_the_state_comes_back_and_a_broken_one_is_told_with_what_to_do(tmp_path):
    home = Home(tmp_path)
    assert home.read_state() is None
    home.write_state(state(tmp_path))
    assert home.read_state() == state(tmp_path)
    for broken in (b'{"home": ', b"", b"{}", b'{"home": "\xff"}'):
        home.state.write_bytes(broken)
        with pytest.raises(BrokenState, match=r"state\.json is broken .*: `forebay local down` and `forebay local up`"):
            home.read_state()
    home.state.unlink()
    home.state.mkdir()
    with pytest.raises(BrokenState, match="is broken"):
        home.read_state()


def test_only_one_supervises_a_home(tmp_path):
    home = Home(tmp_path / "deep" / "home")
    assert not home.is_supervised()
    home.make()
    with home.take_lock():
        assert home.is_supervised()
        with pytest.raises(LocalStackError, match=r"a stack runs in .* already"):
            home.take_lock()
    assert not home.is_supervised()


def test_a_home_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalStackError, match=r"cannot make the home folder .*: give another with --home or FOREBAY_HOME"):
        Home(tmp_path / "file" / "home").make()


def test_without_java_or_maven_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(NotAvailable, match="no `java` on PATH"):
        java()
    with pytest.raises(NotAvailable, match="no `mvn` on PATH"):
        kafka_jars()
    with pytest.raises(NotAvailable, match=r"no `java` on PATH; (no `docker` on PATH|.* serves on Linux only)"):
        kafka_runtime(tmp_path)
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    with pytest.raises(NotAvailable, match="is version 11, Kafka needs 17 or newer"):
        java()
