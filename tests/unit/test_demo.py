"""What the demo says and leaves when it does not come to its end. No stack is started."""

import asyncio
import json
import os
import signal

import pytest
from click.testing import CliRunner

from deploy.cli import demo
from deploy.demo import Answers, read_passages
from deploy.local.home import Home
from schemas import InferenceResult
from schemas.messages import Timing, Usage


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A stack that is only spoken of, in a home of its own; notes what was stopped."""

    class World:
        home, out, stopped = tmp_path / "home", tmp_path / "out", []

        def run(self, ask_all):
            monkeypatch.setattr(demo, "ask_all", ask_all)
            arguments = ["--engine", "sim", "--home", str(self.home), "--out", str(self.out)]
            return CliRunner().invoke(demo.demo, arguments)

    world = World()
    Home(world.home).make()
    Home(world.home).config.write_text('[engines.sim]\nkind = "sim"\n')
    found = {"kafka": "k", "redis": "r", "delivery": "exactly_once", "config": str(Home(world.home).config)}
    monkeypatch.setattr(demo.stack, "up", lambda *_, **__: found)
    monkeypatch.setattr(demo.stack, "down", world.stopped.append)
    world.stopped.clear()
    return world


def interrupted_after(count):
    async def ask_all(_config, _requests, answered):
        for n in range(count):
            answered(InferenceResult(f"r{n}", "completed", output_text="yes"))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    return ask_all


def test_an_interrupted_demo_names_no_file_that_is_not_there(world):
    done = world.run(interrupted_after(0))
    assert done.exit_code == 130
    assert "answers.jsonl" not in done.output
    assert not world.out.exists()
    assert f"the stack's config and logs: {world.home}" in done.output
    assert world.stopped == [world.home]


def test_an_interrupted_demo_keeps_the_answers_that_came(world):
    done = world.run(interrupted_after(3))
    assert done.exit_code == 130
    file = world.out / "answers.jsonl"
    assert f"3 of {len(read_passages())} answers: {file}" in done.output
    assert [json.loads(line)["request_id"] for line in file.read_text().splitlines()] == ["r0", "r1", "r2"]


def test_the_demo_does_not_stop_a_stack_that_was_there_before(world):
    with Home(world.home).take_lock():
        done = world.run(interrupted_after(0))
    assert world.stopped == []
    assert "the stack goes on" in done.output


def test_answers_are_written_once_all_came(world, monkeypatch):
    async def ask_all(_config, requests, answered):
        results = [InferenceResult(f"r{n}", "completed", output_text="yes") for n in range(len(requests))]
        for result in reversed(results):
            answered(result)
        return Answers(results)

    async def stream_one(*_):
        return None

    monkeypatch.setattr(demo, "stream_one", stream_one)
    done = world.run(ask_all)
    assert done.exit_code == 0, done.output
    ids = [json.loads(line)["request_id"] for line in (world.out / "answers.jsonl").read_text().splitlines()]
    assert ids == [f"r{n}" for n in range(len(read_passages()))]


def test_a_table_says_what_each_engine_did(world, monkeypatch):
    Home(world.home).config.write_text('[engines.sim]\nkind = "sim"\n[engines.m]\nkind = "moe"\nmodel = "tiny-mixtral"\n')
    asked = []

    async def ask_all(_config, requests, answered):
        results = []
        for n, request in enumerate(requests):
            asked.append((request.model, request.fallback))
            engine = "m" if request.model == "tiny-mixtral" else "sim"
            timing = Timing(latency_ms=2_000.0 if engine == "m" else 500.0)
            results.append(
                InferenceResult(f"r{n}", "completed", output_text="yes", engine=engine, usage=Usage(9, 3), timing=timing)
            )
            answered(results[-1])
        return Answers(results)

    async def stream_one(*_):
        return None

    monkeypatch.setattr(demo, "stream_one", stream_one)
    monkeypatch.setattr(demo, "ask_all", ask_all)
    arguments = ["--engine", "sim", "--engine", "m", "--home", str(world.home), "--out", str(world.out)]
    done = CliRunner().invoke(demo.demo, arguments)
    assert done.exit_code == 0, done.output
    named = [("sim", "same_model"), ("tiny-mixtral", "same_model")]
    assert asked == [*named, ("auto", "any")] * 6 + named
    table = done.output.partition("by engine")[2]
    lines = {line.split()[0]: line.split() for line in table.splitlines() if line.strip().startswith(("m ", "sim "))}
    assert lines["m"][:3] == ["m", "moe", "tiny-mixtral"]
    assert lines["m"][4:8] == ["7", "21", "2.0", "s"]
    assert lines["sim"][3:8] == ["none", "13", "39", "0.5", "s"]
