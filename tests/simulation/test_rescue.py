"""Rescue of dead pools under virtual time: decided by the group alone, and nothing is lost or answered twice."""

import asyncio
import contextlib
import math
from collections import Counter

import pytest
from memory_stack import TOPICS, on_stack, prompts

from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing
from schemas import codecs, headers, parse_config
from schemas.messages import EngineStatus

SESSION_S, FAILOVER_S = 6, 15


def config_of(run_s=0.05, delivery="exactly_once"):
    sim = {"backend": "sim", "slots": 4, "options": {"ttft_ms": run_s * 1000, "tpot_ms": 5, "kill_on": "DIE"}}
    return parse_config(
        {
            "kafka": {"delivery": delivery},
            "worker": {"poison_crashes": 3},
            "engines": {
                "a": {"kind": "transformer", "model": "big", **sim},
                "b": {"kind": "ssm", "model": "small", **sim},
            },
            "topics": {"request_partitions": 2, "engine_partitions": 3, "result_partitions": 2, "retry_partitions": 1},
        }
    )


def requests(count, first=0, more=""):
    return [
        b'{"id":"r%d","model":"big","prompt":"say","max_output_tokens":4%s}' % (n, more.encode())
        for n in range(first, first + count)
    ]


def ghost(stack, pool="a", slots=64, partitions=(0, 1, 2)):
    """What a worker that nobody else knows of says of itself."""
    return EngineStatus(
        pool, "transformer", pool, "ghost", 1, stack.clock(), partitions=list(partitions), slots=slots, models=["big"]
    )


def places(stack, pool):
    """How many records lie in a pool's topic, and how many of its group's are unfinished."""
    return sum(log.end for log in stack.cluster.topics[TOPICS.engine(pool)].logs)


async def answered(stack, ids, limit_s=400):
    results = await stack.results(len(ids), limit_s)
    await asyncio.sleep(2 * FAILOVER_S)  # a second answer may come late
    results = [codecs.decode_result(r.value) for r in await stack.read(TOPICS.results)]
    assert Counter(r.request_id for r in results) == Counter(ids)
    assert {r.status for r in results} == {"completed"}
    return {r.request_id: r for r in results}


def ids(count, first=0):
    return [f"r{n}" for n in range(first, first + count)]


def test_requests_sent_to_a_pool_that_never_had_a_worker_are_answered_by_another_engine():
    async def scenario(stack):
        stack.dispatcher("d1")
        await asyncio.sleep(2)
        await stack.board.write(ghost(stack), 1000)  # an idle worker, as it seems
        await stack.produce(requests(20))
        await asyncio.sleep(2)
        assert places(stack, "a") >= 20
        stack.worker("w", "b")
        began = asyncio.get_running_loop().time()
        by_id = await answered(stack, ids(20))
        assert asyncio.get_running_loop().time() - began < FAILOVER_S + 90
        assert {r.engine for r in by_id.values()} == {"b"}
        assert {r.run_id for r in by_id.values()} == {"000001.000000"}  # one hop on

    on_stack(scenario, config_of())


def test_a_request_that_only_its_own_engine_may_answer_waits_for_it():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w", "b")
        await asyncio.sleep(2)
        await stack.board.write(ghost(stack), 1000)
        await stack.produce(requests(5, more=',"fallback":"none"'))
        await asyncio.sleep(120)
        assert await stack.read(TOPICS.results) == []
        assert len(await stack.read(TOPICS.retries)) == 5, "rescued once, and then it waits where it costs nobody anything"
        stack.worker("late", "a")
        by_id = await answered(stack, ids(5))
        assert {r.engine for r in by_id.values()} == {"a"}

    on_stack(scenario, config_of())


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
def test_what_the_last_worker_had_in_hand_is_rescued_after_the_time_out_and_not_before(delivery):
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1", "a")
        await stack.produce(requests(10))
        await asyncio.sleep(3)
        assert places(stack, "a") >= 6
        stack.kill("w1")
        stack.worker("w2", "b")
        killed = asyncio.get_running_loop().time()
        while not await stack.read(TOPICS.retries):
            pass
        waited = asyncio.get_running_loop().time() - killed
        assert SESSION_S + FAILOVER_S <= waited < SESSION_S + FAILOVER_S + 5
        by_id = await answered(stack, ids(10), 1000)
        assert {r.engine for r in by_id.values()} == {"b"}

    on_stack(scenario, config_of(60, delivery))


def test_a_worker_that_appears_in_the_middle_of_a_rescue_takes_over_and_nothing_is_lost_or_twice():
    async def scenario(stack, step_at, name):
        """The rescuer's n-th step of that name waits until a new worker of the pool has begun to serve."""
        stack.dispatcher("d1")
        stack.worker("w1", "a")
        await stack.produce(requests(12))
        await asyncio.sleep(3)
        stack.kill("w1")
        seen, appeared = 0, asyncio.Event()

        def rescues(step):
            return TOPICS.engine("a") in step.subject or (name == "produce" and TOPICS.retries in step.subject)

        async def hook(step):
            nonlocal seen
            if (step.process, step.moment, step.operation) == ("d1", "before", name) and rescues(step):
                seen += 1
                if seen == step_at:
                    stack.worker("w2", "a")
                    appeared.set()
                    await asyncio.sleep(2)

        stack.cluster.hook = hook
        await asyncio.wait_for(appeared.wait(), 60)
        stack.cluster.hook = None
        await answered(stack, ids(12), 1000)

    for name, most in (("committed", 4), ("init", 1), ("produce", 1), ("offsets", 1), ("end", 1)):
        for step_at in range(1, most + 1):
            on_stack(lambda stack, at=step_at, name=name: scenario(stack, at, name), config_of(20))


def test_wiping_redis_rescues_nobody_who_lives():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1", "a")
        stack.worker("w2", "b")
        await stack.produce(requests(6))
        for _ in range(60):
            stack.board.wipe()
            await asyncio.sleep(1)
        assert await stack.read(TOPICS.retries) == []
        by_id = await answered(stack, ids(6))
        assert all(len(r.route) == 1 for r in by_id.values())

    on_stack(scenario, config_of(90))


def test_a_group_that_does_not_answer_is_unknown_and_not_dead():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1", "a")
        await stack.produce(requests(4))
        await asyncio.sleep(3)

        async def hook(step):
            if step.operation == "members":
                message = "no answer"
                raise TransportError(message)

        stack.cluster.hook = hook
        stack.kill("w1")
        await asyncio.sleep(SESSION_S + 2 * FAILOVER_S)
        assert await stack.read(TOPICS.retries) == []
        stack.cluster.hook = None
        await asyncio.sleep(FAILOVER_S - 2)
        assert await stack.read(TOPICS.retries) == [], "what nobody saw does not count"
        stack.worker("w2", "b")
        await answered(stack, ids(4))

    on_stack(scenario, config_of(60))


def test_a_frozen_worker_that_thaws_after_the_rescue_answers_nothing_twice():
    async def scenario(stack, thaw_after_s):
        stack.dispatcher("d1")
        stack.worker("w1", "a")
        await stack.produce(requests(8))
        await asyncio.sleep(3)
        thawed = asyncio.Event()

        async def hook(step):
            if step.process == "w1":
                await thawed.wait()

        stack.cluster.hook = hook
        stack.ways["w1"].freeze()
        stack.worker("w2", "b")
        await asyncio.sleep(thaw_after_s)
        thawed.set()
        stack.cluster.hook = None
        stack.ways["w1"].thaw()
        await answered(stack, ids(8))

    for thaw_after_s in (SESSION_S + FAILOVER_S - 2, SESSION_S + FAILOVER_S, SESSION_S + FAILOVER_S + 1, 60):
        on_stack(lambda stack, after=thaw_after_s: scenario(stack, after), config_of(10))


def test_a_record_without_a_readable_envelope_is_a_dead_letter_and_stands_in_nobodys_way():
    async def scenario(stack):
        stack.dispatcher("d1")
        producer = await stack.transport.producer()
        await producer.send(Outgoing(TOPICS.engine("a"), b"junk", b"k", ((headers.ENVELOPE, b"\xff"),), 0))
        await stack.board.write(ghost(stack, partitions=(0,)), 1000)
        await stack.produce(requests(3))
        stack.worker("w", "b")
        await answered(stack, ids(3))
        (dead,) = await stack.read(TOPICS.dead_letters)
        assert dead.value == b"junk"
        assert headers.text(dead.headers, headers.DEAD_TOPIC) == TOPICS.engine("a")

    on_stack(scenario, config_of())


def test_what_kills_the_only_worker_of_pool_after_pool_is_found_and_ends_alone():
    async def scenario(stack):
        stack.dispatcher("d1")
        bad = b'{"id":"bad","model":"big","prompt":"please DIE now","max_output_tokens":4}'
        await stack.produce([*requests(3), bad, *requests(3, first=3)])
        for n, pool in enumerate("abab"):
            worker, died = stack.worker(f"w{n}", pool), asyncio.Event()
            worker._engine._kill = died.set
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(died.wait(), 3 * FAILOVER_S)
                stack.kill(f"w{n}")
                await asyncio.sleep(1)
        by_id = {r.request_id: r for r in await stack.results(7)}
        assert len(by_id) == len(await stack.read(TOPICS.results)) == 7
        assert [name for name, result in by_id.items() if result.status != "completed"] == ["bad"]
        assert by_id["bad"].error.code == "poison"
        assert "3 times" in by_id["bad"].error.message
        assert [n for n in range(4) if f"w{n}" in stack.tasks] == [3]

    on_stack(scenario, config_of())


def test_a_dead_pool_is_left_alone_once_it_is_empty():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w", "b")
        await asyncio.sleep(2)
        await stack.board.write(ghost(stack), 1000)
        await stack.produce(requests(5))
        await answered(stack, ids(5))
        opened = []

        async def hook(step):
            if step.operation == "init" and TOPICS.engine("a") in step.subject:
                opened.append(step.subject)

        stack.cluster.hook = hook
        await asyncio.sleep(5 * FAILOVER_S)
        assert opened == []
        await stack.board.write(ghost(stack, slots=1_000), 1000)  # and it is looked at again when something comes
        await stack.produce(requests(5, first=5))
        await answered(stack, ids(10))
        assert opened

    on_stack(scenario, config_of())


def test_a_pool_whose_topic_is_not_there_yet_disturbs_nobody():
    async def scenario(stack):
        stack.cluster.topics.pop(TOPICS.engine("a"))
        stack.dispatcher("d1")
        stack.worker("w", "b")
        await asyncio.sleep(3 * FAILOVER_S)
        await stack.produce(prompts(5))
        await answered(stack, ids(5))
        assert not stack.tasks["d1"].done()

    on_stack(scenario, config_of())


def test_another_dispatcher_goes_on_with_a_rescue_whose_dispatcher_was_killed():
    async def scenario(stack, step_at):
        stack.dispatcher("d1")
        await asyncio.sleep(1)
        stack.dispatcher("d2")
        stack.worker("w1", "a")
        await stack.produce(requests(12))
        await asyncio.sleep(3)
        stack.kill("w1")
        stack.worker("w2", "b")
        seen, killed = 0, asyncio.Event()

        async def hook(step):
            nonlocal seen
            rescues = step.process == "d1" and step.operation in {"init", "produce", "offsets", "end"}
            if rescues and not killed.is_set() and asyncio.get_running_loop().time() > SESSION_S + FAILOVER_S:
                seen += 1
                if seen == step_at:
                    killed.set()
                    stack.ways["d1"].kill()
                    await asyncio.sleep(math.inf)

        stack.cluster.hook = hook
        await asyncio.wait_for(killed.wait(), 90)
        stack.tasks.pop("d1").cancel()
        await answered(stack, ids(12), 1000)

    for step_at in range(1, 12):
        on_stack(lambda stack, at=step_at: scenario(stack, at), config_of(20))
