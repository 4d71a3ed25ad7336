"""The client on the whole path in memory, under virtual time."""

import asyncio

import pytest
from client_world import in_world
from memory_stack import config_of

from broker import ClientClosed, ClientTimeout, StreamRestarted
from broker.reading import PartitionReader
from broker.transport.errors import NoSuchTopic, TransportError, Unreachable
from broker.transport.protocol import Outgoing, TopicPartition
from schemas import InferenceRequest, InferenceResult, InvalidMessage, TokenChunk, codecs, headers


def test_submit_gives_the_terminal_result_whatever_its_status():
    async def scenario(world):
        world.answer()
        client = world.client()
        good = await client.submit("hello", max_output_tokens=8, metadata={"a": "b"})
        bad = await client.submit(InferenceRequest(prompt="x", model="gpt-9"), id="mine", service_class="batch")
        return good, bad

    good, bad = in_world(scenario)
    assert good.status == "completed"
    assert good.usage.output_tokens == 8
    assert good.metadata == {"a": "b"}
    assert (bad.request_id, bad.status, bad.error.code) == ("mine", "rejected", "model_not_found")


def test_many_submits_at_once_each_get_their_own_result_also_as_msgpack():
    async def scenario(world):
        world.answer()
        one, two = world.client("one"), world.client("two", content_type=headers.MSGPACK)
        calls = [
            c.submit(f"say {n}", id=f"{n}", tenant=t, max_output_tokens=3) for n in range(40) for c, t in ((one, "a"), (two, "b"))
        ]
        return await asyncio.gather(*calls)

    results = in_world(scenario)
    assert [(r.request_id, r.tenant) for r in results] == [(f"{n}", t) for n in range(40) for t in "ab"]
    assert {r.status for r in results} == {"completed"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ({}, "prompt"),
        ({"prompt": "a", "sampling": {"top_p": float("nan")}}, None),
        ({"prompt": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"prompt": "a" * (8 * 2**20)}, None),
        ({"prompt": object()}, None),
        ({"prompt": "\ud800"}, None),
    ],
)
def test_what_the_schema_refuses_is_not_sent(fields, param):
    async def scenario(world):
        client = world.client()
        with pytest.raises(InvalidMessage) as caught:
            await client.submit(**fields)
        return caught.value, await client.results("beginning", follow=False).open()

    error, _ = in_world(scenario)
    if param:
        assert error.param == param


def test_a_stream_gives_tokens_as_they_come_and_then_the_result():
    async def scenario(world):
        world.answer()
        client = world.client()
        loop, times, text = asyncio.get_running_loop(), [], ""
        stream = client.stream("tell me", max_output_tokens=60)
        async for item in stream:
            times.append(loop.time())
            text += item.text
        again = client.stream("and more", max_output_tokens=10)
        texts = [item.text async for item in again]
        return stream, times, text, again, "".join(texts)

    stream, times, text, again, text_again = in_world(scenario)
    assert text == stream.result.output_text
    assert len(times) > 3
    assert times[-1] - times[0] > 0.1
    assert stream.result.request_id == stream.id
    assert text_again == again.result.output_text


def test_a_stream_whose_worker_is_killed_still_makes_up_the_result():
    async def scenario(world):
        world.answer()
        client = world.client()
        text, restarts, killed = "", 0, False
        stream = client.stream("tell me", max_output_tokens=200)
        async for item in stream:
            if isinstance(item, StreamRestarted):
                text, restarts = "", restarts + 1
                continue
            text += item.text
            if len(text) > 20 and not killed:
                killed = True
                world.kill("w")
                world.worker("w2")
        return stream.result, text

    result, text = in_world(scenario)
    assert result.status == "completed"
    assert result.worker == "w2"
    assert text == result.output_text


def test_no_answer_in_time_is_a_timeout_that_names_the_request():
    async def scenario(world):
        client = world.client()
        with pytest.raises(ClientTimeout, match=r"r1.*30 s"):
            await client.submit("a", id="r1", timeout_s=30)
        with pytest.raises(TimeoutError):
            async for _ in client.stream("a", timeout_s=5):
                pass
        return asyncio.get_running_loop().time()

    assert 35 <= in_world(scenario) < 40


def test_a_deadline_that_passes_is_an_expired_result():
    async def scenario(world):
        client = world.client()
        result = await client.submit("a", deadline=world.deadline(10))
        return result, asyncio.get_running_loop().time()

    result, took = in_world(scenario)
    assert (result.status, result.error.code) == ("expired", "expired")
    assert 10 <= took < 15


def test_closing_ends_those_who_wait():
    async def scenario(world):
        client = world.client()
        waiting = asyncio.ensure_future(client.submit("a"))
        await asyncio.sleep(1)
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting
        with pytest.raises(ClientClosed):
            await client.submit("a")

    in_world(scenario)


def test_a_cluster_that_is_away_is_told_with_its_address():
    async def scenario(world):
        world.cluster.stop()
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9092"):
            await world.client().submit("a")

    in_world(scenario)


def test_an_outage_while_waiting_delays_and_loses_nothing():
    async def scenario(world):
        world.answer()
        client = world.client()
        await client.submit("first", max_output_tokens=2)
        calls = [asyncio.ensure_future(client.submit(f"{n}", max_output_tokens=100)) for n in range(8)]
        await asyncio.sleep(0.2)
        world.cluster.stop()
        await asyncio.sleep(60)
        world.cluster.start()
        return await asyncio.gather(*calls)

    assert [r.status for r in in_world(scenario)] == ["completed"] * 8


def test_topics_that_are_missing_are_named():
    async def scenario(world):
        del world.cluster.topics["forebay.streams"]
        with pytest.raises(NoSuchTopic, match=r"forebay\.streams"):
            await world.client().submit("a")

    in_world(scenario)


def test_results_from_the_beginning_end_where_they_did_when_asked_and_drop_repeats():
    async def scenario(world):
        producer = await world.way("writer").producer()
        for n in [*range(20), *range(10)]:
            value = codecs.encode(InferenceResult(f"r{n}", "completed", output_text=f"{n}"))
            await producer.send(Outgoing("forebay.results", value, f"r{n}".encode()))
        await producer.send(Outgoing("forebay.results", b"not a result", b"x"))
        client = world.client()
        everything = [r.request_id async for r in client.results("beginning", follow=False)]
        some = [r.request_id async for r in client.results("beginning", ids={"r3", "r4"})]
        nothing = [r async for r in client.results(follow=False)]
        return everything, some, nothing

    everything, some, nothing = in_world(scenario)
    assert sorted(everything) == sorted(f"r{n}" for n in range(20))
    assert sorted(some) == ["r3", "r4"]
    assert nothing == []


def test_results_end_behind_transaction_markers_too():
    async def scenario(world):
        world.answer()
        client = world.client()
        await asyncio.gather(*(client.submit(f"{n}", max_output_tokens=2) for n in range(10)))
        return [r async for r in client.results("beginning", follow=False)]

    assert len(in_world(scenario)) == 10


def test_offsets_saved_before_sending_find_every_result_and_positions_go_on_from_there():
    async def scenario(world):
        world.answer()
        client = world.client()
        await client.submit("earlier", max_output_tokens=2)
        before = await client.result_offsets()
        partition = await client.result_partition()
        sent = [
            i async for i in client.send_many([{"prompt": f"{n}", "max_output_tokens": 2} for n in range(50)], in_flight_max=7)
        ]
        first = client.results(before, partitions=None, ids=None)
        found = [(await anext(first)).request_id for _ in range(20)]
        await first.aclose()
        rest = [r.request_id async for r in client.results(first.positions, ids=set(sent) - set(found))]
        named = await client.send("one more", result_partition=partition, max_output_tokens=2)
        last = [r.request_id async for r in client.results(before, partitions=[partition], ids=[named])]
        return sent, found + rest, named, last

    sent, found, named, last = in_world(scenario)
    assert sorted(found) == sorted(sent)
    assert len(set(sent)) == 50
    assert last == [named]


def test_the_result_of_what_was_put_back_is_no_repeat_and_can_be_asked_for():
    async def scenario(world):
        producer = await world.way("writer").producer()
        for status, place in (
            ("failed", None),
            ("failed", b"1"),
            ("completed", b"0/4"),
            ("completed", b"0/4"),
            ("failed", b"0/5"),
        ):
            value = codecs.encode(InferenceResult("r", status))
            given = () if place is None else ((headers.REPLAY, place),)
            await producer.send(Outgoing("forebay.results", value, b"r", given))
        client = world.client()
        everything = [r.status async for r in client.results("beginning", follow=False)]
        asked = [r.status async for r in client.results("beginning", replays=["0/4"])]
        async with client.results("beginning", follow=False, replays=["0/4", "0/6"]) as some:
            statuses = [r.status async for r in some]
        return everything, asked, statuses, some.missing

    assert in_world(scenario) == (["failed", "completed", "failed"], ["completed"], ["completed"], {"0/6"})


def test_waiting_for_a_next_result_has_a_limit():
    async def scenario(world):
        with pytest.raises(TimeoutError, match="within 3 s"):
            await anext(world.client().results(timeout_s=3))

    in_world(scenario)


def test_a_slow_reader_of_a_stream_gets_the_whole_text(monkeypatch):
    monkeypatch.setattr("broker.waiting.STREAM_ITEMS_MAX", 5)

    async def scenario(world):
        world.answer()
        stream = world.client().stream("tell me", max_output_tokens=300)
        text = ""
        async for item in stream:
            assert isinstance(item, TokenChunk)
            text += item.text
            await asyncio.sleep(0.5)
        return text, stream.result.output_text

    text, whole = in_world(scenario, config_of())
    assert text == whole


def test_one_id_under_two_tenants_is_two_requests_and_twice_under_one_tenant_has_one_answer():
    async def scenario(world):
        client = world.client()
        partition = await client.result_partition()
        calls = [asyncio.ensure_future(client.submit("a", id="same", tenant=t)) for t in "abca"]
        await asyncio.sleep(1)
        producer = await world.way("writer").producer()
        for tenant, text in ("c", "3"), ("a", "1"), ("b", "2"), ("a", "repeat"):
            value = codecs.encode(InferenceResult("same", "completed", tenant=tenant, output_text=text))
            await producer.send(Outgoing("forebay.results", value, b"same", partition=partition))
        return [r.output_text for r in await asyncio.gather(*calls)]

    assert in_world(scenario) == ["1", "2", "3", "1"]


def test_sends_that_are_not_acknowledged_are_sent_again_with_the_same_id():
    async def scenario(world):
        failures = 2

        async def hook(step):
            nonlocal failures
            if step.operation == "send" and step.moment == "after" and failures:
                failures -= 1
                message = "the acknowledgement was lost"
                raise TransportError(message)

        client = world.client()
        await client.start()
        world.cluster.hook = hook
        await client.send("a", id="r")
        log = [log for log in world.cluster.topics["forebay.requests.interactive"].logs if log.end]
        world.cluster.hook = None
        return [record.key for one in log for record in one.read(0, 10)[0]]

    assert in_world(scenario) == [b"r"] * 3


def test_a_reader_that_connects_anew_goes_on_where_it_was():
    async def scenario(world):
        producer = await world.way("writer").producer()
        partition = TopicPartition("forebay.results", 0)

        async def write(*values):
            for value in values:
                await producer.send(Outgoing("forebay.results", value, partition=0))

        way = world.way("reader")
        reader = PartitionReader(way, {partition: 0})
        await write(b"1", b"2")
        first = [r.value for r in await reader.poll([partition], 100)]
        await write(b"3")
        await way.close()  # its consumers are closed under it, so that every poll of theirs fails
        after = []
        while not after:
            after = [r.value for r in await reader.poll([partition], 100)]
        admin = await world.way("janitor").admin()
        await write(b"4", b"5")
        await admin.trim({partition: 4})
        while len(after) < 2:
            after += [r.value for r in await reader.poll([partition], 100)]
        return first, after, reader.positions[partition]

    assert in_world(scenario) == ([b"1", b"2"], [b"3", b"5"], 5)


def test_results_do_not_end_early_while_the_cluster_is_away():
    async def scenario(world):
        producer = await world.way("writer").producer()
        for n in range(6):
            value = codecs.encode(InferenceResult(f"r{n}", "completed"))
            await producer.send(Outgoing("forebay.results", value, f"r{n}".encode()))
        client = world.client()
        short, long = client.results("beginning", follow=False), client.results("beginning", follow=False)
        await short.open()
        await long.open()
        world.cluster.stop()
        asyncio.get_running_loop().call_later(8, world.cluster.start)
        found = [r.request_id async for r in short]
        world.cluster.stop()
        with pytest.raises(TransportError):
            await anext(long)
        return found, asyncio.get_running_loop().time()

    found, time = in_world(scenario)
    assert sorted(found) == [f"r{n}" for n in range(6)]
    assert time < 120


def test_cancel_says_what_is_wrong_and_writes_one_record():
    async def scenario(world):
        client = world.client()
        for given in ({}, {"tenant": "no spaces"}, {"batch": ""}):
            with pytest.raises(InvalidMessage):
                await client.cancel(**given)
        with pytest.raises(InvalidMessage, match="`batch`"):
            await client.send("x", batch="a\nb")
        await client.cancel("r", tenant="a", batch="b")
        (log,) = world.cluster.topics[world.topics.control].logs
        return log.read(0, 10)[0]

    (record,) = in_world(scenario)
    assert record.value == record.key == b'{"kind":"cancel","id":"r","tenant":"a","batch":"b"}'


def test_a_batch_is_named_in_the_header_of_each_request():
    async def scenario(world):
        client = world.client()
        await client.send("x", batch="b1")
        assert [i async for i in client.send_many([{"prompt": "x"}] * 2, batch="b2")]
        waiting = asyncio.ensure_future(client.submit("x", batch="b3"))
        stream = client.stream("x", batch="b4")
        streaming = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(1)
        for task in (waiting, streaming):
            task.cancel()
        await asyncio.gather(waiting, streaming, return_exceptions=True)
        logs = [log for name in ("interactive", "batch") for log in world.cluster.topics[world.topics.requests(name)].logs]
        return [headers.text(record.headers, headers.BATCH) for log in logs for record in log.read(0, 10)[0]]

    assert sorted(in_world(scenario)) == ["b1", "b2", "b2", "b3", "b4"]
