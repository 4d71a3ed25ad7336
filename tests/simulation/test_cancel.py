"""Cancel on the whole path: wherever a request is, it ends once."""

import asyncio
from collections import Counter

import pytest
from client_world import in_world
from memory_stack import config_of

from broker.transport.protocol import Outgoing
from engine_consumers.worker import Worker
from schemas import ErrorInfo, Topics, codecs, headers
from schemas.errors import ErrorCode

TOPICS = Topics()
MOMENT_S = 0.01  # so that what is sent next bears a later time
SOON_S = 2.0


async def outcomes(world, count, limit_s=60.0):
    """Request id -> the statuses of its terminal records, once there are so many of them, and nothing more a while later."""
    until = asyncio.get_running_loop().time() + limit_s
    while len(await world.read(TOPICS.results)) < count and asyncio.get_running_loop().time() < until:
        pass  # reading takes its time
    await asyncio.sleep(5)
    found = {}
    for record in await world.read(TOPICS.results):
        result = codecs.decode_result(record.value)
        found.setdefault(result.request_id, []).append(result.status)
    return found


async def send(client, *ids, **fields):
    for one in ids:
        await client.send("say it", id=one, max_output_tokens=4, **fields)


def test_what_is_unread_is_cancelled_when_it_is_read():
    async def scenario(world):
        client = world.client()
        await send(client, "one", "kept", tenant="a")
        await send(client, "two", "three", tenant="b")
        await send(client, "four", "five", batch="nightly")
        await client.cancel("one")
        await client.cancel(tenant="b")
        await client.cancel(batch="nightly")
        world.answer()
        return await outcomes(world, 6), await world.read(TOPICS.dead_letters)

    found, dead = in_world(scenario)
    assert found == {"kept": ["completed"]} | {name: ["cancelled"] for name in ("one", "two", "three", "four", "five")}
    assert dead == []


def test_what_is_queued_is_cancelled_at_once():
    async def scenario(world):
        client = world.client()
        world.dispatcher()
        await send(client, *(f"r{n}" for n in range(20)), tenant="a")
        await asyncio.sleep(SOON_S)  # all of it is in hand, and nobody serves it
        began = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(client.submit("wait", id="mine", tenant="a"))
        await asyncio.sleep(SOON_S)
        await client.cancel(tenant="a")
        result = await asyncio.wait_for(waiting, 5)
        took_s = asyncio.get_running_loop().time() - began - SOON_S
        return await outcomes(world, 21), result, took_s

    found, result, took_s = in_world(scenario)
    assert found == {f"r{n}": ["cancelled"] for n in range(20)} | {"mine": ["cancelled"]}
    assert result.error.code == "cancelled"
    assert took_s < 1


def test_a_retry_that_waits_for_its_time_is_cancelled_at_once():
    async def scenario(world):
        client = world.client()
        world.answer()
        await send(client, "r")
        await asyncio.sleep(SOON_S)
        (retried,) = await world.read(TOPICS.retries)
        envelope = codecs.decode_envelope(headers.get(retried.headers, headers.ENVELOPE))
        assert envelope.not_before_ms > world.clock() + 10_000
        assert await world.read(TOPICS.results) == []
        await client.cancel("r")
        began = asyncio.get_running_loop().time()
        found = await outcomes(world, 1, limit_s=5)
        return found, asyncio.get_running_loop().time() - began, await world.read(TOPICS.dead_letters)

    slow = config_of(dispatcher={"retry_backoff_ms": 25_000}, fail_every=1)
    found, took_s, dead = in_world(scenario, slow)
    assert found == {"r": ["cancelled"]}
    assert took_s < 10
    assert dead == []


def test_a_cancel_holds_over_a_restart_of_the_dispatcher():
    async def scenario(world):
        client = world.client()
        world.dispatcher("d1")
        await send(client, "read", tenant="a")
        await asyncio.sleep(SOON_S)
        world.kill("d1")
        await send(client, "unread", "kept", tenant="b")
        await client.cancel("read")
        await client.cancel("unread", tenant="b")
        await asyncio.sleep(30)
        world.dispatcher("d2")
        world.worker()
        return await outcomes(world, 3)

    assert in_world(scenario) == {"read": ["cancelled"], "unread": ["cancelled"], "kept": ["completed"]}


def test_a_dispatcher_that_took_over_knows_what_its_predecessor_knew():
    async def scenario(world):
        client = world.client()
        world.answer()
        await send(client, "r")  # it fails, and its retry waits for its time
        await asyncio.sleep(SOON_S)
        world.kill("w")
        await client.cancel("r")
        world.kill("d")
        await asyncio.sleep(SOON_S)
        world.dispatcher("d2")
        return await outcomes(world, 1)

    slow = config_of(dispatcher={"retry_backoff_ms": 25_000}, fail_every=1)
    assert in_world(scenario, slow) == {"r": ["cancelled"]}


def test_nothing_is_consumed_before_the_control_topic_was_read():
    async def scenario(world):
        async def hook(step):
            if (step.moment, step.operation, step.subject) == ("before", "poll", f"{TOPICS.control}/0"):
                await asyncio.sleep(5)  # by then everything else would have been served

        world.worker()
        client = world.client()
        await send(client, "r")
        await client.cancel("r")
        world.cluster.hook = hook
        world.dispatcher()
        return await outcomes(world, 1)

    assert in_world(scenario) == {"r": ["cancelled"]}


def test_what_is_sent_later_is_not_touched_also_under_the_same_id():
    async def scenario(world):
        client = world.client()
        world.dispatcher()
        await send(client, "early", "again", tenant="a")
        await send(client, "other", tenant="b")
        await asyncio.sleep(SOON_S)
        await client.cancel(tenant="a")
        await client.cancel("again")
        await asyncio.sleep(MOMENT_S)
        await send(client, "late", "again", tenant="a")
        world.worker()
        return await outcomes(world, 5)

    found = in_world(scenario)
    assert found.pop("again") in (["cancelled", "completed"], ["completed", "cancelled"])
    assert found == {"early": ["cancelled"], "late": ["completed"], "other": ["completed"]}


@pytest.mark.parametrize("while_looked_up", [False, True])
def test_the_reply_topic_is_told_too(while_looked_up):
    async def scenario(world):
        world.cluster.add_topic("mine.replies")
        if while_looked_up:

            async def hook(step):
                if (step.moment, step.operation, step.subject) == ("before", "partitions", "mine.replies"):
                    await asyncio.sleep(1)

            world.cluster.hook = hook
        world.dispatcher()
        await asyncio.sleep(SOON_S)
        producer = await world.way("stranger").producer()
        named = (("kafka_replyTopic", b"mine.replies"), ("kafka_correlationId", b"c1"), (headers.BATCH, b"b"))
        value = b'{"id":"r","prompt":"a"}'
        await (await producer.send(Outgoing(TOPICS.requests("interactive"), value, None, named)))
        await asyncio.sleep(0.5)
        await world.client().cancel(batch="b")
        return await outcomes(world, 1), await world.read("mine.replies")

    found, replies = in_world(scenario)
    assert found == {"r": ["cancelled"]}
    (reply,) = replies
    assert codecs.decode_result(reply.value).status == "cancelled"
    assert headers.get(reply.headers, "kafka_correlationId") == b"c1"


def test_a_malformed_control_record_stops_nobody():
    async def scenario(world):
        producer = await world.way("stranger").producer()
        for value in (b"no json", None, b'{"kind":"pause","tenant":"a"}'):
            await (await producer.send(Outgoing(TOPICS.control, value, partition=0)))
        world.answer()
        client = world.client()
        await send(client, "r")
        return await outcomes(world, 1)

    assert in_world(scenario) == {"r": ["completed"]}


def test_whenever_a_cancel_comes_each_request_ends_once():
    async def scenario(world):
        client = world.client()
        world.answer()
        await asyncio.sleep(SOON_S)
        ids = [f"r{n}" for n in range(100)]

        async def race(n):
            await send(client, ids[n])
            await asyncio.sleep(n * 37 % 100 * 0.01)  # from before it is read until long after it has ended
            await client.cancel(ids[n])

        await asyncio.gather(*(race(n) for n in range(100)))
        return await outcomes(world, 100)

    found = in_world(scenario)
    assert Counter(len(statuses) for statuses in found.values()) == {1: 100}
    statuses = Counter(status for one in found.values() for status in one)
    assert set(statuses) == {"completed", "cancelled"}
    assert sum(statuses.values()) == 100


def test_a_deadline_ends_what_waits_behind_others():
    async def scenario(world):
        client = world.client()
        world.dispatcher()
        await send(client, "patient")
        await asyncio.sleep(SOON_S)
        result = await client.submit("say it", id="urgent", deadline=world.deadline(3), timeout_s=30)
        world.worker()
        return await outcomes(world, 2), result

    found, result = in_world(scenario)
    assert found == {"patient": ["completed"], "urgent": ["expired"]}
    assert result.error.message == "the deadline passed while it waited"


def test_a_run_that_is_ended_before_its_first_step_is_answered(monkeypatch):
    launch = Worker._launch

    def launch_and_end(self, job):
        launch(self, job)
        if job.envelope.id == "early":
            self._end(job, ErrorInfo(ErrorCode.CANCELLED, "cancelled"))

    async def scenario(world):
        monkeypatch.setattr(Worker, "_launch", launch_and_end)
        world.answer()
        await send(world.client(), "early", "kept")
        return await outcomes(world, 2)

    assert in_world(scenario) == {"early": ["cancelled"], "kept": ["completed"]}


def test_one_sent_again_without_its_batch_after_the_batch_was_cancelled_runs():
    async def scenario(world):
        client = world.client()
        world.dispatcher()
        await send(client, "r", batch="nightly")
        await asyncio.sleep(SOON_S)
        await client.cancel(batch="nightly")
        await asyncio.sleep(MOMENT_S)
        await send(client, "r")
        world.worker()
        return await outcomes(world, 2)

    assert sorted(in_world(scenario)["r"]) == ["cancelled", "completed"]


def test_results_of_tenants_that_share_an_id_are_all_given():
    async def scenario(world):
        world.answer()
        client = world.client()
        for tenant in ("a", "b"):
            await send(client, "same", tenant=tenant)
        await outcomes(world, 2)
        return [result.tenant async for result in client.results("beginning", follow=False, ids=["same"])]

    assert sorted(in_world(scenario)) == ["a", "b"]
