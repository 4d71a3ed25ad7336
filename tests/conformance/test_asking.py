"""Questions to running processes, inside one process and over a real Redis: who hears them, and what is passed over."""

import asyncio
import contextlib
import itertools
import os

import msgspec
import pytest
from redis.asyncio import Redis

from memory_coordinator import MemoryAsking, RedisAsking
from memory_coordinator.asking import QUESTION_BYTES_MAX, Answering
from schemas import InvalidMessage
from schemas.config import RedisConfig
from schemas.questions import Answer, Asked, Stage, StateOf, Where, WhereIs, decode_answer, decode_asked

NUMBERS = itertools.count()
LIMIT_S = 20.0
WHERE = WhereIs("r")


@pytest.fixture(params=["memory", "redis"])
def asking_on(request):
    """Give a way to make everybody's end of one channel, with bounds."""

    def make(**bounds):
        if request.param == "memory":
            shared = MemoryAsking(RedisConfig(**bounds))
            return lambda: shared
        config = RedisConfig(url=request.getfixturevalue("redis_url"), **bounds)
        prefix = f"asking-{os.getpid()}-{next(NUMBERS)}"
        return lambda: RedisAsking(config, prefix)

    return make


@contextlib.asynccontextmanager
async def answering(make, *replies):
    """Processes that answer so, all of them heard."""
    ends = [make() for _ in replies]
    tasks = [asyncio.ensure_future(end.answer(reply)) for end, reply in zip(ends, replies, strict=True)]
    try:
        asker = make()
        async with asyncio.timeout(LIMIT_S):
            while len(await asker.ask(StateOf(), 0.2)) < len(replies):
                pass
        yield asker
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in {asker, *ends}:
            await end.close()


def saying(name, role="worker", **more):
    return lambda _question: Answer(name, role, **more)


def run(scenario):
    return asyncio.run(scenario())


def test_all_that_listen_answer_and_the_asker_waits_no_longer(asking_on):
    def where(question):
        found = [Where("r", Stage.RUNNING, "a", pool="p")] if question == WHERE else []
        return Answer("w1", "worker", found)

    async def scenario():
        async with answering(asking_on(), saying("w2"), where, saying("d", "dispatcher")) as asker:
            loop = asyncio.get_running_loop()
            began = loop.time()
            answers = await asker.ask(WHERE, LIMIT_S)
            assert loop.time() - began < LIMIT_S / 2
            return answers

    assert [(a.name, a.role, [w.pool for w in a.found]) for a in run(scenario)] == [
        ("d", "dispatcher", []),
        ("w1", "worker", ["p"]),
        ("w2", "worker", []),
    ]


def test_nobody_there_is_no_error_and_no_wait(asking_on):
    async def scenario():
        asker = asking_on()()
        answers = await asker.ask(WHERE, LIMIT_S)
        await asker.close()
        return answers

    assert run(scenario) == []


def test_one_that_fails_to_answer_goes_on_answering(asking_on):
    calls = []

    def fails_once(question):
        calls.append(question)
        if question == WHERE:
            message = "broken by the test"
            raise RuntimeError(message)
        return Answer("w", "worker")

    async def scenario():
        async with answering(asking_on(), fails_once) as asker:
            assert await asker.ask(WHERE, 0.3) == []
            return await asker.ask(StateOf(), LIMIT_S)

    assert [a.name for a in run(scenario)] == ["w"]
    assert WHERE in calls


def test_an_answer_that_is_too_large_says_only_that_it_is(asking_on):
    large = [Where("r" * 100, Stage.RUNNING, "a") for _ in range(100)]

    async def scenario():
        async with answering(asking_on(answer_bytes_max=1_000), saying("w", found=large)) as asker:
            return await asker.ask(WHERE, LIMIT_S)

    (answer,) = run(scenario)
    assert (answer.name, answer.found, answer.is_cut) == ("w", [], True)


def test_more_questions_than_are_allowed_are_passed_over(caplog):
    async def scenario():
        answering = Answering(RedisConfig(questions_per_s_max=3), saying("w"))
        asked = msgspec.msgpack.encode(Asked("one", WHERE))
        return [answering.take(asked) is not None for _ in range(10)]

    assert run(scenario) == [True] * 3 + [False] * 7
    assert caplog.text.count("questions_passed_over") == 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"id": "one"}),
        msgspec.msgpack.encode({"id": "one", "question": {"kind": "shutdown"}}),
        msgspec.msgpack.encode({"id": "one", "question": {"kind": "where", "id": "r", "all": True}}),
        msgspec.msgpack.encode({"id": "a*", "question": {"kind": "state"}}),
        msgspec.msgpack.encode({"id": "one", "question": {"kind": "where", "id": "x" * 200}}),
        msgspec.msgpack.encode({"id": "one", "question": {"kind": "where", "id": "x" * QUESTION_BYTES_MAX}}),
    ],
)
def test_a_bad_question_is_passed_over_with_a_line(value, caplog):
    async def scenario():
        return Answering(RedisConfig(), saying("w")).take(value)

    assert run(scenario) is None
    assert "question_passed_over" in caplog.text
    with pytest.raises(InvalidMessage):
        decode_asked(value)


def test_an_answer_that_cannot_be_read_is_refused():
    with pytest.raises(InvalidMessage):
        decode_answer(b"junk")


def test_what_strangers_write_on_the_channel_ends_nobody(redis_url):
    prefix = f"asking-{os.getpid()}-{next(NUMBERS)}"

    async def scenario():
        async with answering(lambda: RedisAsking(RedisConfig(url=redis_url), prefix), saying("w")) as asker:
            redis = Redis.from_url(redis_url)
            await redis.publish(f"{prefix}:questions", b"junk")
            await redis.aclose()
            return await asker.ask(WHERE, LIMIT_S)

    assert [a.name for a in run(scenario)] == ["w"]


def test_without_redis_the_asker_is_told_and_who_answers_goes_on_trying():
    config = RedisConfig(url="redis://me:secret@127.0.0.1:9/0", timeout_ms=500)

    async def scenario():
        asking = RedisAsking(config, "p")
        task = asyncio.ensure_future(asking.answer(saying("w")))
        with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9.*forebay local up") as told:
            await asking.ask(WHERE, 1.0)
        assert "secret" not in str(told.value)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asking.close()

    run(scenario)
