"""The local stack on real parts: up, down, status, and what happens when any of its processes is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer

from deploy.local import ready, stack
from deploy.local.errors import NotReady, NotRunning
from deploy.local.guard import descendants
from deploy.local.home import Home
from deploy.local.plan import Wanted

LIMIT_S = 90.0


def cli(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "deploy.cli", "local", *arguments, "--home", str(home)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=home.parent,
    )


def program(home: Path, name: str) -> dict[str, Any]:
    return next(one for one in stack.status(home)["programs"] if one["name"] == name)


def is_well(home: Path, workers: int = 1) -> bool:
    found = [worker for engine in stack.status(home)["engines"] for worker in engine["workers"]]
    return len(found) == workers and all(worker["is_healthy"] for worker in found)


def answer(home: Path, ident: str) -> dict[str, Any]:
    """Send one request and wait for its result, both with a client that is not ours."""
    address = stack.status(home)["kafka"]
    producer = KafkaProducer(bootstrap_servers=address, acks="all")
    value = json.dumps({"id": ident, "tenant": "t", "prompt": "one two three", "max_output_tokens": 4}).encode()
    producer.send("forebay.requests.interactive", value=value, key=ident.encode()).get(timeout=30)
    producer.close()
    consumer = KafkaConsumer(
        "forebay.results",
        bootstrap_servers=address,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=60_000,
    )
    try:
        return next(result for record in consumer if (result := json.loads(record.value))["request_id"] == ident)
    finally:
        consumer.close()


def until_new_pid(home: Path, name: str, old: int) -> None:
    ready.until(lambda: program(home, name)["pid"] not in {None, old}, LIMIT_S, f"{name} started again")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stack") / "home"
    stack.up(folder, Wanted(engines=["sim"], broker="kafka"), limit_s=LIMIT_S)
    yield folder
    stack.down(folder)


def test_status_has_the_shape_that_others_script_against(home):
    done = cli("status", "--json", home=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["delivery"] == "exactly_once"
    assert found["home"] == str(home)
    assert found["redis"].startswith("redis://127.0.0.1:")
    (engine,) = found["engines"]
    assert {key: engine[key] for key in ("name", "kind", "pool", "model")} == dict.fromkeys(
        ("name", "kind", "pool", "model"), "sim"
    )
    (worker,) = engine["workers"]
    assert worker["is_healthy"]
    assert worker["slots"] == 8
    assert worker["running"] == 0
    os.kill(worker["pid"], 0)


def test_a_second_up_says_that_it_runs_and_changes_nothing(home):
    before = stack.status(home)["programs"]
    done = cli("up", "--engine", "sim", home=home)
    assert done.returncode == 0, done.stderr
    assert f"a stack runs already in {home}" in done.stderr
    assert stack.status(home)["programs"] == before


def test_killed_programs_come_back_and_requests_are_answered(home):
    assert answer(home, "before")["status"] == "completed"
    for name in ("worker-sim-0", "dispatcher", "valkey", "kafka-broker", "kafka-controller"):
        pid = program(home, name)["pid"]
        os.kill(pid, signal.SIGKILL)
        until_new_pid(home, name, pid)
    ready.until(lambda: is_well(home), LIMIT_S, "the worker after the kills")
    assert answer(home, "after")["status"] == "completed"


def test_a_killed_guard_leaves_no_second_copy(home):
    state = Home(home).read_state()
    assert state is not None
    worker = program(home, "worker-sim-0")
    os.kill(worker["guard_pid"], signal.SIGKILL)
    until_new_pid(home, "worker-sim-0", worker["pid"])
    copies = [
        pid for pid in descendants(state.pid) if b"work\0--engine\0sim" in _command(pid) and b"guard.py" not in _command(pid)
    ]
    assert copies == [program(home, "worker-sim-0")["pid"]]
    ready.until(lambda: is_well(home), LIMIT_S, "the worker")


def test_two_homes_run_side_by_side_and_the_data_of_each_is_its_own(home, tmp_path):
    other = tmp_path / "other"
    done = cli("up", "--engine", "sim", "--workers", "2", "--broker", "tansu", "--json", home=other)
    try:
        assert done.returncode == 0, done.stderr
        assert "at_least_once" in done.stderr
        assert "nothing survives a restart" in done.stderr
        found = json.loads(done.stdout)
        assert found["delivery"] == "at_least_once"
        assert len(found["engines"][0]["workers"]) == 2
        assert found["kafka"] != stack.status(home)["kafka"]
        assert answer(other, "elsewhere")["status"] == "completed"
    finally:
        done = cli("down", home=other)
    assert done.returncode == 0
    assert is_well(home)


def test_a_killed_supervisor_leaves_nothing_and_up_works_again_with_the_data(home):
    assert answer(home, "kept")["status"] == "completed"
    state = Home(home).read_state()
    assert state is not None
    family = descendants(state.pid)
    assert len(family) >= 10  # five programs and their guards
    os.kill(state.pid, signal.SIGKILL)
    done = cli("status", "--json", home=home)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no stack runs in {home}" in done.stderr
    ready.until(lambda: not any(_command(pid) for pid in family), LIMIT_S, "the end of its programs")
    _up_again_with_data(home, "kept")


def test_down_and_up_keep_the_data(home):
    ident = (home / "kafka" / "cluster-id").read_text()
    assert answer(home, "also-kept")["status"] == "completed"
    assert stack.down(home)
    with pytest.raises(NotRunning, match="no stack runs in"):
        stack.status(home)
    assert not stack.down(home)
    _up_again_with_data(home, "also-kept")
    assert (home / "kafka" / "cluster-id").read_text() == ident


def test_a_given_kafka_that_does_not_answer_is_told_in_one_line(tmp_path):
    home = tmp_path / "home"
    done = cli("up", "--engine", "sim", "--kafka", "127.0.0.1:9", home=home)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("forebay: Kafka at 127.0.0.1:9 does not answer within 10 s: mend the address")
    assert not Home(home).is_supervised()


def test_given_services_are_used_and_left_alone(tansu, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "forebay.toml").write_text('[kafka]\ndelivery = "at_least_once"\n\n[worker]\nheartbeat_ms = 500\n')
    found = stack.up(home, Wanted(engines=["sim"], kafka=tansu.kafka, redis=tansu.redis), limit_s=LIMIT_S)
    try:
        assert (found["kafka"], found["redis"], found["delivery"]) == (tansu.kafka, tansu.redis, "at_least_once")
        assert {one["name"] for one in found["programs"]} == {"dispatcher", "worker-sim-0"}
        assert "heartbeat_ms = 500" in (home / "forebay.toml").read_text()
    finally:
        stack.down(home)
    assert ready.kafka_answers(tansu.kafka)
    assert ready.redis_answers(tansu.redis)


def test_a_start_that_cannot_succeed_leaves_nothing(tansu, tmp_path):
    home = tmp_path / "home"
    wanted = Wanted(engines=["sim"], kafka=tansu.kafka, redis=tansu.redis)
    home.mkdir()
    text = '[kafka]\ndelivery = "at_least_once"\n\n[engines.sim]\nkind = "sim"\noptions = { no_such_option = 1 }\n'
    (home / "forebay.toml").write_text(text)
    with pytest.raises(NotReady, match=r"worker-sim-0 ends again and again: .*no_such_option"):
        stack.up(home, wanted, limit_s=LIMIT_S)
    assert not Home(home).is_supervised()


def test_it_works_while_a_loop_runs(tansu):
    async def ask() -> bool:
        return ready.kafka_answers(tansu.kafka)

    assert asyncio.run(ask())


def _up_again_with_data(home: Path, ident: str) -> None:
    stack.up(home, Wanted(engines=["sim"]), limit_s=LIMIT_S)
    consumer = KafkaConsumer(
        "forebay.results",
        bootstrap_servers=stack.status(home)["kafka"],
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=30_000,
    )
    try:
        assert any(json.loads(record.value)["request_id"] == ident for record in consumer)
    finally:
        consumer.close()


def _command(pid: int) -> bytes:
    """A living process's command line; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
