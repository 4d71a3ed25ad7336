"""What is too large for a record, on the whole path in memory: by the store where there is one, told where there is none."""

import asyncio
import hashlib
import json
from collections import Counter

import pytest
from batch_world import go, line, outputs, write
from client_world import in_world
from fsspec.implementations.local import LocalFileSystem
from memory_stack import TOPICS, config_of, on_stack
from msgspec import structs

from broker import ClientTimeout
from broker.transport.blobs import Blobs

RECORD_BYTES_MAX = 100_000  # 34,464 of them for a value
MANY = 20_000  # tokens, more than that


def small_records(store=None):
    plain = config_of(ttft_ms=1, tpot_ms=0, max_context=1_000_000)
    kafka = structs.replace(plain.kafka, record_bytes_max=RECORD_BYTES_MAX)
    blobs = structs.replace(plain.blobs, store=None if store is None else f"file://{store}", bytes_max=10_000_000)
    return structs.replace(plain, kafka=kafka, blobs=blobs)


def test_a_large_prompt_and_a_large_answer_go_by_the_store(tmp_path):
    async def scenario(world):
        world.answer()
        client = world.client()
        large = await client.submit("many words " * 10_000, id="large", max_output_tokens=MANY, timeout_s=60)
        again = await client.submit("many words " * 10_000, id="again", max_output_tokens=5, timeout_s=60)
        stream = client.stream("many words " * 10_000, id="streamed", max_output_tokens=MANY, timeout_s=60)
        streamed = "".join([item.text async for item in stream])
        found = [result async for result in client.results("beginning", follow=False)]
        return large, again, (streamed, stream.result), found, await world.read(TOPICS.results)

    large, again, (streamed, streamed_result), found, records = in_world(scenario, small_records(tmp_path))
    assert (large.status, again.status) == ("completed", "completed")
    assert len(large.output_tokens) == MANY
    assert large.output_ref is not None
    assert again.output_ref is None
    assert streamed == streamed_result.output_text
    assert len(streamed_result.output_tokens) == MANY
    assert {r.request_id: len(r.output_tokens) for r in found} == {"large": MANY, "again": 5, "streamed": MANY}
    assert max(len(record.value) for record in records) < 5_000
    assert large.output_text == next(r for r in found if r.request_id == "large").output_text


def test_without_a_store_a_large_answer_is_a_small_failed_result():
    async def scenario(world):
        world.answer()
        return await world.client().submit("a", max_output_tokens=MANY, timeout_s=60), await world.read(TOPICS.dead_letters)

    result, dead = in_world(scenario, small_records())
    assert (result.status, result.error.code.value) == ("rejected", "invalid_request")
    assert "`blobs.store`" in result.error.message
    assert len(dead) <= 1


def test_an_input_that_cannot_be_read_is_one_result_and_loses_nothing_else(tmp_path):
    good = tmp_path / "good.json"
    good.write_bytes(b'{"prompt":"say it"}')
    ref = {"url": f"file://{good}", "size_bytes": 19, "sha256": hashlib.sha256(good.read_bytes()).hexdigest()}
    given = {
        "good": ref,
        "elsewhere": {**ref, "url": "file:///etc/passwd"},
        "absent": {**ref, "url": f"file://{tmp_path}/absent"},
        "changed": {**ref, "sha256": "0" * 64},
    }

    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce(
            [json.dumps({"id": name, "input_ref": one, "max_output_tokens": 3}).encode() for name, one in given.items()]
        )
        return await stack.results(4)

    results = {r.request_id: r for r in on_stack(scenario, small_records(tmp_path))}
    assert {name: r.status for name, r in results.items()} == {
        "good": "completed",
        "elsewhere": "rejected",
        "absent": "rejected",
        "changed": "rejected",
    }
    assert {r.error.param for r in results.values() if r.error} == {"input_ref"}


def test_a_store_that_is_away_is_asked_again_and_then_fails_the_request(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    async def scenario(world):
        world.answer()
        return await world.client().submit("a", max_output_tokens=MANY, timeout_s=600)

    result = in_world(scenario, small_records(tmp_path / "file"))
    assert (result.status, result.error.code.value) == ("failed", "internal")
    assert Counter(attempt.outcome for attempt in result.route) == {"retried": 2, "failed": 1}


def test_a_batch_has_its_large_answers_in_its_files(tmp_path):
    write(tmp_path, [line("small"), line("large", max_tokens=MANY)])

    async def scenario(world):
        world.answer()
        return await go(world, tmp_path, blobs=world.client()._blobs)

    in_world(scenario, small_records(tmp_path / "store"))
    found, errors = outputs(tmp_path)
    usage = {one["custom_id"]: one["response"]["body"]["usage"]["completion_tokens"] for one in found}
    assert errors == []
    assert usage == {"small": 4, "large": MANY}
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
    assert len(texts["large"]) > MANY > len(texts["small"]) > 0


def test_a_record_whose_key_or_headers_are_huge_is_refused_and_stops_nobody():
    value = b'{"id":"%s","prompt":"a","max_output_tokens":1}'

    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce([value % b"headers"], headers=[("x-huge", b"x" * 90_000)])
        await stack.produce([value % b"both".ljust(30_000)], headers=[("x-huge", b"x" * 60_000)])
        await stack.produce([value % b"good"], headers=[("x-small", b"x")])
        return await stack.results(2), await stack.read(TOPICS.dead_letters)

    results, dead = on_stack(scenario, small_records())
    assert {r.request_id: r.status for r in results} == {"headers": "rejected", "good": "completed"}
    assert len(dead) == 2
    assert all(b"key and headers" in dict(letter.headers)["forebay-reason"] for letter in dead)


def test_a_batch_waits_for_a_store_that_is_away(tmp_path, monkeypatch):
    write(tmp_path, [line("large", max_tokens=MANY)])
    away = [True] * 5
    read = LocalFileSystem.cat_file

    def cat_file(*arguments, **named):
        if away:
            away.pop()
            raise OSError(5, "not now")
        return read(*arguments, **named)

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)

    async def scenario(world):
        world.answer()
        return await go(world, tmp_path, blobs=world.client()._blobs)

    tally = in_world(scenario, small_records(tmp_path / "store"))
    assert (tally.answered, tally.errors, away) == (1, 0, [])


def test_a_batch_stopped_while_it_fetches_an_answer_fetches_it_when_it_goes_on(tmp_path, monkeypatch):
    write(tmp_path, [line("large", max_tokens=MANY)])
    read, fetching = Blobs.read, asyncio.Event()

    async def hang(*_):
        fetching.set()
        await asyncio.Event().wait()

    async def scenario(world):
        world.answer()
        blobs = world.client()._blobs
        monkeypatch.setattr(Blobs, "read", hang)
        first = asyncio.ensure_future(go(world, tmp_path, "first", blobs=blobs))
        await fetching.wait()
        first.cancel()
        await asyncio.wait([first])
        monkeypatch.setattr(Blobs, "read", read)
        return await go(world, tmp_path, "second", blobs=blobs)

    tally = in_world(scenario, small_records(tmp_path / "store"))
    assert (tally.answered, tally.errors) == (1, 0)


def test_a_store_that_hangs_does_not_hold_a_caller_longer_than_it_will_wait(tmp_path, monkeypatch):
    async def hang(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(Blobs, "write", hang)

    async def scenario(world):
        with pytest.raises(ClientTimeout):
            await world.client().submit("many words " * 10_000, timeout_s=5)
        return asyncio.get_running_loop().time()

    assert in_world(scenario, small_records(tmp_path)) < 10
