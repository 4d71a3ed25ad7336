"""The whole path under virtual time: real dispatcher and workers, the in-memory transport, the sim engine."""

import asyncio
from collections import Counter

import pytest
from memory_stack import INTERACTIVE, TOPICS, config_of, on_stack, prompts

from broker.transport.errors import OffsetGone
from broker.transport.protocol import TopicPartition
from schemas import codecs


def test_every_request_ends_in_one_completed_result():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        stack.worker("w2")
        await stack.produce(prompts(200))
        return await stack.results(200)

    results = on_stack(scenario)
    assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(200))
    assert {r.status for r in results} == {"completed"}
    assert {r.worker for r in results} == {"w1", "w2"}
    assert all(r.usage.output_tokens == 8 and r.output_text for r in results)


def test_a_malformed_record_is_a_dead_letter_and_a_result_where_its_id_can_be_read():
    bad = [b"not json", b'{"id":"x1","prompt":5}', b'{"id":"x2","prompt":"a","n":2}', b"", b"[1]", b'{"id":"x3","prompt":"\xff"}']

    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([*bad, *prompts(3)])
        return await stack.results(6), await stack.read(TOPICS.dead_letters)

    results, dead = on_stack(scenario)
    by_id = {r.request_id: r for r in results}
    assert sorted(by_id) == ["r0", "r1", "r2", "x1", "x2", "x3"]
    assert by_id["x1"].status == "rejected"
    assert by_id["x1"].error.param == "prompt"
    assert by_id["x2"].error.message == "`n`: unknown field"
    assert by_id["x3"].error.message == "`prompt`: the text is not UTF-8"
    assert Counter(d.value for d in dead) == Counter(bad)


def test_unknown_model_and_reply_topics_are_refused_and_delay_nobody():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b'{"id":"m","model":"gpt-9","prompt":"a"}'])
        await stack.produce([b'{"id":"nowhere","prompt":"a"}'], headers=[("kafka_replyTopic", b"no.replies")])
        await stack.produce([b'{"id":"ours","prompt":"a"}'], headers=[("kafka_replyTopic", b"forebay.results")])
        await stack.produce(prompts(2))
        return await stack.results(5)

    by_id = {r.request_id: r for r in on_stack(scenario)}
    assert by_id["m"].error.code == "model_not_found"
    assert "does not exist" in by_id["nowhere"].error.message
    assert "not allowed" in by_id["ours"].error.message
    assert by_id["r0"].status == by_id["r1"].status == "completed"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b'{"id":"long","prompt":"%s"}' % (b"x" * 2_000), *prompts(3)])
        return await stack.results(4)

    by_id = {r.request_id: r for r in on_stack(scenario, config_of(max_context=128))}
    assert by_id["long"].status == "rejected"
    assert by_id["long"].error.code == "context_overflow"
    assert "128" in by_id["long"].error.message
    assert "500" in by_id["long"].error.message
    assert by_id["r2"].status == "completed"


def test_failures_of_the_request_itself_are_tried_again_and_then_a_dead_letter():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce(prompts(1))
        return await stack.results(1), await stack.read(TOPICS.dead_letters)

    results, dead = on_stack(scenario, config_of(fail_every=1))
    assert [r.status for r in results] == ["failed"]
    assert len(results[0].route) == 3
    assert len(dead) == 1


def test_a_killed_worker_and_a_killed_dispatcher_lose_nothing_and_repeat_nothing():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.dispatcher("d2")
        stack.worker("w1")
        stack.worker("w2")
        await stack.produce(prompts(400))
        await asyncio.sleep(1.0)
        for name in ("w1", "d1"):
            stack.kill(name)
        await asyncio.sleep(5.0)
        stack.worker("w3")
        return await stack.results(400)

    results = on_stack(scenario)
    assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(400))
    assert {r.status for r in results} == {"completed"}


def test_streams_come_in_order_and_make_up_the_whole_text():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b'{"id":"s","prompt":"a","stream":true,"max_output_tokens":40}'])
        results = await stack.results(1)
        return results[0], [codecs.decode_chunk(r.value) for r in await stack.read(TOPICS.streams)]

    result, chunks = on_stack(scenario)
    assert [c.seq for c in chunks] == list(range(len(chunks)))
    assert "".join(c.text for c in chunks) == result.output_text
    assert [t for c in chunks for t in c.token_ids] == result.output_tokens
    assert {c.run_id for c in chunks} == {result.run_id}
    assert chunks[-1].finish_reason == result.finish_reason
    assert len(chunks) > 2


def test_a_reply_topic_that_goes_away_delays_nobody():
    async def scenario(stack):
        stack.cluster.add_topic("mine.replies", 1)
        stack.dispatcher("d1")
        await stack.produce([b'{"id":"gone","prompt":"a"}'], headers=[("kafka_replyTopic", b"mine.replies")])
        await asyncio.sleep(3.0)
        stack.cluster.topics.pop("mine.replies")
        stack.worker("w1")
        await stack.produce(prompts(5))
        return await stack.results(6)

    results = on_stack(scenario)
    assert {r.request_id: r.status for r in results} == {f"r{n}": "completed" for n in range(5)} | {"gone": "completed"}


def test_records_that_were_deleted_before_they_were_served_stop_the_dispatcher_aloud():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce(prompts(8))
        await stack.results(8)
        stack.kill("d1")
        await stack.produce(prompts(8))
        admin = await stack.transport.admin()
        await admin.trim({TopicPartition(INTERACTIVE, n): 1_000 for n in range(2)})
        stack.dispatcher("d2")
        with pytest.raises(OffsetGone, match="committed offset"):
            await asyncio.wait_for(stack.tasks.pop("d2"), 60)

    on_stack(scenario)


def test_one_id_of_several_tenants_is_run_for_each():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b'{"id":"same","tenant":"t%d","prompt":"a","max_output_tokens":30}' % n for n in range(4)])
        return await stack.results(4)

    results = on_stack(scenario)
    assert sorted(r.tenant for r in results) == ["t0", "t1", "t2", "t3"]
    assert {(r.request_id, r.status, len(r.route)) for r in results} == {("same", "completed", 1)}


def test_a_wiped_board_costs_no_request():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce(prompts(100))
        for _ in range(10):
            await asyncio.sleep(0.2)
            stack.board.wipe()
        return await stack.results(100)

    results = on_stack(scenario)
    assert Counter(r.request_id for r in results) == Counter(f"r{n}" for n in range(100))
    assert {r.status for r in results} == {"completed"}
