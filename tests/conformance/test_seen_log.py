"""One suite for both logs of requests seen: the one in this process, and the one on Redis."""

import asyncio
import uuid

import pytest
from redis import Redis
from redis.exceptions import RedisError

from memory_coordinator import MemorySeenLog, RedisSeenLog
from schemas.config import RedisConfig
from schemas.messages import SeenBatch, SeenMark

WINDOW_MS, MARKS_MAX = 60_000, 10


def batch(at_ms, *numbers):
    return SeenBatch(at_ms, [SeenMark(b"%016d" % n, "requests", n % 2, n) for n in numbers])


@pytest.fixture(params=["memory", "redis"])
def make_log(request):
    if request.param == "memory":
        shared = MemorySeenLog(WINDOW_MS, MARKS_MAX)
        return lambda: shared
    config = RedisConfig(url=request.getfixturevalue("redis_url"))
    prefix = f"test-{uuid.uuid4().hex}"
    return lambda: RedisSeenLog(config, prefix, WINDOW_MS, MARKS_MAX)


def on_log(make_log, scenario):
    async def main():
        logs = []

        def opened():
            logs.append(make_log())
            return logs[-1]

        try:
            return await scenario(opened)
        finally:
            for log in logs:
                await log.close()

    return asyncio.run(main())


def test_what_one_term_wrote_the_next_reads_in_order(make_log):
    written = [batch(1_000, 1, 2), batch(1_200, 3), batch(1_400, 4, 5, 6)]

    async def scenario(opened):
        first = opened()
        assert await first.read() == []
        for each in written:
            await first.write(each)
        return await opened().read()

    assert on_log(make_log, scenario) == written


def test_the_oldest_go_beyond_the_number_and_beyond_the_window(make_log):
    async def scenario(opened):
        log = opened()
        for each in (batch(1_000, 1, 2, 3), batch(2_000, 4, 5, 6), batch(3_000, 7, 8, 9), batch(4_000, 10, 11)):
            await log.write(each)
        by_number = await opened().read()
        later = opened()
        await later.read()
        await later.write(batch(62_500, 12))
        return by_number, await opened().read()

    by_number, by_window = on_log(make_log, scenario)
    assert by_number == [batch(2_000, 4, 5, 6), batch(3_000, 7, 8, 9), batch(4_000, 10, 11)]
    assert by_window == [batch(3_000, 7, 8, 9), batch(4_000, 10, 11), batch(62_500, 12)]


def test_replaced_marks_are_gone_and_those_that_stay_still_count(make_log):
    async def scenario(opened):
        log = opened()
        for each in (batch(1_000, 1, 2), batch(2_000, 3, 4), batch(3_000, 5, 6, 7, 8)):
            await log.write(each)
        later = opened()
        await later.read()
        await later.replace([batch(2_000, 3, 4), batch(3_000, 5, 6, 7, 8)])
        replaced = await opened().read()
        await later.write(batch(4_000, *range(10, 16)))
        rolled = await opened().read()
        await later.replace([])
        return replaced, rolled, await opened().read()

    replaced, rolled, emptied = on_log(make_log, scenario)
    assert replaced == [batch(2_000, 3, 4), batch(3_000, 5, 6, 7, 8)]
    assert rolled == [batch(3_000, 5, 6, 7, 8), batch(4_000, *range(10, 16))]
    assert emptied == []


def test_the_stream_on_redis_expires_and_what_is_damaged_in_it_is_passed_over(redis_url):
    prefix = f"test-{uuid.uuid4().hex}"
    redis = Redis.from_url(redis_url)

    async def main():
        log = RedisSeenLog(RedisConfig(url=redis_url), prefix, WINDOW_MS, MARKS_MAX)
        await log.write(batch(1_000, 1))
        redis.xadd(f"{prefix}:seen", {"b": b"\xc1 no msgpack"})
        redis.xadd(f"{prefix}:seen", {"other": b"1"})
        await log.write(batch(2_000, 2))
        found = await log.read()
        await log.close()
        return found

    assert asyncio.run(main()) == [batch(1_000, 1), batch(2_000, 2)]
    assert 0 < redis.pttl(f"{prefix}:seen") <= WINDOW_MS
    redis.close()


def test_a_redis_that_is_away_is_an_error_that_the_term_expects():
    async def main():
        log = RedisSeenLog(RedisConfig(url="redis://127.0.0.1:9/0", timeout_ms=500), "forebay", WINDOW_MS, MARKS_MAX)
        try:
            await log.write(batch(1_000, 1))
        finally:
            await log.close()

    with pytest.raises(RedisError):
        asyncio.run(main())
