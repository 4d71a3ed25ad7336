"""Settings under virtual time: they hold for the next dispatcher too, and through every deletion of control records."""

import asyncio

import pytest
from memory_stack import TOPICS, config_of, on_stack
from virtual_loop import run_virtual

from broker.transport.control_log import LOOK_S, ControlLog
from broker.transport.errors import TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Outgoing, TopicPartition
from broker.transport.settings import KEEP_FROM_CHANGES, Settings
from dispatcher.core import Dispatcher, Steered
from dispatcher.trim import Trim
from schemas.control import KeptSettings, TenantSettings, change_of, decode_control, encode_control

HOUR_MS = 3_600_000
CONTROL = TopicPartition(TOPICS.control, 0)
SUBJECT = f"{CONTROL.topic}/0"


def change(tenant="a", **given):
    return encode_control(change_of(TenantSettings, tenant=tenant, **given))


# -- the dispatcher ---------------------------------------------------------------------------------------------------


@pytest.fixture
def steered(monkeypatch):
    """What machines are told of settings, in order."""
    told, handle = [], Dispatcher.handle

    def listen(self, event, now_ms):
        if isinstance(event, Steered):
            told.append(event)
        return handle(self, event, now_ms)

    monkeypatch.setattr(Dispatcher, "handle", listen)
    return told


def test_a_dispatcher_goes_by_what_was_set_before_its_term_and_by_what_is_set_in_it(steered):
    async def scenario(stack):
        await stack.produce([change(weight=3), b'{"kind":"tenant","tenant":"b","paused":"perhaps"}'], TOPICS.control)
        stack.dispatcher("d1")
        await asyncio.sleep(2)
        assert {name: one.weight for name, one in steered[-1].tenants.items()} == {"a": 3.0}
        await stack.produce([b'{"kind":"engine","engine":"sim","paused":true}', change("b", paused=True)], TOPICS.control)
        await asyncio.sleep(1)
        last = steered[-1]
        assert last.pools["sim"].paused
        assert last.tenants["b"].paused
        stack.kill("d1")
        steered.clear()
        stack.dispatcher("d2")
        await asyncio.sleep(20)
        assert steered == [last]
        await stack.produce([b'{"kind":"cancel","tenant":"a"}'], TOPICS.control)
        await asyncio.sleep(1)
        assert steered == [last], "nothing of it was changed"
        await stack.produce([change(reset=True), change("b", reset=True)], TOPICS.control)
        await stack.produce([b'{"kind":"engine","engine":"sim","reset":true}'], TOPICS.control)
        await asyncio.sleep(1)
        assert steered[-1] == Steered({}, {})

    on_stack(scenario)


def test_what_waits_of_a_paused_tenant_goes_on_once_it_is_resumed():
    async def scenario(stack):
        await stack.produce([change("t0", paused=True)], TOPICS.control)
        stack.dispatcher()
        stack.worker()
        requests = [b'{"id":"r%d","tenant":"t%d","prompt":"a","max_output_tokens":4}' % (n, n % 2) for n in range(10)]
        await stack.produce(requests)
        before = {r.tenant for r in await stack.results(10, limit_s=20)}
        await stack.produce([change("t0", paused=False)], TOPICS.control)
        return before, sorted(r.request_id for r in await stack.results(10))

    before, after = on_stack(scenario)
    assert before == {"t1"}
    assert after == [f"r{n}" for n in range(10)]


def test_settings_outlive_their_records_and_the_dispatcher(steered):
    async def scenario(stack):
        await stack.produce([change(weight=3), change("b", paused=True), change("b", weight=2)], TOPICS.control)
        stack.dispatcher("d1")
        await asyncio.sleep(60)
        records = await stack.read(TOPICS.control)
        assert isinstance(decode_control(records[0].value), KeptSettings), "those that said it first are gone"
        await asyncio.sleep(3600)
        assert len(await stack.read(TOPICS.control)) <= 3
        stack.kill("d1")
        steered.clear()
        stack.dispatcher("d2")
        await asyncio.sleep(20)
        return {name: (one.weight, one.paused) for name, one in steered[0].tenants.items()}

    config = config_of(dispatcher={"trim_interval_ms": 5_000, "control_retention_ms": 10_000})
    assert on_stack(scenario, config) == {"a": (3.0, False), "b": (2.0, True)}


# -- one round of trimming ---------------------------------------------------------------------------------------------


class Cell:
    """A control topic, and dispatchers that trim it; the clock is the test's."""

    def __init__(self):
        self.config, self.now_ms = config_of(), 100 * HOUR_MS
        self.cluster = MemoryCluster(self.config.kafka, clock=lambda: self.now_ms / 1000)
        self.transport = MemoryTransport(self.cluster, "test")
        self.following = []

    async def write(self, *values):
        producer = await self.transport.producer()
        for value in values:
            await (await producer.send(Outgoing(TOPICS.control, value, value, partition=0)))

    async def dispatcher(self, name):
        """Give its way to the cluster, what trims for it, and its settings."""
        way = MemoryTransport(self.cluster, name)
        control = ControlLog(way, TOPICS, settings=Settings(self.config))
        await control.replay()
        self.following.append(asyncio.ensure_future(control.run(lambda: None)))
        return way, Trim(self.config, way, await way.admin(), lambda: self.now_ms, control), control.settings

    async def settings(self):
        """What a reader that begins now comes to."""
        control = ControlLog(self.transport, TOPICS, settings=Settings(self.config))
        await control.replay()
        await control.close()
        return {name: (one.weight, one.paused) for name, one in control.settings.tenants().items()}

    @property
    def bounds(self):
        log = self.cluster.log(CONTROL)
        return log.first, log.end

    def hook(self, moment, operation, act, process=None):
        """Do something once, at a step on the control topic."""

        async def hook(step):
            wanted = (step.moment, step.operation) == (moment, operation) and SUBJECT in step.subject
            if wanted and (process is None or step.process == process):
                self.cluster.hook = None
                await act()

        self.cluster.hook = hook


def in_cell(scenario):
    async def main():
        cell = Cell()
        admin = await cell.transport.admin()
        await admin.ensure(TOPICS.specs(cell.config.topics, cell.config.pools), 1, 1)
        await scenario(cell)
        for task in cell.following:
            task.cancel()

    run_virtual(main())


HELD = {"a": (3.0, False), "b": (None, True)}


async def with_old_settings(cell):
    await cell.write(change(weight=3), change("b", paused=True), change("c", weight=9), change("c", reset=True))
    cell.now_ms += 2 * HOUR_MS


@pytest.mark.parametrize(("moment", "operation"), [("before", "send"), ("after", "send"), ("before", "trim"), ("after", "trim")])
def test_a_dispatcher_that_is_killed_between_the_two_steps_loses_nothing(moment, operation):
    async def scenario(cell):
        await with_old_settings(cell)
        way, trim, _ = await cell.dispatcher("d1")

        async def kill():
            way.kill()

        cell.hook(moment, operation, kill)
        with pytest.raises(TransportError):
            await trim.once()
        assert cell.cluster.hook is None, "it came so far"
        assert await cell.settings() == HELD
        _, trim, _ = await cell.dispatcher("d2")
        await trim.once()
        assert cell.bounds[0] >= 4
        assert await cell.settings() == HELD

    in_cell(scenario)


@pytest.mark.parametrize("later", ["before", "after"])
def test_two_dispatchers_that_trim_at_once_do_no_harm(later):
    async def scenario(cell):
        await with_old_settings(cell)
        _, first, _ = await cell.dispatcher("d1")
        _, second, _ = await cell.dispatcher("d2")

        async def the_other():
            await cell.write(change(weight=5))
            cell.now_ms += 2 * HOUR_MS
            await asyncio.sleep(1)
            await second.once()

        cell.hook(later, "send", the_other, "d1")
        await first.once()
        assert await cell.settings() == HELD | {"a": (5.0, False)}
        await asyncio.sleep(1)
        for trim in (first, second):
            cell.now_ms += 2 * HOUR_MS
            await trim.once()
            await asyncio.sleep(1)
        assert await cell.settings() == HELD | {"a": (5.0, False)}

    in_cell(scenario)


def test_a_change_that_comes_while_the_settings_are_kept_holds():
    async def scenario(cell):
        await with_old_settings(cell)
        _, trim, settings = await cell.dispatcher("d1")

        async def write():
            await cell.write(change(weight=7), change("b", reset=True))

        cell.hook("before", "send", write, "d1")
        await trim.once()
        await asyncio.sleep(1)
        assert await cell.settings() == {"a": (7.0, False)}
        assert {name: one.weight for name, one in settings.tenants().items()} == {"a": 7.0}

    in_cell(scenario)


def test_nothing_is_deleted_while_the_settings_cannot_be_written():
    async def scenario(cell):
        await with_old_settings(cell)
        _, trim, _ = await cell.dispatcher("d1")

        async def fail():
            message = "broken by the test"
            raise TransportError(message)

        cell.hook("before", "send", fail, "d1")
        with pytest.raises(TransportError):
            await trim.once()
        assert cell.bounds == (0, 4)
        await trim.once()
        assert cell.bounds == (4, 5)
        assert await cell.settings() == HELD

    in_cell(scenario)


def test_a_dispatcher_that_lags_behind_deletes_nothing_that_it_has_not_read():
    async def scenario(cell):
        _, trim, _ = await cell.dispatcher("d1")
        cell.following[0].cancel()
        await with_old_settings(cell)
        await trim.once()
        assert cell.bounds == (0, 4)

    in_cell(scenario)


def test_a_reader_for_whom_records_have_gone_tells_no_half_truth():
    async def scenario(cell):
        await with_old_settings(cell)
        told, control = [], ControlLog(cell.transport, TOPICS, settings=Settings(cell.config))
        await control.replay()
        following = asyncio.ensure_future(control.run(lambda: told.append(sorted(control.settings.tenants()))))
        failing = True

        async def hook(step):
            if failing and (step.process, step.operation) == ("test", "poll"):
                message = "broken by the test"
                raise TransportError(message)

        cell.cluster.hook = hook
        await asyncio.sleep(1)
        producer = await MemoryTransport(cell.cluster, "cli").producer()
        await (await producer.send(Outgoing(TOPICS.control, change("d", weight=1), partition=0)))
        cell.now_ms += 2 * HOUR_MS
        _, trim, _ = await cell.dispatcher("d1")
        await trim.once()
        assert cell.bounds[0] == 5, "what the reader wants next is gone"
        assert told == []
        failing = False
        await asyncio.sleep(LOOK_S)
        following.cancel()
        assert told == [["a", "b", "d"]]

    in_cell(scenario)


def test_many_changes_are_written_as_one_though_none_may_be_deleted_yet():
    async def scenario(cell):
        await cell.write(*(change(weight=1 + n % 100) for n in range(KEEP_FROM_CHANGES + 1)))
        _, trim, settings = await cell.dispatcher("d1")
        await trim.once()
        await asyncio.sleep(1)
        assert cell.bounds == (0, KEEP_FROM_CHANGES + 2)
        assert not settings.are_many
        await trim.once()
        assert cell.bounds == (0, KEEP_FROM_CHANGES + 2)

    in_cell(scenario)
