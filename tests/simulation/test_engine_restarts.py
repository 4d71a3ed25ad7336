"""An engine that is away for a minute under thousands of requests: each is answered once, and none is given up."""

import asyncio
from collections import Counter

from cells import until
from memory_stack import TOPICS, config_of, on_stack

from engine_consumers.errors import EngineError
from schemas.errors import ErrorCode

AWAY_S, LIMIT_S = 60.0, 600.0
COUNT, FIRST, SLOTS = 5_000, 1_000, 16


def on_restarts(scenario, **dispatcher):
    """Run a scenario with short answers, and with little patience for a pool without a worker."""
    return on_stack(scenario, config_of(slots=SLOTS, dispatcher={"failover_timeout_ms": 10_000, **dispatcher}, tpot_ms=0))


def requests():
    return [b'{"id":"r%d","tenant":"t%d","prompt":"say","max_output_tokens":2}' % (n, n % 3) for n in range(COUNT)]


async def begun(stack, *workers):
    """Serve the first of them; gives the workers."""
    stack.dispatcher("d1")
    started = [stack.worker(name) for name in workers]
    await stack.produce(requests())
    await until(lambda: answered(stack) >= FIRST)
    return started


def answered(stack):
    """How many records the results have, transaction markers included."""
    return sum(log.end for log in stack.cluster.topics[TOPICS.results].logs)


async def are_answered_once(stack):
    """Give the results: one for each, completed; and no dead letter."""
    await stack.results(COUNT, LIMIT_S)
    await asyncio.sleep(AWAY_S)  # a second answer may come late
    results = await stack.results(COUNT)
    assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(COUNT))
    assert Counter(r.status for r in results) == {"completed": COUNT}
    assert await stack.read(TOPICS.dead_letters) == []
    return results


def handed_back(results):
    """How often each was handed back, where it was."""
    return [len(r.route) - 1 for r in results if len(r.route) > 1]


def refuse(engine, until_s):
    """Let an engine that is alive refuse all that comes and fail all that runs, until that moment of the loop's clock."""
    loop, check = asyncio.get_running_loop(), engine._runs.check_alive

    def check_alive():
        if loop.time() < until_s:
            message = "its backend starts again"
            raise EngineError(ErrorCode.UNHEALTHY, message)
        check()

    engine._runs.check_alive = check_alive


def test_the_only_engine_dies_and_another_worker_starts_a_minute_later():
    async def scenario(stack):
        (worker,) = await begun(stack, "w1")
        running = len(worker._engine._runs)
        worker._engine.kill()
        await stack.tasks.pop("w1")
        assert worker.engine_died
        before = len(await stack.results(FIRST))
        await asyncio.sleep(AWAY_S)
        assert len(await stack.results(FIRST)) == before < COUNT
        stack.worker("w2")
        return running, await are_answered_once(stack)

    running, results = on_restarts(scenario)
    assert {r.worker for r in results} == {"w1", "w2"}
    assert 0 < running <= SLOTS
    assert handed_back(results) == [1] * running


def test_the_only_engine_dies_without_a_word_and_comes_back_under_its_name_a_minute_later():
    async def scenario(stack):
        await begun(stack, "w1")
        stack.kill("w1")
        await asyncio.sleep(AWAY_S)
        stack.worker("w1")
        return await are_answered_once(stack)

    results = on_restarts(scenario)
    assert {r.run_id for r in results} == {"000000.000000", "000001.000000"}  # rescued, or never sent


def test_the_only_engine_stays_and_refuses_everything_for_a_minute():
    async def scenario(stack):
        (worker,) = await begun(stack, "w1")
        refuse(worker._engine, asyncio.get_running_loop().time() + AWAY_S)
        await asyncio.sleep(1)  # for the last results to be written
        before = answered(stack)
        await asyncio.sleep(AWAY_S - 2)
        assert answered(stack) == before
        return await are_answered_once(stack)

    times = handed_back(on_restarts(scenario))
    assert 5 < len(times) < COUNT / 10, "its breaker opened: it was probed, and ever more seldom; all others waited"
    assert 1 <= max(times) < 20


def test_one_engine_of_two_refuses_everything_for_a_minute():
    async def scenario(stack):
        sick, _ = await begun(stack, "w1", "w2")
        refuse(sick._engine, asyncio.get_running_loop().time() + AWAY_S)
        return await are_answered_once(stack)

    results = on_restarts(scenario)
    assert set(handed_back(results)) == {1}
    assert all(r.worker == "w2" for r in results if len(r.route) > 1)
