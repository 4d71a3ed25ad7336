"""Trimming under virtual time: finished work goes, unfinished work never does, and no healthy reader is alarmed."""

import asyncio
from collections import Counter

import pytest
from memory_stack import INTERACTIVE, TOPICS, config_of, on_stack, prompts
from virtual_loop import run_virtual

from broker.transport.control_log import ControlLog
from broker.transport.errors import TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Committed, Outgoing, TopicPartition
from broker.transport.settings import Settings
from dispatcher.trim import Trim
from schemas import codecs, headers, parse_config
from schemas.messages import Envelope

HOUR_MS = 3_600_000
DAY_S = 86_400
CONTROL = TopicPartition(TOPICS.control, 0)
REQUEST = TopicPartition(INTERACTIVE, 0)
RETRY = TopicPartition(TOPICS.retries, 0)
ENGINE = TopicPartition(TOPICS.engine("sim"), 0)
GROUPS = {REQUEST: TOPICS.dispatcher_group, RETRY: TOPICS.dispatcher_group, ENGINE: TOPICS.engine_group("sim")}


def small(results_retention_ms=HOUR_MS, control_retention_ms=HOUR_MS):
    return parse_config(
        {
            "engines": {"sim": {"kind": "sim", "slots": 4, "options": {"ttft_ms": 20, "tpot_ms": 5}}},
            "topics": {
                "request_partitions": 1,
                "engine_partitions": 2,
                "result_partitions": 1,
                "retry_partitions": 1,
                "results_retention_ms": results_retention_ms,
                "streams_retention_ms": 60_000,
            },
            "dispatcher": {"trim_interval_ms": 5_000, "control_retention_ms": control_retention_ms},
        }
    )


def bounds(stack, topic):
    return [(log.first, log.end) for log in stack.cluster.topics[topic].logs]


def held(stack, *topics):
    return sum(end - first for topic in topics for first, end in bounds(stack, topic))


# -- the whole path ------------------------------------------------------------------------------------------------------


def test_finished_work_is_deleted_and_nothing_else():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b"junk", b'{"id":"s","prompt":"a","stream":true,"max_output_tokens":40}', *prompts(50)])
        await stack.results(51)
        kept = [bounds(stack, topic) for topic in (TOPICS.results, TOPICS.streams, TOPICS.dead_letters)]
        await asyncio.sleep(11)
        assert held(stack, INTERACTIVE, TOPICS.requests("batch"), TOPICS.retries) == 0
        assert held(stack, ENGINE.topic) <= 2, "but for the last commits' markers"
        assert [bounds(stack, topic) for topic in (TOPICS.results, TOPICS.streams, TOPICS.dead_letters)] == kept
        for name in ("d1", "w1"):  # whoever comes next finds everything in order
            stack.kill(name)
        stack.dispatcher("d2")
        stack.worker("w2")
        await stack.produce(prompts(60)[50:])
        results = await stack.results(61)
        assert len(results) == 61
        assert len({r.request_id for r in results}) == 61

    on_stack(scenario, small())


def test_what_is_not_finished_stays_however_often_is_trimmed():
    async def scenario(stack):
        stack.dispatcher("d1")
        await stack.produce(prompts(20))
        await asyncio.sleep(60)
        assert bounds(stack, INTERACTIVE) == [(0, 20)]
        stack.worker("w1")
        assert Counter(r.request_id for r in await stack.results(20)) == Counter(f"r{n}" for n in range(20))

    on_stack(scenario, small())


def test_processes_that_come_and_go_while_everything_is_trimmed_see_no_loss():
    async def scenario(stack):
        for n in range(4):
            stack.dispatcher(f"d{n}")
            stack.worker(f"w{n}")
            await stack.produce(prompts(100 * (n + 1))[100 * n :])
            await asyncio.sleep(7 + n)
            for name in (f"d{n}", f"w{n}"):
                stack.kill(name)
        stack.dispatcher("d")
        stack.worker("w")
        results = await stack.results(400)
        assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(400))
        assert not stack.tasks["d"].done()
        assert not stack.tasks["w"].done()

    on_stack(scenario, small(24 * HOUR_MS))


def test_a_backlog_of_eight_days_is_answered_though_everything_else_has_expired():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce(prompts(10))
        assert len(await stack.results(10)) == 10
        stack.kill("w1")
        await stack.produce(prompts(30)[10:])
        await asyncio.sleep(2)
        stack.kill("d1")
        assert len(await stack.read(ENGINE.topic)) > 10, "some were sent to the worker already"
        await asyncio.sleep(8 * DAY_S)
        assert await stack.read(TOPICS.results) == [], "results do expire"
        stack.dispatcher("d2")
        stack.worker("w2")
        results = await stack.results(20)
        assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(10, 30))
        assert {r.status for r in results} == {"completed"}
        assert min(r.timing.latency_ms for r in results) > 8 * DAY_S * 1000

    on_stack(scenario, small())


def test_a_cancel_that_means_nobody_any_more_is_deleted_and_its_readers_go_on():
    async def scenario(stack):
        stack.dispatcher("d1")
        await stack.produce(prompts(4))
        await asyncio.sleep(2)
        await stack.produce([b'{"kind":"cancel","id":"r1"}'], TOPICS.control)
        await asyncio.sleep(60)
        assert bounds(stack, TOPICS.control) == [(0, 1)], "others of its time are unfinished"
        stack.worker("w1")
        await stack.results(4)
        await asyncio.sleep(15)
        assert bounds(stack, TOPICS.control) == [(1, 1)]
        await stack.produce([b'{"kind":"cancel","id":"later"}'], TOPICS.control)
        stack.kill("d1")
        stack.dispatcher("d2")  # replays what is left
        await stack.produce(prompts(6)[4:])
        assert {r.request_id: r.status for r in await stack.results(6)} == {
            f"r{n}": "cancelled" if n == 1 else "completed" for n in range(6)
        }

    on_stack(scenario, small(control_retention_ms=1_000))


# -- one round -------------------------------------------------------------------------------------------------------------


class Cell:
    """The topics of a cell and what trims them; the clock is the test's."""

    def __init__(self, cluster, trim, producer):
        self.cluster, self.trim, self.producer = cluster, trim, producer

    async def write(self, tp, received_at_ms=None):
        """One record; in inner topics with an envelope that tells its age."""
        envelope = Envelope("r", "t", "batch", (INTERACTIVE, 0, 0), received_at_ms or 0)
        inner = ((headers.ENVELOPE, codecs.encode_envelope(envelope)),) if received_at_ms is not None else ()
        await self.producer.send(Outgoing(tp.topic, b"{}", None, inner, tp.partition))

    def commit(self, tp, offset):
        self.cluster.commit(GROUPS[tp], tp, Committed(offset))

    def bounds(self, tp):
        log = self.cluster.log(tp)
        return log.first, log.end


def in_cell(scenario):
    async def main():
        config, now = config_of(), [100 * HOUR_MS]
        cluster = MemoryCluster(config.kafka, clock=lambda: now[0] / 1000)
        transport = MemoryTransport(cluster, "d")
        admin = await transport.admin()
        await admin.ensure(TOPICS.specs(config.topics, config.pools), 1, 1)
        control = ControlLog(transport, TOPICS, settings=Settings(config))
        await control.replay()
        following = asyncio.ensure_future(control.run(lambda: None))
        cell = Cell(cluster, Trim(config, transport, admin, lambda: now[0], control), await transport.producer())
        cell.now = now
        await scenario(cell)
        following.cancel()

    run_virtual(main())


def test_only_what_was_committed_a_whole_interval_ago_is_deleted():
    async def scenario(cell):
        for _ in range(6):
            await cell.write(REQUEST)
        cell.commit(REQUEST, 2)
        await cell.trim.once()
        assert cell.bounds(REQUEST) == (0, 6)
        cell.commit(REQUEST, 5)
        await cell.trim.once()
        assert cell.bounds(REQUEST) == (2, 6)
        cell.commit(REQUEST, 3)  # without transactions a woken zombie can do that
        await cell.trim.once()
        assert cell.bounds(REQUEST) == (3, 6)

    in_cell(scenario)


def test_a_pool_without_a_topic_and_a_broker_that_is_away_delay_a_round_only():
    async def scenario(cell):
        cell.cluster.topics.pop(ENGINE.topic)
        for _ in range(3):
            await cell.write(REQUEST)
        cell.commit(REQUEST, 3)
        await cell.trim.once()
        cell.cluster.stop()
        with pytest.raises(TransportError):
            await cell.trim.once()
        cell.cluster.start()
        await cell.trim.once()
        assert cell.bounds(REQUEST) == (3, 3)

    in_cell(scenario)


def test_cancels_go_an_hour_after_they_were_given_when_nothing_is_unfinished():
    async def scenario(cell):
        await cell.write(CONTROL)
        cell.now[0] += HOUR_MS // 2
        await cell.write(CONTROL)
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (0, 2)
        cell.now[0] += HOUR_MS // 2 + 1
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (1, 2)
        cell.now[0] += HOUR_MS
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (2, 2)

    in_cell(scenario)


def test_a_cancel_of_the_hour_before_the_oldest_request_stays_for_one_that_is_not_visible_yet():
    async def scenario(cell):
        for _ in range(3):
            await cell.write(CONTROL)
            cell.now[0] += 50 * 60_000
        await cell.write(REQUEST)
        cell.now[0] += 24 * HOUR_MS
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (2, 3)

    in_cell(scenario)


@pytest.mark.parametrize("tp", [REQUEST, RETRY, ENGINE])
def test_cancels_stay_as_long_as_a_request_that_they_may_mean(tp):
    async def scenario(cell):
        inner = tp is not REQUEST
        old = cell.now[0]
        if inner:  # an old request that was tried again lies behind younger ones
            for age in (3, 2, 5, 1):
                await cell.write(tp, old + (5 - age) * HOUR_MS)
        else:
            await cell.write(tp)
        await cell.write(CONTROL)
        cell.now[0] += 24 * HOUR_MS
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (0, 1)
        cell.commit(tp, 2 if inner else 0)
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (0, 1)
        cell.commit(tp, 3 if inner else 1)
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (1, 1)

    in_cell(scenario)


def test_a_request_that_moves_on_while_ages_are_looked_up_is_met():
    async def scenario(cell):
        old = cell.now[0]
        await cell.write(RETRY, old)
        cell.commit(ENGINE, 0)
        await cell.write(CONTROL)
        cell.now[0] += 24 * HOUR_MS
        seen = []

        async def hook(step):
            if (step.moment, step.operation) == ("after", "committed"):
                seen.append(step.subject)
                if step.subject == f"{RETRY.topic}/{RETRY.partition}":
                    cell.cluster.hook = None  # sent on between two questions, and finished here
                    await cell.write(ENGINE, old)
                    cell.commit(RETRY, 1)

        cell.cluster.hook = hook
        await cell.trim.once()
        assert seen
        assert cell.bounds(CONTROL) == (0, 1)
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (0, 1)
        cell.commit(ENGINE, 1)
        await cell.trim.once()
        assert cell.bounds(CONTROL) == (1, 1)

    in_cell(scenario)


def test_cancels_stay_where_the_age_of_the_backlog_cannot_be_read():
    async def scenario(cell):
        await cell.write(RETRY, 0)
        await cell.write(CONTROL)
        cell.now[0] += 24 * HOUR_MS

        async def hook(step):
            if step.operation == "poll" and step.moment == "before":
                await asyncio.sleep(11)  # slow, and with nothing to show for it
                cell.cluster.stop()

        await cell.trim.once()
        cell.cluster.hook = hook
        with pytest.raises(TransportError):
            await cell.trim.once()
        cell.cluster.hook = None
        cell.cluster.start()
        assert cell.bounds(CONTROL) == (0, 1)

    in_cell(scenario)
