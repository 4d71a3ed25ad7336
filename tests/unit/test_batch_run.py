"""Batch runs on the whole path in memory: answers, interruptions at any moment, and a cluster that fails."""

import asyncio
import contextlib
import json
import shutil
from collections import Counter

import pytest
from batch_world import TOPICS, go, good, line, outputs, plan_in, write
from client_world import in_world
from memory_stack import config_of

from broker.batch import Limits, Stalled, run_batch
from broker.transport.errors import NoSuchTopic, TransportError
from broker.transport.memory import MemoryCluster
from broker.transport.protocol import Outgoing
from schemas import codecs
from schemas.messages import InferenceResult


def texts(folder):
    """What was answered, without the moments at which that happened."""
    answered, errors = outputs(folder)
    for entry in answered:
        entry["response"]["body"].pop("created")
    return answered, errors


def runs_of(world):
    """How often each request was run: whatever is sent twice is answered twice."""
    return Counter(record.key for log in world.cluster.logs(TOPICS.results) for record in log.read(0, 100_000)[0])


def test_every_line_ends_in_one_of_the_files_in_the_inputs_order(tmp_path):
    lines = good(100)
    lines[90:90] = [
        "{broken",
        line("n2", n=2),
        "",
        line("c3"),
        line("none", prompt=""),
        '{"custom_id":"e","url":"/v1/embeddings"}',
    ]
    lines.append(line("long", "x" * 4_000))
    write(tmp_path, lines)

    async def scenario(world):
        world.answer()
        return await go(world, tmp_path)

    tally = in_world(scenario, config_of(max_context=256))
    answered, errors = outputs(tmp_path)
    assert (tally.answered, tally.errors) == (100, 6)
    assert [entry["custom_id"] for entry in answered] == [f"c{n}" for n in range(100)]
    assert all(entry["response"]["body"]["usage"]["completion_tokens"] == 4 for entry in answered)
    assert all(entry["response"]["body"]["choices"][0]["text"] for entry in answered)
    assert [entry["error"]["line"] for entry in errors] == [91, 92, 94, 95, 96, 107]
    assert all(entry["error"]["message"].startswith(f"line {entry['error']['line']}: ") for entry in errors)
    assert [entry["custom_id"] for entry in errors] == [None, "n2", "c3", "none", "e", "long"]
    assert errors[2]["error"]["message"] == "line 94: `custom_id`: 'c3' is that of line 4 already"
    assert errors[5]["error"]["code"] == "context_overflow"


def test_a_run_stopped_half_way_goes_on_and_sends_nothing_twice(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        write(folder, [*good(120), "{broken"])

    async def uninterrupted(world):
        world.answer()
        await go(world, whole)

    async def interrupted(world):
        world.answer()
        reports = []
        first = asyncio.ensure_future(go(world, halves, "first", Limits(in_flight_max=40), reports))
        while not reports or reports[-1].answered < 50:  # noqa: ASYNC110 - virtual time, and the run reports to a plain list
            await asyncio.sleep(0.01)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert not (halves / "out.jsonl").exists()
        await asyncio.sleep(5)  # answers come while nobody reads
        later = []
        tally = await go(world, halves, "second", reports=later)
        return tally, reports[-1], later[0], runs_of(world)

    in_world(uninterrupted)
    tally, at_stop, at_start, runs = in_world(interrupted)
    assert 50 <= at_stop.answered < 120
    assert at_start.answered >= at_stop.answered
    assert (tally.answered, tally.errors) == (120, 1)
    assert len(runs) == 120
    assert set(runs.values()) == {1}
    assert texts(halves) == texts(whole)


@pytest.mark.parametrize("kill_at_s", [0.0, 0.05, 0.2, 0.45, 0.9])
def test_a_killed_run_goes_on_from_what_its_journal_held(tmp_path, kill_at_s):
    write(tmp_path, good(100))

    async def scenario(world):
        world.answer()
        await asyncio.sleep(2)
        first = asyncio.ensure_future(go(world, tmp_path, "first"))
        await asyncio.sleep(kill_at_s)
        journal = tmp_path / "out.jsonl.progress"
        if journal.exists():  # a kill leaves the file as it is now: what the end of the task adds is taken away again
            shutil.copy(journal, tmp_path / "at_kill")
        world.ways["first"].kill()
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError, TransportError):
            await first
        if journal.exists():
            shutil.copy(tmp_path / "at_kill", journal)
        return await go(world, tmp_path, "second")

    tally = in_world(scenario)
    answered, errors = outputs(tmp_path)
    assert (tally.answered, tally.errors) == (100, 0)
    assert [entry["custom_id"] for entry in answered] == [f"c{n}" for n in range(100)]
    assert errors == []


def test_a_finished_run_is_not_run_again(tmp_path):
    write(tmp_path, good(5))

    async def scenario(world):
        world.answer()
        await go(world, tmp_path)
        before = runs_of(world)
        tally = await go(world, tmp_path, "again")
        return before == runs_of(world), tally

    unchanged, tally = in_world(scenario)
    assert unchanged
    assert (tally.answered, tally.errors) == (5, 0)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_sends_that_fail_are_sent_again_and_answered_once(tmp_path, moment):
    write(tmp_path, good(60))
    failures = []

    async def scenario(world):
        async def hook(step):
            if (step.operation, step.moment) == ("send", moment) and step.process == "batch" and len(failures) < 7:
                failures.append(step)
                message = "the leader moved"
                raise TransportError(message)

        world.answer()
        world.cluster.hook = hook
        return await go(world, tmp_path), runs_of(world)

    tally, runs = in_world(scenario)
    assert len(failures) == 7
    assert set(runs.values()) == {1}  # also those whose acknowledgement alone was lost
    assert (tally.answered, tally.errors) == (60, 0)
    assert [entry["custom_id"] for entry in outputs(tmp_path)[0]] == [f"c{n}" for n in range(60)]


def test_lines_whose_sending_a_kill_made_forget_are_sent_again_and_answered(tmp_path):
    write(tmp_path, good(30))

    async def scenario(world):
        world.dispatcher("first")
        run = asyncio.ensure_future(go(world, tmp_path, "first run"))
        await asyncio.sleep(2)
        run.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await run
        progress = tmp_path / "out.jsonl.progress"
        progress.write_bytes(progress.read_bytes().partition(b"\n")[0] + b"\n")  # killed before it could write more
        world.ways["first"].kill()  # it has seen each of them, and forwarded none
        world.dispatcher("second")
        again = asyncio.ensure_future(go(world, tmp_path, "second run"))
        await asyncio.sleep(20)
        world.worker()
        return await again

    assert in_world(scenario).answered == 30


@pytest.mark.parametrize("way", ["restart", "resend", "other output"])
def test_a_batch_that_is_run_anew_inside_the_window_is_answered_anew(tmp_path, way):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        write(folder, good(20))

    async def scenario(world):
        world.answer()
        await go(world, one)
        if way == "other output":
            return await go(world, two, "again")
        progress = one / "out.jsonl.progress"
        if way == "restart":
            return await go(world, one, "again", restart=True)
        header = progress.read_bytes().partition(b"\n")[0]
        end = world.cluster.logs(TOPICS.results)[json.loads(header)["partition"]].end
        progress.write_bytes(header + b"\nM 20 %d\n" % end)  # the answers passed by and were not kept
        return await go(world, one, "again", resend=True)

    assert in_world(scenario).answered == 20


def test_no_more_is_in_flight_than_the_bound(tmp_path):
    write(tmp_path, good(60))
    reports = []

    async def scenario(world):
        world.answer()
        await go(world, tmp_path, limits=Limits(in_flight_max=5), reports=reports)

    in_world(scenario)
    assert max(report.in_flight for report in reports) == 5
    assert (reports[-1].total, reports[-1].answered, reports[-1].in_flight) == (60, 60, 0)
    done = [report.answered for report in reports]
    assert done == sorted(done)


def test_a_run_without_answers_stops_by_itself_and_goes_on_later(tmp_path):
    write(tmp_path, good(10))

    async def scenario(world):
        with pytest.raises(Stalled, match="no answer came for 30 s while 10 lines wait"):
            await go(world, tmp_path, "first", Limits(stall_ms=30_000))
        stopped_at = asyncio.get_running_loop().time()
        world.answer()
        tally = await go(world, tmp_path, "second", Limits(stall_ms=30_000))
        return stopped_at, tally, runs_of(world)

    stopped_at, tally, runs = in_world(scenario)
    assert 30 <= stopped_at < 32
    assert tally.answered == 10
    assert set(runs.values()) == {1}


def test_what_an_emptied_cluster_forgot_is_sent_again(tmp_path):
    write(tmp_path, good(30))

    async def first(world):
        producer = await world.way("other").producer()
        for partition in range(3):  # results that were there before, so that the saved offset is not 0
            await producer.send(Outgoing(TOPICS.results, b"{}", b"other", (), partition))
        with pytest.raises(Stalled):
            await go(world, tmp_path, limits=Limits(stall_ms=5_000))

    async def second(world):
        world.answer()
        return await go(world, tmp_path), runs_of(world)

    in_world(first)
    tally, runs = in_world(second)
    assert tally.answered == 30
    assert len(runs) == 30


def test_results_lost_to_retention_while_the_run_was_away_are_asked_for_again(tmp_path):
    write(tmp_path, good(20))

    async def scenario(world):
        with pytest.raises(Stalled):
            await go(world, tmp_path, "first", Limits(stall_ms=5_000))
        world.answer()
        await asyncio.sleep(10)
        for log in world.cluster.logs(TOPICS.results):
            log.trim(log.end)
        return await go(world, tmp_path, "second")

    assert in_world(scenario).answered == 20


def test_foreign_repeated_and_broken_results_harm_nobody(tmp_path):
    write(tmp_path, good(3))

    async def scenario(world):
        plan = plan_in(tmp_path)
        run = asyncio.ensure_future(run_batch(plan, world.way("batch"), TOPICS, Limits(stall_ms=5_000)))
        await asyncio.sleep(0.5)
        ids = [plan.request_id(index) for index in range(3)]
        first, second = (InferenceResult(ids[0], "completed", output_text=text) for text in ("first", "second"))
        values = [
            (ids[0], first),
            (ids[0], second),
            ("stranger", first),
            (ids[1], None),
            (ids[2], InferenceResult(ids[2], "expired")),
        ]
        producer = await world.way("answers").producer()
        for key, result in values:
            value = b"{broken" if result is None else codecs.encode(result)
            await producer.send(Outgoing(TOPICS.results, value, key.encode(), (), plan.header.partition))
        tally = await run
        plan.close()
        return tally

    tally = in_world(scenario)
    answered, errors = outputs(tmp_path)
    assert (tally.answered, tally.errors) == (1, 2)
    assert answered[0]["response"]["body"]["choices"][0]["text"] == "first"
    assert [entry["error"]["code"] for entry in errors] == ["internal", "batch_expired"]
    assert "cannot be read" in errors[0]["error"]["message"]


def test_lines_past_the_window_end_as_expired(tmp_path):
    write(tmp_path, good(3))

    async def scenario(world):
        world.answer()
        plan = plan_in(tmp_path)
        return await run_batch(plan, world.way("batch"), TOPICS, clock_ms=lambda: 0)

    assert in_world(scenario).errors == 3
    assert [entry["error"]["code"] for entry in outputs(tmp_path)[1]] == ["batch_expired"] * 3


def test_a_file_without_lines_gives_two_empty_files(tmp_path):
    write(tmp_path, [])

    async def scenario(world):
        return await go(world, tmp_path)

    tally = in_world(scenario)
    assert (tally.answered, tally.errors) == (0, 0)
    assert outputs(tmp_path) == [[], []]


def test_missing_topics_are_named_with_what_to_do(tmp_path):
    write(tmp_path, good(1))

    async def scenario(world):
        world.cluster = MemoryCluster(world.config.kafka)
        with pytest.raises(NoSuchTopic, match=r"forebay\.results does not exist: make it with `forebay topics ensure`"):
            await go(world, tmp_path)

    in_world(scenario)
    assert plan_in(tmp_path).header is None


def test_a_run_is_cancelled_by_its_name(tmp_path):
    write(tmp_path, good(20))
    plan = plan_in(tmp_path)
    name = plan.name
    plan.close()

    async def scenario(world):
        world.dispatcher()
        running = asyncio.ensure_future(go(world, tmp_path))
        await asyncio.sleep(5)  # all is sent, and nobody serves it
        stranger = await world.client().send("mine", id="other", batch="batch-of-somebody-else", max_output_tokens=2)
        await world.client("canceller").cancel(batch=name)
        tally = await running
        world.worker()
        found = world.client("reader").results("beginning", ids=[stranger], timeout_s=30)
        return tally, [result async for result in found]

    tally, (result,) = in_world(scenario)
    assert (tally.answered, tally.errors) == (0, 20)
    assert {entry["error"]["code"] for entry in outputs(tmp_path)[1]} == {"batch_cancelled"}
    assert result.status == "completed"
