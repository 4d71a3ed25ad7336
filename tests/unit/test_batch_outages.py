"""Batch runs on a cluster that is away for a while, or that does not take what is sent."""

import asyncio
from itertools import pairwise

import pytest
from batch_world import TOPICS, go, good, plan_in, write
from client_world import in_world

from broker.batch import Limits, Stalled, run_batch
from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing


def test_a_cluster_that_stays_away_ends_the_run_in_time_and_one_that_returns_does_not(tmp_path):
    write(tmp_path, good(200))

    async def scenario(world):
        world.answer()
        first = asyncio.ensure_future(go(world, tmp_path, "first", Limits(in_flight_max=10, absence_ms=60_000)))
        await asyncio.sleep(1)
        world.cluster.stop()
        began = asyncio.get_running_loop().time()
        with pytest.raises(Stalled, match="gave up after 60 s"):
            await first
        gave_up_s = asyncio.get_running_loop().time() - began
        world.cluster.start()
        second = asyncio.ensure_future(go(world, tmp_path, "second", Limits(in_flight_max=10)))
        await asyncio.sleep(1)
        world.cluster.stop()
        await asyncio.sleep(50)
        world.cluster.start()
        return gave_up_s, await second

    gave_up_s, tally = in_world(scenario)
    assert 55 < gave_up_s < 90  # counted from when it was last heard of
    assert (tally.answered, tally.errors) == (200, 0)


def test_an_outage_is_told_in_time_and_so_is_its_end(tmp_path):
    write(tmp_path, good(200))

    async def scenario(world):
        loop, told = asyncio.get_running_loop(), []
        world.answer()
        plan, limits = plan_in(tmp_path), Limits(in_flight_max=10)
        run = asyncio.ensure_future(
            run_batch(plan, world.way("batch"), TOPICS, limits, report=lambda now: told.append((loop.time(), now.away_s)))
        )
        await asyncio.sleep(1)
        world.cluster.stop()
        stopped = loop.time()
        await asyncio.sleep(100)
        world.cluster.start()
        back = loop.time()
        tally = await run
        plan.close()
        away = [at for at, away_s in told if away_s]
        assert not [away_s for at, away_s in told if at < stopped + 9 and away_s]
        assert 10 <= away[0] - stopped < 15
        assert max(later - earlier for earlier, later in pairwise(away)) < 10, "whoever looks on sees it going on"
        assert away[-1] < back + 10
        assert told[-1][1] == 0.0
        return tally

    assert in_world(scenario).answered == 200


def test_a_transport_that_only_remembers_that_it_was_connected_does_not_hide_an_outage(tmp_path):
    write(tmp_path, good(200))

    async def scenario(world):
        way, reports = world.way("batch"), []

        async def was_connected():
            """As with a client that keeps its connection."""

        world.answer()
        plan = plan_in(tmp_path)
        run = asyncio.ensure_future(run_batch(plan, way, TOPICS, Limits(in_flight_max=10), report=reports.append))
        await asyncio.sleep(1)
        way.check = was_connected
        world.cluster.stop()
        await asyncio.sleep(20)
        assert reports[-1].away_s >= 15
        world.cluster.start()
        tally = await run
        plan.close()
        return tally

    assert in_world(scenario).answered == 200


def test_no_answer_is_missed_while_the_cluster_is_away(tmp_path):
    write(tmp_path, good(200))

    async def scenario(world):
        world.answer()
        run = asyncio.ensure_future(go(world, tmp_path, limits=Limits(in_flight_max=10, stall_ms=30_000)))
        await asyncio.sleep(1)
        world.cluster.stop()
        await asyncio.sleep(120)
        world.cluster.start()
        return await run

    assert in_world(scenario).answered == 200


def test_one_failed_send_after_a_long_quiet_time_ends_nothing(tmp_path):
    write(tmp_path, good(2))
    failures = []

    async def scenario(world):
        async def hook(step):
            if (step.operation, step.moment, step.process) == ("send", "before", "batch") and loop.time() > 100 and not failures:
                failures.append(step)
                message = "the leader moved"
                raise TransportError(message)

        loop = asyncio.get_running_loop()
        world.cluster.hook = hook
        run = asyncio.ensure_future(go(world, tmp_path, limits=Limits(in_flight_max=1, absence_ms=60_000)))
        await asyncio.sleep(100)  # nobody answers, so nothing more is sent
        world.answer()
        return await run

    assert in_world(scenario).answered == 2
    assert failures


def test_requests_that_are_never_taken_end_the_run_in_time_with_the_reason(tmp_path):
    write(tmp_path, good(5))
    reports = []

    async def scenario(world):
        async def hook(step):
            if (step.operation, step.moment, step.process) == ("send", "before", "first"):
                message = "not enough replicas"
                raise TransportError(message)

        world.cluster.hook = hook
        with pytest.raises(Stalled, match=r"gave up after 60 s of errors: .*not enough replicas.*the same command goes on"):
            await go(world, tmp_path, "first", Limits(absence_ms=60_000, stall_ms=30_000), reports)
        ended_s = asyncio.get_running_loop().time()
        world.cluster.hook = None
        world.answer()
        return ended_s, await go(world, tmp_path, "second")

    ended_s, tally = in_world(scenario)
    assert 60 <= ended_s < 70
    assert reports[-1].away_s > 50
    assert tally.answered == 5


def test_an_outage_while_it_looks_where_the_results_begin_now_is_borne(tmp_path):
    write(tmp_path, good(20))
    failures = []

    async def scenario(world):
        async def hook(step):
            if (step.operation, step.process, step.moment) == ("bounds", "second", "before") and trimmed and len(failures) < 3:
                failures.append(step)
                message = "no leader"
                raise TransportError(message)

        trimmed = []
        with pytest.raises(Stalled):
            await go(world, tmp_path, "first", Limits(stall_ms=5_000))
        run = asyncio.ensure_future(go(world, tmp_path, "second"))
        await asyncio.sleep(1)
        world.cluster.hook = hook
        producer = await world.way("other").producer()
        for log in world.cluster.logs(TOPICS.results):
            for _ in range(5):
                await (await producer.send(Outgoing(TOPICS.results, b"{}", b"other", (), log.tp.partition)))
            log.trim(log.end)
        trimmed.append(True)
        world.answer()
        return await run

    assert in_world(scenario).answered == 20
