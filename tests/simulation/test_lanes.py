"""Lanes on the whole path under virtual time: who has much waits by itself, and a takeover finds whose each lane is."""

import asyncio
from collections import Counter

import pytest
from memory_stack import INTERACTIVE, TOPICS, on_stack

from broker.transport.protocol import Outgoing
from schemas import codecs, parse_config
from schemas.errors import ErrorCode

BATCH = TOPICS.requests("batch")


def config_of(slots=4, hop=None, lanes=None, topics=None, delivery="exactly_once", ttft_ms=20, max_context=32_768, **dispatcher):
    options = {"ttft_ms": ttft_ms, "tpot_ms": 0, "prefill_tokens_per_s": 0, "max_context": max_context}
    profile = {"ttft_ms": ttft_ms, "prefill_ms_per_1k": 0, "prefill_quadratic_ms": 0}
    return parse_config(
        {
            "kafka": {"delivery": delivery},
            "engines": {"sim": {"kind": "sim", "slots": slots, "options": options, "profile": profile}},
            "topics": {
                "request_partitions": 1,
                "engine_partitions": 2,
                "result_partitions": 1,
                "retry_partitions": 1,
                "lane_partitions": 4,
                **(topics or {}),
            },
            "dispatcher": {"hop": hop or {}, "lanes": lanes or {}, **dispatcher},
        }
    )


def requests(tenant, count, prompt="a", first=0):
    text = '{"id":"%s-%d","tenant":"%s","prompt":"%s","max_output_tokens":1}'
    return [(text % (tenant, n, tenant, prompt)).encode() for n in range(first, first + count)]


async def produce(stack, values, topic=INTERACTIVE):
    producer = await stack.transport.producer()
    sent = [await producer.send(Outgoing(topic, value, None, (), 0)) for value in values]
    await asyncio.gather(*sent)
    await producer.close()


def owners(service):
    return service._active._machine._lanes.owners()


def lying(stack, topic=TOPICS.lanes):
    """Records that were ever written to a topic and are still there."""
    return sum(len(log.read(log.first, 1 << 40)[0]) for log in stack.cluster.logs(topic))


async def result_of(stack, ident, limit_s=60):
    """Wait for a request's result; gives all results that lie there by then."""
    for _ in range(limit_s * 50):
        found = [codecs.decode_result(record.value) for record in stack.cluster.logs(TOPICS.results)[0].read(0, 1 << 40)[0]]
        if any(one.request_id == ident for one in found):
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(ident)


def are_all_once(results, *idents, status="completed"):
    assert Counter(one.request_id for one in results) == dict.fromkeys(idents, 1)
    assert {one.status for one in results} == {status}


@pytest.mark.parametrize("topic", [INTERACTIVE, BATCH])
def test_one_request_behind_twenty_thousand_of_another_tenant_in_one_partition_is_answered_soon(topic):
    async def scenario(stack):
        stack.worker()
        stack.dispatcher()
        await produce(stack, [*requests("a", 20_000), *requests("b", 1)], topic)
        results = await result_of(stack, "b-0")
        assert len(results) < 1_000, "the others still wait"
        assert lying(stack) > 18_000

    on_stack(scenario, config_of())


def test_whose_the_lanes_are_is_read_back_and_a_dispatcher_killed_in_mid_drain_loses_and_repeats_nothing():
    async def scenario(stack):
        stack.worker()
        killed = [stack.dispatcher("d0")]
        await produce(stack, [*requests("a", 400), *requests("b", 200)])
        await produce(stack, requests("c", 300), BATCH)
        before = {}
        for n in range(3):
            await asyncio.sleep(0.6)
            before = owners(killed[-1])
            stack.kill(f"d{n}")
            await asyncio.sleep(0.01 * n)
            killed.append(stack.dispatcher(f"d{n + 1}"))
            until = asyncio.get_running_loop().time() + 30
            while killed[-1]._active is None or not killed[-1]._active._lanes.is_open:
                assert asyncio.get_running_loop().time() < until
                await asyncio.sleep(0.01)
            assert owners(killed[-1]) == before
            assert sorted(owner for lane in before.values() for owner in lane) == [
                ("batch", "c"),
                ("interactive", "a"),
                ("interactive", "b"),
            ]
        results = await stack.results(900)
        are_all_once(results, *(f"a-{n}" for n in range(400)), *(f"b-{n}" for n in range(200)), *(f"c-{n}" for n in range(300)))
        await asyncio.sleep(1)
        assert owners(killed[-1]) == {}, "all of them are free in the end"
        await produce(stack, requests("d", 100))
        await asyncio.sleep(0.5)
        assert owners(killed[-1]) == {0: [("interactive", "d")]}
        assert len(await stack.results(1_000)) == 1_000

    on_stack(scenario, config_of(lanes={"records_max": 20}))


@pytest.mark.parametrize("mode", ["exactly_once", "at_least_once"])
def test_thirty_tenants_over_sixteen_lanes_all_get_their_turn(mode):
    async def scenario(stack):
        stack.worker()
        service = stack.dispatcher()
        tenants = [f"t{n:02d}" for n in range(30)]
        await produce(stack, [value for tenant in tenants for value in requests(tenant, 40)], BATCH)
        await asyncio.sleep(2)
        taken = owners(service)
        assert len(taken) == 12, "batch leaves a quarter"
        assert sum(map(len, taken.values())) > 20
        await produce(stack, requests("late", 1), BATCH)
        results = await result_of(stack, "late-0")
        assert len(results) < 600
        are_all_once(await stack.results(1_201), "late-0", *(f"{tenant}-{n}" for tenant in tenants for n in range(40)))

    topics = {"lane_partitions": 16}
    on_stack(scenario, config_of(lanes={"records_max": 5}, topics=topics, delivery=mode))


def test_interactive_tenants_without_a_lane_are_refused_and_told_when_to_ask_again():
    async def scenario(stack):
        stack.worker()
        stack.dispatcher()
        for tenant in "abcd":
            await produce(stack, requests(tenant, 30))
        results = await stack.results(120)
        assert Counter(one.request_id for one in results) == {f"{tenant}-{n}": 1 for tenant in "abcd" for n in range(30)}
        refused = [one for one in results if one.status != "completed"]
        assert {(one.tenant, one.status, one.error.code) for one in refused} == {("d", "rejected", ErrorCode.CAPACITY_EXCEEDED)}
        assert all(one.error.retry_after_ms for one in refused)

    on_stack(scenario, config_of(lanes={"records_max": 5}))


def test_a_tenant_with_records_of_eight_megabytes_stops_nobody():
    async def scenario(stack):
        stack.worker()
        service = stack.dispatcher()
        peak = [0]

        async def watch():
            while True:
                hop = service._active._hop if service._active is not None else None
                peak[0] = max(peak[0], 0 if hop is None else hop.held_bytes)
                await asyncio.sleep(0.001)

        watching = asyncio.ensure_future(watch())
        await produce(stack, [*requests("a", 40, prompt="x" * 7_900_000), *requests("b", 300)], BATCH)
        results = await result_of(stack, "b-0")
        assert len(results) < 20
        await produce(stack, requests("c", 1))
        await result_of(stack, "c-0", limit_s=2)
        assert len(await stack.results(341)) == 341
        assert 16 * 2**20 <= peak[0] < 72 * 2**20
        watching.cancel()

    hop = {"in_flight_bytes_max": 64 * 2**20}
    on_stack(scenario, config_of(hop=hop, lanes={"bytes_max": 16 * 2**20}, ttft_ms=200, max_context=10**8))


@pytest.mark.parametrize("tenants", [12, 300])
def test_a_newcomer_gets_in_however_many_wait_in_its_partition(tenants):
    async def scenario(stack):
        service = stack.dispatcher()  # and no worker: nobody is served
        for n in range(tenants):
            await produce(stack, requests(f"t{n}", 30 if tenants < 20 else 2), BATCH)
        await produce(stack, requests("late", 1), BATCH)
        await asyncio.sleep(10)
        held = Counter(item.tenant for item in service._active._machine._in_hand.values())
        assert held["late"] == 1
        assert len(held) == tenants + 1
        stack.worker()
        await result_of(stack, "late-0", limit_s=5)
        total = 1 + tenants * (30 if tenants < 20 else 2)
        assert len({one.request_id for one in await stack.results(total)}) == total

    on_stack(scenario, config_of(hop={"unfinished_max": 80}, topics={"lane_partitions": 16}))


def test_a_cancel_of_a_whole_tenant_empties_its_lane_at_once_however_slow_the_engines_are():
    async def scenario(stack):
        stack.worker()
        service = stack.dispatcher()
        await produce(stack, requests("a", 5_000), BATCH)
        await asyncio.sleep(2)
        assert owners(service) == {0: [("batch", "a")]}
        await stack.produce([b'{"kind":"cancel","tenant":"a"}'], TOPICS.control)
        results = await stack.results(4_990, limit_s=5)
        assert Counter(one.status for one in results)["cancelled"] >= 4_950
        are_once = Counter(one.request_id for one in results)
        assert set(are_once.values()) == {1}
        await asyncio.sleep(1)
        assert owners(service) == {}

    on_stack(scenario, config_of(ttft_ms=3_000))


def test_what_nobody_serves_now_moves_out_of_the_way_of_those_that_are_served():
    async def scenario(stack):
        stack.worker()
        stack.dispatcher()
        for n in range(3):
            await produce(
                stack,
                [b'{"id":"stuck-%d","tenant":"a","model":"later","fallback":"none","prompt":"a","max_output_tokens":1}' % n],
            )
        for n in range(12):
            await produce(stack, requests("b", 40, first=40 * n))
            await asyncio.sleep(0.5)
        results = await stack.results(480)
        assert len(results) == 480
        committed = stack.cluster.committed[TOPICS.dispatcher_group, stack.cluster.logs(INTERACTIVE)[0].tp]
        assert committed.offset == 483
        assert 3 <= lying(stack) < 480
        stack.worker("later", "later")
        assert len(await stack.results(483)) == 483

    engines = {name: {"kind": "sim", "model": name, "slots": 4, "options": {"ttft_ms": 20}} for name in ("sim", "later")}
    topics = {"request_partitions": 1, "engine_partitions": 2, "result_partitions": 1, "retry_partitions": 1}
    lanes = {"hop": {"unfinished_max": 8}, "lanes": {"hold_ms": 2_000}}
    on_stack(scenario, parse_config({"engines": engines, "topics": topics, "dispatcher": lanes}))


def test_finished_records_of_lanes_are_deleted():
    async def scenario(stack):
        stack.worker()
        stack.dispatcher()
        await produce(stack, requests("a", 100))
        assert len(await stack.results(100)) == 100
        assert lying(stack) > 50
        await asyncio.sleep(11)
        assert lying(stack) == 0

    on_stack(scenario, config_of(lanes={"records_max": 5}, trim_interval_ms=5_000))
