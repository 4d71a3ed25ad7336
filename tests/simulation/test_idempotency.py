"""One id, produced again: run once inside the window, and never swallowed where an answer would be missing."""

import asyncio
from collections import Counter

import pytest
from client_world import in_world
from memory_stack import config_of
from msgspec import structs

from broker.errors import ClientTimeout
from broker.transport.errors import TransportError
from broker.transport.protocol import Outgoing
from memory_coordinator import MemorySeenLog
from schemas import Topics, codecs, headers
from schemas.errors import InvalidMessage

TOPICS = Topics()
INTERACTIVE = TOPICS.requests("interactive")
WINDOW_S = 600


def ask(name, tenant="t", **more):
    extra = "".join(f',"{key}":{value}' for key, value in more.items())
    return f'{{"id":"{name}","tenant":"{tenant}","prompt":"say it","max_output_tokens":4{extra}}}'.encode()


async def produce(world, *values, named=(), partition=None):
    producer = await world.way("producer").producer()
    for value in values:
        await (await producer.send(Outgoing(INTERACTIVE, value, None, tuple(named), partition)))


def read(world, topic):
    return [record for log in world.cluster.logs(topic) for record in log.read(0, 100_000)[0]]


def results(world):
    return [codecs.decode_result(record.value) for record in read(world, TOPICS.results)]


def runs(world):
    """How often each id was run: every run ends in a result."""
    return Counter(result.request_id for result in results(world))


def lag(world):
    """Records of the request topics whose offsets are not committed."""
    ends = {log.tp: log.end for log in world.cluster.logs(INTERACTIVE)}
    committed = {tp: world.cluster.committed.get((TOPICS.dispatcher_group, tp)) for tp in ends}
    return sum(end - (committed[tp].offset if committed[tp] else 0) for tp, end in ends.items())


def test_an_id_that_is_produced_twice_is_run_once_and_the_repeat_is_finished():
    async def scenario(world):
        world.answer()
        await produce(world, ask("r"), ask("r"))  # one in each partition, read together
        await asyncio.sleep(5)
        await produce(world, ask("r"))  # when the first is answered already
        await asyncio.sleep(5)
        client = world.client()
        async with client.results("beginning", follow=False) as found:
            return runs(world), [r.status async for r in found], lag(world)

    assert in_world(scenario) == ({"r": 1}, ["completed"], 0)


def test_after_the_window_and_without_one_it_is_run_again():
    async def scenario(world):
        world.answer()
        for pause_s in (WINDOW_S - 10, 20, 5):
            await produce(world, ask("r"))
            await asyncio.sleep(pause_s)
        return runs(world)

    assert in_world(scenario) == {"r": 2}
    config = config_of()
    off = structs.replace(config, dispatcher=structs.replace(config.dispatcher, idempotency_window_ms=0))
    assert in_world(scenario, off) == {"r": 3}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (ask("r"), [(headers.REPLAY, b"")]),
        (ask("r", "other"), []),
        (ask("r"), [(headers.REPLY_TOPIC, b"mine.replies")]),
        (ask("r"), [(headers.CORRELATION_ID, b"2")]),
        (ask("r"), [(headers.RESULT_PARTITION, headers.pack_number(2))]),
        (ask("r"), [(headers.CLIENT, b"somebody else")]),
    ],
    ids=["replayed", "tenant", "reply topic", "correlation", "partition", "client"],
)
def test_who_replays_it_or_wants_its_answer_elsewhere_is_answered(value, named):
    async def scenario(world):
        world.cluster.add_topic("mine.replies", 1)
        world.answer()
        await produce(world, ask("r"))
        await produce(world, value, named=named)
        await asyncio.sleep(5)
        await produce(world, value, named=named)
        await asyncio.sleep(5)
        return runs(world), len(read(world, "mine.replies"))

    again, replies = in_world(scenario)
    is_replay = named and named[0][0] == headers.REPLAY
    assert again == {"r": 3 if is_replay else 2}
    assert replies == (1 if named and named[0][0] == headers.REPLY_TOPIC else 0)


def test_a_refused_request_may_be_mended_under_its_id():
    async def scenario(world):
        world.answer()
        await produce(world, ask("r", model='"gpt-9"'))
        await produce(world, ask("s"), named=[(headers.REPLY_TOPIC, b"no.replies")])
        await produce(world, ask("r"), ask("s"))
        await asyncio.sleep(5)
        return sorted((r.request_id, r.status) for r in results(world))

    assert in_world(scenario) == [("r", "completed"), ("r", "rejected"), ("s", "completed"), ("s", "rejected")]


def test_records_without_an_id_are_never_repeats():
    async def scenario(world):
        world.answer()
        await produce(world, *[b'{"prompt":"say it","max_output_tokens":4}'] * 5)
        await asyncio.sleep(5)
        return len(results(world))

    assert in_world(scenario) == 5


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("operation", ["produce", "offsets", "end"])
def test_a_dispatcher_killed_between_the_mark_and_the_commit_swallows_nothing(operation, moment):
    async def scenario(world):
        killed = []

        async def hook(step):
            if (step.moment, step.operation, step.process) == (moment, operation, "first") and not killed:
                killed.append(step)
                world.kill("first")

        world.dispatcher("first")
        world.worker()
        await asyncio.sleep(2)
        world.cluster.hook = hook
        await produce(world, ask("twice"), ask("twice"), ask("once"))
        await asyncio.sleep(5)
        assert killed
        world.dispatcher("second")
        await asyncio.sleep(30)
        return runs(world), lag(world)

    found, left = in_world(scenario)
    assert left == 0
    assert found["once"] == 1
    assert found["twice"] in {1, 2}  # what was committed a moment before the kill may not have reached the log


def test_a_request_that_is_not_forwarded_yet_is_not_told_to_the_next_term():
    """Else a repeat that runs instead of it, in a term that could not read the log, would be swallowed in the third."""

    async def scenario(world):
        world.dispatcher("first")
        await produce(world, ask("r"))
        await asyncio.sleep(5)
        waiting = await world.seen_log.read()
        world.worker()
        await asyncio.sleep(5)
        return waiting, [(m.topic, m.offset) for batch in await world.seen_log.read() for m in batch.marks]

    assert in_world(scenario) == ([], [(INTERACTIVE, 0)])


@pytest.mark.parametrize("is_wiped", [False, True])
def test_the_next_term_knows_what_the_killed_one_has_seen_unless_redis_was_wiped(is_wiped):
    async def scenario(world):
        world.dispatcher("first")
        world.worker()
        await produce(world, ask("r"))
        await asyncio.sleep(5)
        world.kill("first")
        if is_wiped:
            world.seen_log.wipe()
        world.dispatcher("second")
        await asyncio.sleep(10)
        await produce(world, ask("r"), ask("fresh"))
        await asyncio.sleep(10)
        return runs(world), lag(world)

    assert in_world(scenario) == ({"r": 2 if is_wiped else 1, "fresh": 1}, 0)


class GoneLog(MemorySeenLog):
    """A Redis that refuses, or that does not even answer."""

    def __init__(self, *, is_silent):
        super().__init__(1, 1)
        self.is_silent = is_silent

    async def write(self, batch):  # noqa: ARG002
        await self.fail()

    async def read(self):
        await self.fail()

    async def fail(self):
        if self.is_silent:
            await asyncio.sleep(3_600)
        message = "no Redis"
        raise ConnectionError(message)


@pytest.mark.parametrize("is_silent", [False, True])
def test_without_redis_everything_is_answered_and_a_term_still_knows_its_own(is_silent, caplog):
    async def scenario(world):
        world.seen_log = GoneLog(is_silent=is_silent)
        world.dispatcher("first")
        world.worker()
        await produce(world, *(ask(f"r{n}") for n in range(20)))
        await asyncio.sleep(10)
        await produce(world, *(ask(f"r{n}") for n in range(20)))
        await asyncio.sleep(10)
        world.kill("first")
        world.dispatcher("second")
        await asyncio.sleep(15)
        await produce(world, *(ask(f"s{n}") for n in range(20)))
        await asyncio.sleep(10)
        return runs(world), lag(world)

    assert in_world(scenario) == ({f"{letter}{n}": 1 for n in range(20) for letter in "rs"}, 0)
    assert sum("seen_unwritten error" in r.message for r in caplog.records) <= 2  # once a term


def test_a_cluster_made_anew_beside_an_old_redis_loses_nothing():
    kept = []
    names = [f"r{n}" for n in range(40)]

    async def first(world):
        world.answer()
        await produce(world, *map(ask, names))
        await asyncio.sleep(5)
        kept.extend(await world.seen_log.read())
        return runs(world)

    async def second(world):
        for batch in kept:
            await world.seen_log.write(batch)
        await produce(world, *map(ask, reversed(names)))  # the offsets exist here too, and hold other requests
        world.dispatcher("first")
        world.worker()
        await asyncio.sleep(5)
        world.kill("first")  # by now they are finished here
        world.dispatcher("second")
        await asyncio.sleep(10)
        await produce(world, *(ask(name, "later") for name in names))
        await asyncio.sleep(10)
        return runs(world), lag(world)

    assert in_world(first) == dict.fromkeys(names, 1)
    assert sum(len(batch.marks) for batch in kept) == 40
    assert in_world(second) == (dict.fromkeys(names, 2), 0)


# -- the client library --------------------------------------------------------------------------------------------------


def losing(count):
    """A hook that loses the acknowledgement of so many sends."""
    left = [count]

    async def hook(step):
        if (step.moment, step.operation) == ("after", "send") and left[0]:
            left[0] -= 1
            message = "the acknowledgement was lost"
            raise TransportError(message)

    return hook


def test_a_send_whose_acknowledgement_was_lost_is_produced_again_and_run_once():
    async def scenario(world):
        world.answer()
        client = world.client()
        await client.start()
        world.cluster.hook = losing(2)
        await client.send("say it", id="sent", max_output_tokens=4)
        world.cluster.hook = losing(2)
        result = await client.submit("say it", id="submitted", max_output_tokens=4)
        await asyncio.sleep(5)
        return result.status, runs(world), len(read(world, INTERACTIVE))

    assert in_world(scenario) == ("completed", {"sent": 1, "submitted": 1}, 6)


def test_an_id_sent_again_is_run_again_only_where_that_is_asked_for():
    async def scenario(world):
        world.answer()
        one, two = world.client("one"), world.client("two")
        for client in (one, two):
            await client.send("say it", id="r", max_output_tokens=4)
            assert [i async for i in client.send_many([{"prompt": "b", "id": "m"}], service_class="interactive")] == ["m"]
        await asyncio.sleep(5)
        before = runs(world)
        await one.send("say it", id="r", max_output_tokens=4, replay=True)
        assert [i async for i in two.send_many([{"prompt": "b", "id": "m"}], replay=True)] == ["m"]
        await asyncio.sleep(5)
        return before, runs(world)

    assert in_world(scenario) == ({"r": 1, "m": 1}, {"r": 2, "m": 2})


def test_who_asks_while_the_answer_is_awaited_shares_it_and_who_asks_later_or_elsewhere_gets_an_own():
    async def scenario(world):
        world.answer()
        client = world.client()

        async def submit(who=client, **named):
            return (await who.submit("say it", id="r", max_output_tokens=4, **named)).status

        beside = await asyncio.gather(*(submit() for _ in range(3)))
        shared = runs(world)
        later = [await submit(timeout_s=60), await submit(world.client("same name"), timeout_s=60)]
        restarted = world.client("client")  # a process that was started again, under the same client id
        return beside, shared, later, await submit(restarted, timeout_s=60), runs(world)

    beside, shared, later, restarted, total = in_world(scenario)
    assert beside == ["completed"] * 3
    assert shared == {"r": 1}
    assert [*later, restarted] == ["completed"] * 3
    assert total == {"r": 4}


def test_a_call_after_the_timeout_of_the_one_before_gets_its_answer():
    async def scenario(world):
        client = world.client()
        for _ in range(3):
            with pytest.raises(ClientTimeout):
                await client.submit("say it", id="r", timeout_s=10)
        world.answer()
        result = await client.submit("say it", id="r", timeout_s=60)
        await asyncio.sleep(5)
        return result.status, runs(world), lag(world)

    assert in_world(scenario) == ("completed", {"r": 1}, 0)


def test_another_request_under_an_id_that_is_awaited_is_refused_and_not_sent():
    async def scenario(world):
        client = world.client()
        first = asyncio.ensure_future(client.submit("say it", id="r", tenant="t"))
        await asyncio.sleep(1)
        with pytest.raises(InvalidMessage, match="`id`: 'r' is awaited already, with other content"):
            await client.submit("say something else", id="r", tenant="t")
        other = asyncio.ensure_future(client.submit("say something else", id="r", tenant="u"))
        await asyncio.sleep(1)
        sent = len(read(world, INTERACTIVE))
        world.answer()
        statuses = [r.status for r in await asyncio.gather(first, other)]
        return sent, statuses, (await client.submit("say something else", id="r", tenant="t")).status

    assert in_world(scenario) == (2, ["completed"] * 2, "completed")
