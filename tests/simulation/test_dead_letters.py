"""Dead letters on the whole path under virtual time: a failing engine, a mended one, and requests that are put back."""

import asyncio
from collections import Counter

from client_world import in_world
from memory_stack import config_of
from msgspec import structs

from broker.dead_letters import DeadLetters
from broker.replay import flaw, replay
from broker.transport.protocol import Outgoing
from schemas import Topics

TOPICS = Topics()


async def read(world, *, put_back=False):
    return [letter async for letter in DeadLetters(world.way("reader"), TOPICS).read(put_back=put_back)]


async def waiting(world, count):
    """Wait until so many dead letters are there."""
    async with asyncio.timeout(120):
        while True:
            letters = await read(world)
            if len(letters) >= count:
                return letters
            await asyncio.sleep(1)


async def put_back(world, letters):
    told = []

    async def each():
        for letter in letters:
            yield letter

    await replay(world.way("replayer"), TOPICS, each(), told.append)
    return told


def change_engine(world, config, name):
    """Kill the worker and start one with another configuration."""
    world.kill("w")
    world.config = config
    world.worker(name)


UNBROKEN = {"breaker": {"failures": 1_000}}  # the engine is asked on, however often it fails


def test_what_a_broken_engine_failed_is_completed_once_it_is_mended_and_put_back():
    async def scenario(world):
        world.answer()
        client = world.client()
        follower = await client.results("latest").open()
        producer = await world.way("stranger").producer()
        await producer.send(Outgoing(TOPICS.requests("interactive"), b"not json"))
        ids = [await client.send(f"say {n}", id=f"r{n}", tenant=f"t{n % 2}", service_class="batch") for n in range(6)]
        await producer.send(Outgoing(TOPICS.requests("batch"), b'{"prompt":"no id of its own"}'))
        letters = await waiting(world, 8)
        sound = [letter for letter in letters if flaw(letter, 8_000_000) is None]
        change_engine(world, config_of(), "w2")
        told = await put_back(world, sound)
        places = [str(one.place) for one in told]
        again = [r async for r in client.results("beginning", replays=places, timeout_s=60)]
        everything = [await anext(follower) for _ in range(14)]
        left = await read(world)
        nothing = await put_back(world, [letter for letter in await read(world, put_back=True) if letter.put_back_at_ms])
        return ids, letters, told, again, everything, left, nothing

    ids, letters, told, again, everything, left, nothing = in_world(scenario, config_of(dispatcher=UNBROKEN, fail_every=1))
    assert Counter(letter.code for letter in letters) == {"internal": 7, "invalid_request": 1}
    failed = [letter for letter in letters if letter.code == "internal"]
    assert {letter.service_class for letter in failed} == {"batch"}
    assert all(len(letter.envelope.route) == 2 for letter in failed)
    assert Counter(one.id for one in told) == Counter([*ids, None])
    assert {r.status for r in again} == {"completed"}
    assert {r.worker for r in again} == {"w2"}
    assert len(again) == 7
    assert set(ids) <= {r.request_id for r in again}
    (new,) = {r.request_id for r in again} - set(ids)
    assert new not in {letter.id for letter in letters}, "it lies elsewhere now, and its id is derived from there"
    assert Counter(r.status for r in everything) == {"failed": 7, "completed": 7}, "a follower takes neither for a repeat"
    assert [letter.value for letter in left] == [b"not json"]
    assert nothing == []


def test_a_letter_that_the_dispatcher_wrote_knows_its_class_and_its_id():
    config = config_of(die_after_requests=1)
    config = structs.replace(config, dispatcher=structs.replace(config.dispatcher, max_hops=1))

    async def scenario(world):
        world.answer()
        producer = await world.way("stranger").producer()
        await producer.send(Outgoing(TOPICS.requests("batch"), b'{"tenant":"alice","prompt":"no id"}'))
        (letter,) = await waiting(world, 1)
        (failed,) = [r async for r in world.client().results("beginning", follow=False)]
        change_engine(world, config_of(), "w2")
        told = await put_back(world, [letter])
        (again,) = [r async for r in world.client("c2").results("beginning", replays=[str(told[0].place)], timeout_s=60)]
        return letter, failed, told, again

    letter, failed, (told,), again = in_world(scenario, config)
    assert letter.original[0] == TOPICS.retries
    assert (letter.code, letter.service_class, letter.tenant) == ("unhealthy", "batch", "alice")
    assert letter.id == failed.request_id
    assert told.topic == TOPICS.requests("batch")
    assert (again.status, again.tenant) == ("completed", "alice")
