"""The client and the command line on real brokers: Apache Kafka with transactions, Tansu without."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from cells import toml

from broker import Client
from broker.transport.kafka import KafkaTransport
from dispatcher.service import DispatcherService
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import StatusBoard
from schemas import Topics, parse_config

COUNT = 60


@pytest.fixture(params=["kafka", "tansu"])
def cell(request):
    """A cell of its own on each broker, as a configuration."""
    services = request.getfixturevalue(request.param)
    return {
        "kafka": {"bootstrap": services.kafka, "delivery": services.delivery, "topic_prefix": f"client-{os.getpid()}"},
        "redis": {"url": services.redis},
        "topics": {"request_partitions": 2, "engine_partitions": 2, "result_partitions": 3, "lane_partitions": 1},
        "engines": {"sim": {"kind": "sim", "slots": 16, "options": {"ttft_ms": 5, "tpot_ms": 2}}},
    }


@contextlib.asynccontextmanager
async def serving(config):
    """A dispatcher and a worker of the cell, in this process."""
    transport, board = KafkaTransport(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
    admin = await transport.admin()
    await admin.ensure(Topics(config.kafka.topic_prefix).specs(config.topics, config.pools), 1, 1)
    services = [
        DispatcherService(config, transport, board, "d"),
        Worker(config, "sim", load(config.engines["sim"]), transport, board, "w"),
    ]
    tasks = [asyncio.ensure_future(service.run()) for service in services]
    try:
        yield
    finally:
        for service in services:
            service.stop()
        await asyncio.gather(*tasks)
        await board.close()
        await transport.close()


async def forebay(path, *arguments):
    """Run a command; give its exit code, output and errors."""
    command = [sys.executable, "-P", "-m", "deploy.cli", *arguments, "--config", str(path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(60):
        out, error = await process.communicate()
    return process.returncode, out.decode(), error.decode()


async def follow(path, count):
    """Follow results until `count` came, then interrupt; give the lines and the exit code."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "deploy.cli",
        "results",
        "--follow",
        "--from",
        "beginning",
        "--json",
        "--config",
        str(path),
    ]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(60):
        lines = [await process.stdout.readline() for _ in range(count)]
        process.send_signal(signal.SIGINT)
        _, error = await process.communicate()
    return lines, process.returncode, error


def test_submit_stream_send_and_read_back(cell):
    config = parse_config(cell)

    async def scenario():
        async with serving(config), Client(config) as client:
            before = await client.result_offsets()
            one = await client.submit("hello", max_output_tokens=5, timeout_s=60)
            stream = client.stream("hello", max_output_tokens=40, timeout_s=60)
            pieces = [item.text async for item in stream]
            again = client.stream("hello again", max_output_tokens=20, timeout_s=60)
            text_again = "".join([item.text async for item in again])
            together = await asyncio.gather(
                *(client.submit(f"{n}", id=f"c{n}", max_output_tokens=3, timeout_s=60) for n in range(COUNT))
            )
            sent = [i async for i in client.send_many([{"prompt": f"{n}", "max_output_tokens": 2} for n in range(COUNT)])]
            found = [r async for r in client.results(before, ids=sent, timeout_s=60)]
            everything = [r async for r in client.results(before, follow=False)]
            return one, stream, pieces, again, text_again, together, sent, found, everything

    one, stream, pieces, again, text_again, together, sent, found, everything = asyncio.run(scenario())
    assert one.status == "completed"
    assert len(pieces) > 1
    assert "".join(pieces) == stream.result.output_text
    assert text_again == again.result.output_text
    assert [r.request_id for r in together] == [f"c{n}" for n in range(COUNT)]
    assert sorted(r.request_id for r in found) == sorted(sent)
    assert len(everything) == 2 * COUNT + 3


def test_the_commands_on_a_real_broker(cell, tmp_path):
    cell["kafka"]["topic_prefix"] += "-cli"
    path = tmp_path / "forebay.toml"
    path.write_text(toml(cell))
    config = parse_config(cell)

    async def scenario():
        before = await forebay(path, "check", "--json")
        ensured = await forebay(path, "topics", "ensure", "--partitions", "results=3", "--json")
        async with serving(config):
            got = {
                "submit": await forebay(path, "submit", "--json", "--id", "one", "--tenant", "alice", "hi"),
                "stream": await forebay(path, "submit", "-s", "--id", "two", "--max-output-tokens", "9", "hi"),
                "refused": await forebay(path, "submit", "--id", "three", "--model", "gpt-9", "hi"),
                "results": await forebay(path, "results", "--json"),
                "one": await forebay(path, "results", "--request", "two"),
                "none": await forebay(path, "results", "--request", "nobody"),
                "check": await forebay(path, "check"),
            }
            return before, ensured, got, await follow(path, 3)

    before, ensured, got, (lines, code, error) = asyncio.run(scenario())
    findings = [(f["subject"], f["verdict"]) for f in json.loads(before[1])["findings"]]
    assert before[0] == 1
    assert ("topics", "error") in findings
    assert ("redis", "ok") in findings
    assert ensured[0] == 0
    assert len(json.loads(ensured[1])["done"]) == 9
    assert json.loads(got["submit"][1])["tenant"] == "alice"
    assert got["stream"][:1] == (0,)
    assert len(got["stream"][1].split()) >= 5
    assert (got["refused"][0], got["refused"][1]) == (1, "")
    assert "model_not_found" in got["refused"][2]
    assert sorted(json.loads(line)["request_id"] for line in got["results"][1].splitlines()) == ["one", "three", "two"]
    assert got["one"][1].startswith("two ")
    assert (got["none"][0], got["none"][1]) == (1, "")
    assert got["check"][0] == 0, got["check"]
    assert "ok      engines.sim: 1 workers" in got["check"][1]
    assert "dispatcher: " in got["check"][1]
    assert len(lines) == 3
    assert (code, error) == (130, b"")


def test_what_is_cancelled_before_it_is_read_never_runs(cell, tmp_path):
    cell["kafka"]["topic_prefix"] += "-cancel"
    path = tmp_path / "forebay.toml"
    path.write_text(toml(cell))
    config = parse_config(cell)

    async def scenario():
        assert (await forebay(path, "topics", "ensure"))[0] == 0
        async with Client(config) as client:
            early = [await client.send("x", id=f"early{n}", tenant="a", max_output_tokens=2) for n in range(5)]
            other = await client.send("x", id="other", tenant="b", max_output_tokens=2)
            told = await forebay(path, "cancel", "--tenant", "a", "--yes")
            late = await client.send("x", id="late", tenant="a", max_output_tokens=2)
            async with serving(config):
                ids = [*early, other, late]
                first = [r async for r in client.results("beginning", ids=ids, timeout_s=60)]
                await client.send("x", id="again", max_output_tokens=2)
                assert [r.status async for r in client.results("beginning", ids=["again"], timeout_s=60)] == ["completed"]
                everything = [r.request_id async for r in client.results("beginning", follow=False)]
            return told, {r.request_id: r.status for r in first}, everything

    told, found, everything = asyncio.run(scenario())
    assert told == (
        0,
        "cancelling all requests of tenant a: whatever was sent until now and has not ended yet ends as cancelled\n",
        "",
    )
    assert found == {f"early{n}": "cancelled" for n in range(5)} | {"other": "completed", "late": "completed"}
    assert sorted(everything) == sorted([*found, "again"])
