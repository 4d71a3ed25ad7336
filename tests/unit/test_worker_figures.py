"""What a worker tells of itself: how runs ended, what batch holds, how fast it has been."""

import asyncio

import pytest
from memory_stack import TOPICS, config_of, on_stack, prompts
from msgspec import structs

from engine_consumers.core.completions import AGAIN_MAX, HELD_MAX, Completions
from engine_consumers.core.pace import WINDOW_S, Pace
from engine_consumers.errors import EngineError
from schemas import codecs
from schemas.errors import ErrorCode
from schemas.messages import Completion, InferenceRequest

SERVES = {"admission": {"deadline": "serve"}}  # also what is predicted to come too late
BATCH = TOPICS.requests("batch")


def ended(number):
    return Completion(0, number, 1, 1, 0.0, 1.0, 1.0)


async def serving(stack):
    """Start a dispatcher and a worker, and wait until requests can reach it."""
    stack.dispatcher()
    worker = stack.worker()
    await asyncio.sleep(5)
    assert worker.status().partitions
    return worker


def offsets(completions):
    return [one.offset for one in completions]


def test_what_was_not_told_is_told_with_the_last_of_what_was():
    held = Completions()
    for n in range(200):
        held.add(ended(n))
    assert offsets(held.to_tell()) == list(range(200))
    held.told(150)
    assert offsets(held.to_tell()) == list(range(150 - AGAIN_MAX, 200))
    held.told(200)
    assert offsets(held.to_tell()) == list(range(200 - AGAIN_MAX, 200))
    assert held.count == 200


def test_while_nobody_can_be_told_the_oldest_are_forgotten_and_still_counted():
    held = Completions()
    for n in range(HELD_MAX + 500):
        held.add(ended(n))
    assert offsets(held.to_tell()) == list(range(500, HELD_MAX + 500))
    assert held.count == HELD_MAX + 500


def test_one_who_misses_every_second_snapshot_misses_nothing():
    held, known = Completions(), set()
    for turn in range(40):
        for n in range(AGAIN_MAX // 2):
            held.add(ended(turn * 100 + n))
        told = held.to_tell()
        held.told(held.count)
        if turn % 2:
            known.update(offsets(told))
    assert len(known) == held.count


def test_pace_is_that_of_the_last_seconds():
    pace = Pace()
    assert (pace.latency_ms(3.0), pace.tokens_per_s(3.0)) == (None, 0.0)
    for second in range(100, 150):
        pace.produced(30, second + 0.5)
        pace.completed(second, second + 0.5)
    assert pace.tokens_per_s(150.0) == pytest.approx(30 * WINDOW_S / WINDOW_S, rel=0.1)
    assert pace.latency_ms(150.0) == pytest.approx(sum(range(140, 150)) / 10)
    assert (pace.latency_ms(200.0), pace.tokens_per_s(200.0)) == (None, 0.0)


def test_pace_counts_from_the_first_token():
    pace = Pace()
    pace.produced(50, 1000.9)
    assert pace.tokens_per_s(1001.0) == 50.0  # and not five hundred
    pace.produced(50, 1002.0)
    assert pace.tokens_per_s(1002.9) == pytest.approx(50.0)


def test_a_run_is_told_with_what_it_took():
    async def scenario(stack):
        stack.dispatcher()
        worker = stack.worker()
        await stack.produce(prompts(8), BATCH)
        results = await stack.results(8)
        status = worker.status()
        envelopes = {r.offset: r for r in await stack.read(TOPICS.engine("sim"))}
        return results, status, envelopes

    results, status, records = on_stack(scenario, config_of(slots=4, interference=0))
    assert status.completed == 8
    assert len(status.completions) == 8
    assert {one.offset for one in status.completions} == set(records)
    for one in status.completions:
        assert (one.input_tokens, one.output_tokens, one.code) == (2, 8, None)
        assert one.ttft_ms == pytest.approx(20.1, abs=0.2)
        assert one.run_ms == pytest.approx(20.1 + 7 * 5, abs=0.5)
        assert one.waited_ms >= 0
        assert one.kv_cache_usage is not None
    assert max(one.beside for one in status.completions) == 2  # one slot of four is kept from batch
    assert max(one.waited_ms for one in status.completions) > 50
    assert status.avg_latency_ms == pytest.approx(sum(one.waited_ms + one.run_ms for one in status.completions) / 8)
    assert status.throughput_tps > 0
    assert {one.status for one in results} == {"completed"}


def test_failures_are_told_with_their_code_and_hand_backs_too():
    async def scenario(stack):
        worker = await serving(stack)
        values = [
            b'{"id":"long","prompt":"%s","max_output_tokens":8}' % (b"x" * 400),
            b'{"id":"late","prompt":"say","max_output_tokens":8,"deadline":"%s"}' % stack.deadline(1).encode(),
            b'{"id":"good","prompt":"say","max_output_tokens":8}',
        ]
        await stack.produce(values)
        await stack.results(3)
        return worker.status()

    status = on_stack(scenario, config_of(dispatcher=SERVES, ttft_ms=2_000, max_context=64))
    told = {(one.code, one.output_tokens) for one in status.completions}
    assert told == {(ErrorCode.CONTEXT_OVERFLOW, 0), (ErrorCode.EXPIRED, 0), (None, 8)}
    assert status.completed == 3


def test_what_was_cancelled_before_it_ran_is_told_and_took_nothing():
    async def scenario(stack):
        worker = await serving(stack)
        late = [b'{"id":"w%d","prompt":"say","deadline":"%s"}' % (n, stack.deadline(1).encode()) for n in range(2)]
        await stack.produce([b'{"id":"runs","prompt":"say","max_output_tokens":8}', *late])
        await stack.results(3)
        return worker.status()

    status = on_stack(scenario, config_of(slots=1, ttft_ms=3_000, dispatcher={"runway_factor": 3, **SERVES}))
    expired = next(one for one in status.completions if not one.input_tokens)
    assert (expired.code, expired.run_ms, expired.ttft_ms) == (ErrorCode.EXPIRED, 0, None)
    assert expired.waited_ms > 500


def test_the_last_status_of_one_that_leaves_tells_how_its_runs_ended():
    async def scenario(stack):
        worker = await serving(stack)
        heard = []

        async def listen():
            async for status in stack.board.watch(60_000):
                heard[:] = [status]

        listening = asyncio.ensure_future(listen())
        await stack.produce(prompts(2))
        await asyncio.sleep(1)
        assert worker.status().running == 2
        worker.stop()
        await stack.tasks.pop("w")
        await asyncio.sleep(0)
        listening.cancel()
        return heard[-1], await stack.board.read()

    last, left = on_stack(scenario, config_of(ttft_ms=3_000))
    assert last.completed == len(last.completions) == 2
    assert not last.is_healthy
    assert left == []


def test_a_status_tells_of_batch_and_of_the_slots_that_are_kept_from_it():
    async def scenario(stack):
        stack.dispatcher()
        worker = stack.worker()
        await stack.produce(prompts(10), BATCH)
        await stack.produce([b'{"id":"i","prompt":"say"}'])
        await asyncio.sleep(1)
        return worker.status()

    status = on_stack(scenario, config_of(slots=4, ttft_ms=60_000))
    assert (status.interactive_slots, status.running) == (1, 4)
    assert status.batch_load >= 3
    assert status.queue_depth == status.batch_load + 1 - status.running


def test_interactive_starts_at_once_while_batch_waits():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce(prompts(5), BATCH)
        await asyncio.sleep(1.0)
        await stack.produce([b'{"id":"i","prompt":"say","max_output_tokens":1}'])
        return await stack.results(6)

    results = on_stack(scenario, config_of(slots=4, ttft_ms=2_000, tpot_ms=0))
    (mine,) = [one for one in results if one.request_id == "i"]
    assert mine.timing.queued_ms < 200


def test_the_route_says_why_it_was_placed_there():
    """Of attempts that failed, were handed back and completed alike; what is handed back has no place yet."""

    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce([b'{"id":"r","prompt":"say","max_output_tokens":2}'])
        results = await stack.results(1)
        back = [codecs.decode_envelope(dict(r.headers)["forebay-envelope"]) for r in await stack.read(TOPICS.retries)]
        sent = [codecs.decode_envelope(dict(r.headers)["forebay-envelope"]) for r in await stack.read(TOPICS.engine("sim"))]
        return results[0].route, back, sent

    route, back, sent = on_stack(scenario, config_of(fail_every=1, dispatcher={"max_attempts": 2}))
    assert [one.outcome for one in route] == ["retried", "failed"]
    assert [one.placement for one in route] == [one.placement for one in sent]
    assert [one.placement for one in back] == [None]


def test_nothing_is_sent_to_an_engine_whose_backend_is_away_and_it_is_sent_again_once_that_is_back():
    async def scenario(stack):
        worker = await serving(stack)
        engine = worker._engine
        engine._runs.away, status = "the server is away", engine.status
        engine.status = lambda: structs.replace(status(), is_healthy=False)
        with pytest.raises(EngineError, match="the server is away"):
            await anext(engine.generate(InferenceRequest(prompt="say"), "run", 1))
        await asyncio.sleep(2)
        await stack.produce([b'{"id":"r","prompt":"say","max_output_tokens":2}'])
        await asyncio.sleep(5)
        while_away = worker.status(), await stack.read(TOPICS.engine("sim"))
        engine._runs.away, engine.status = None, status
        return while_away, await stack.results(1)

    (told, sent), (result,) = on_stack(scenario, config_of(dispatcher={"failover_timeout_ms": 60_000}))
    assert (told.is_healthy, sent) == (False, [])
    assert (result.status, [one.outcome for one in result.route]) == ("completed", ["completed"])
