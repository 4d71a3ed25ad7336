"""Cancels: their records, who answers to them, and how the control topic is read."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_loop import run_virtual

from broker.transport.cancels import Cancels
from broker.transport.control_log import LOOK_S, PATIENCE_S, ControlLog
from broker.transport.errors import NoSuchTopic, TransportError
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.protocol import Committed, Outgoing, TopicPartition
from schemas import Envelope, InvalidMessage, Topics, headers
from schemas.control import Cancel, batch_name, cancel_of, decode_control, encode_control

TOPICS = Topics()
CONTROL = TopicPartition(TOPICS.control, 0)

# -- records ----------------------------------------------------------------------------------------------------------


def test_a_cancel_says_its_kind_and_what_was_given():
    assert encode_control(cancel_of("r1", tenant="alice")) == b'{"kind":"cancel","id":"r1","tenant":"alice"}'
    assert decode_control(b'{"kind":"cancel","batch":"b"}') == Cancel(batch="b")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "at least one of `id`, `tenant` and `batch`"),
        ({"tenant": "no spaces"}, "`tenant`: "),
        ({"tenant": ""}, "`tenant`: "),
        ({"id": "x" * 129}, "`id`: "),
        ({"batch": "a\nb"}, "`batch`: "),
    ],
)
def test_a_caller_is_told_what_is_wrong(given, said):
    with pytest.raises(InvalidMessage, match=said):
        cancel_of(**given)


def test_the_name_of_a_batch_is_checked_where_it_is_given():
    assert batch_name("nightly 7") == "nightly 7"
    with pytest.raises(InvalidMessage, match="`batch`: ") as caught:
        batch_name("")
    assert caught.value.param == "batch"


MALFORMED = [
    None,
    b"",
    b"no json",
    b"[]",
    b"{}",
    b'{"kind":"cancel"}',
    b'{"kind":"pause","tenant":"alice"}',
    b'{"tenant":"alice"}',
    b'{"kind":"cancel","tenant":5}',
    b'{"kind":"cancel","tenant":"alice","model":"m"}',  # a filter of tomorrow: today it would take too much
    b'{"kind":"cancel","id":"\xff"}',
]


@pytest.mark.parametrize("value", MALFORMED)
def test_what_cannot_be_read_for_sure_is_refused(value):
    with pytest.raises(InvalidMessage):
        decode_control(value)


# -- who answers ----------------------------------------------------------------------------------------------------


def test_what_is_given_must_all_be_so():
    cancels = Cancels()
    cancels.add(Cancel(id="one"), 0, 100)
    cancels.add(Cancel(tenant="alice", batch="b"), 1, 100)
    cancels.add(Cancel(id="two", tenant="bob"), 2, 100)
    assert cancels.matches("one", "anybody", None, 100)
    assert cancels.matches("x", "alice", "b", 50)
    assert not cancels.matches("x", "alice", None, 50)
    assert not cancels.matches("x", "bob", "b", 50)
    assert cancels.matches("two", "bob", "c", 50)
    assert not cancels.matches("two", "alice", None, 50)


def test_only_what_is_not_newer_is_cancelled_and_the_latest_counts():
    cancels = Cancels()
    cancels.add(Cancel(tenant="alice"), 5, 100)
    assert cancels.matches("r", "alice", None, 100)
    assert not cancels.matches("r", "alice", None, 101)
    cancels.add(Cancel(tenant="alice"), 6, 200)
    cancels.add(Cancel(tenant="alice"), 5, 100)  # read again
    assert cancels.matches("r", "alice", None, 200)
    assert len(cancels) == 1


def test_what_was_trimmed_is_forgotten():
    cancels = Cancels()
    for offset, tenant in enumerate("abc"):
        cancels.add(Cancel(tenant=tenant), offset, 100)
    cancels.add(Cancel(tenant="a"), 3, 100)
    cancels.forget(3)
    assert [cancels.matches("r", tenant, None, 1) for tenant in "abc"] == [True, False, False]
    cancels.forget(4)
    assert len(cancels) == 0
    assert not cancels.matches("r", "a", None, 1)


names = st.none() | st.sampled_from(["x", "y"])


@given(
    st.lists(st.tuples(names, names, names, st.integers(0, 5)).filter(lambda c: any(c[:3])), max_size=12),
    st.integers(0, 12),
    st.sampled_from(["x", "y"]),
    st.sampled_from(["x", "y"]),
    names,
    st.integers(0, 6),
)
def test_the_index_says_what_the_list_would(given_cancels, forgotten, id_, tenant, batch, received_at_ms):
    cancels = Cancels()
    for offset, (*filter_, at_ms) in enumerate(given_cancels):
        cancels.add(Cancel(*filter_), offset, at_ms)
    cancels.forget(forgotten)
    last = {tuple(filter_): offset for offset, (*filter_, _) in enumerate(given_cancels)}
    expected = any(
        received_at_ms <= at_ms
        and last[tuple(filter_)] >= forgotten
        and all(wanted in (None, value) for wanted, value in zip(filter_, (id_, tenant, batch), strict=True))
        for *filter_, at_ms in given_cancels
    )
    assert cancels.matches(id_, tenant, batch, received_at_ms) is expected


def test_the_batch_is_read_from_the_requests_headers():
    cancels = Cancels()
    envelope = Envelope("r", "t", "batch", ("requests", 0, 0), 100)
    named = ((headers.BATCH, b"nightly"),)
    assert not cancels.covers(envelope, named)
    cancels.add(Cancel(batch="nightly"), 0, 100)
    assert cancels.covers(envelope, named)
    assert not cancels.covers(envelope, ())
    assert not cancels.covers(envelope, ((headers.BATCH, b"\xff"),))


# -- the log ----------------------------------------------------------------------------------------------------------


class World:
    """A cluster with a control topic."""

    def __init__(self):
        self.cluster = MemoryCluster()
        self.cluster.add_topic(TOPICS.control)
        self.way = MemoryTransport(self.cluster, "test")
        self.calls = 0

    async def write(self, *values):
        producer = await self.way.producer()
        for value in values:
            await (await producer.send(Outgoing(TOPICS.control, value, value)))

    def changed(self):
        self.calls += 1

    async def follow(self):
        control = ControlLog(self.way, TOPICS)
        await control.replay()
        return control, asyncio.ensure_future(control.run(self.changed))

    async def trim(self, before):
        await (await self.way.admin()).trim({CONTROL: before})


def in_world(scenario):
    async def main():
        return await scenario(World())

    return run_virtual(main())


def cancel(**given):
    return encode_control(cancel_of(**given))


def test_replay_reads_all_that_is_there_and_passes_over_what_it_cannot_read():
    async def scenario(world):
        await world.write(cancel(tenant="a"), *MALFORMED, cancel(batch="b"))
        control = ControlLog(world.way, TOPICS)
        await control.replay()
        return control.cancels

    cancels = in_world(scenario)
    assert len(cancels) == 2
    assert cancels.matches("r", "a", None, 0)
    assert cancels.matches("r", "x", "b", 0)


def test_replay_of_an_empty_topic_ends_at_once():
    async def scenario(world):
        await ControlLog(world.way, TOPICS).replay()
        return asyncio.get_running_loop().time()

    assert in_world(scenario) < 0.1


def test_replay_ends_behind_markers_and_before_an_open_transaction():
    async def scenario(world):
        world.cluster.add_topic("source")
        source = TopicPartition("source", 0)
        outbox = world.way.outbox("g", source, await world.way.assign([source], "g"))
        await outbox.open()
        await outbox.commit([Outgoing(TOPICS.control, cancel(tenant="a"))], Committed(1))
        written = asyncio.Event()

        async def hook(step):
            if (step.moment, step.operation) == ("before", "offsets"):
                written.set()
                await asyncio.sleep(10_000)

        world.cluster.hook = hook
        stuck = asyncio.ensure_future(outbox.commit([Outgoing(TOPICS.control, cancel(tenant="b"))], Committed(2)))
        await written.wait()
        await world.write(cancel(tenant="c"))
        control = ControlLog(world.way, TOPICS)
        began = asyncio.get_running_loop().time()
        await control.replay()
        took_s = asyncio.get_running_loop().time() - began
        stuck.cancel()
        return control.cancels, took_s

    cancels, took_s = in_world(scenario)
    assert len(cancels) == 1
    assert took_s < 2


def test_replay_gives_up_on_a_cluster_that_stays_away_and_bears_one_that_comes_back():
    async def scenario(world):
        await world.write(cancel(tenant="a"))
        asyncio.get_running_loop().call_later(5, world.cluster.start)
        world.cluster.stop()
        control = ControlLog(world.way, TOPICS)
        await control.replay()
        world.cluster.stop()
        began = asyncio.get_running_loop().time()
        with pytest.raises(TransportError):
            await ControlLog(world.way, TOPICS).replay()
        return len(control.cancels), asyncio.get_running_loop().time() - began

    count, took_s = in_world(scenario)
    assert count == 1
    assert took_s <= PATIENCE_S + 1


def test_replay_gives_up_where_the_end_is_never_reached():
    async def scenario(world):
        await world.write(cancel(tenant="a"))

        async def hook(step):
            if step.operation == "poll":
                message = "nothing can be read"
                raise TransportError(message)

        world.cluster.hook = hook
        with pytest.raises(TransportError, match=r"forebay\.control gave nothing for 30 s"):
            await ControlLog(world.way, TOPICS).replay()

    in_world(scenario)


def test_a_missing_topic_is_named():
    async def scenario(world):
        world.cluster.topics.clear()
        with pytest.raises(NoSuchTopic, match=r"forebay\.control"):
            await ControlLog(world.way, TOPICS).replay()

    in_world(scenario)


def test_what_comes_later_is_told_once_a_poll():
    async def scenario(world):
        control, following = await world.follow()
        await world.write(cancel(tenant="a"))
        await asyncio.sleep(0.1)
        before = world.calls
        await world.write(b"no json")
        await asyncio.sleep(2)
        following.cancel()
        await control.close()
        return before, world.calls, len(control.cancels)

    assert in_world(scenario) == (1, 1, 1)


def test_errors_and_trimmed_records_do_not_stop_it():
    async def scenario(world):
        control, following = await world.follow()
        await world.write(cancel(tenant="a"))
        await asyncio.sleep(1)
        failing = True

        async def hook(step):
            if failing and step.operation == "poll":
                message = "broken by the test"
                raise TransportError(message)

        world.cluster.hook = hook
        await asyncio.sleep(2)
        await world.write(cancel(tenant="b"), cancel(tenant="c"))
        await world.trim(2)  # what the reader wants next is gone
        failing = False
        await asyncio.sleep(2)
        held = [control.cancels.matches("r", tenant, None, 0) for tenant in "abc"]
        await world.write(cancel(tenant="d"))
        await asyncio.sleep(1)
        held.append(control.cancels.matches("r", "d", None, 0))
        assert not following.done()
        following.cancel()
        return held

    assert in_world(scenario) == [False, False, True, True]


def test_what_was_trimmed_behind_the_reader_is_forgotten_in_time():
    async def scenario(world):
        control, following = await world.follow()
        await world.write(cancel(tenant="a"), cancel(tenant="b"))
        await asyncio.sleep(1)
        await world.trim(1)
        await asyncio.sleep(LOOK_S + 1)
        following.cancel()
        return [control.cancels.matches("r", tenant, None, 0) for tenant in "ab"]

    assert in_world(scenario) == [False, True]
