"""Cancels that race with whatever a request is going through: a hundred of each, and always one terminal result."""

import asyncio
import random
from collections import Counter

import pytest
from memory_stack import TOPICS, config_of, on_stack

from broker.transport.protocol import Outgoing
from schemas import codecs
from schemas.control import Cancel, encode_control

COUNT = 100


def request(n, tokens):
    return b'{"id":"r%d","prompt":"say %d","max_output_tokens":%d}' % (n, n, tokens)


class Race:
    """Requests sent over two seconds, and a cancel of each within a spread of time after it."""

    def __init__(self, stack, seed, spread_s, tokens=40):
        self.stack, self.dice, self.spread_s, self.tokens = stack, random.Random(seed), spread_s, tokens

    async def run(self):
        producer = await self.stack.transport.producer()

        async def one(n):
            await asyncio.sleep(self.dice.uniform(0, 2))
            await (await producer.send(Outgoing(TOPICS.requests("interactive"), request(n, self.tokens))))
            await asyncio.sleep(self.dice.uniform(0.001, self.spread_s))
            value = encode_control(Cancel(id=f"r{n}"))
            await (await producer.send(Outgoing(TOPICS.control, value, value)))

        await asyncio.gather(*(one(n) for n in range(COUNT)))
        await producer.close()


async def ended(stack, worker):
    """The statuses of the terminal records, once all are there and nothing came for a while."""
    await stack.results(COUNT)
    await asyncio.sleep(5)
    found = [codecs.decode_result(record.value) for record in await stack.read(TOPICS.results)]
    assert sorted(r.request_id for r in found) == sorted(f"r{n}" for n in range(COUNT))
    assert worker.status().running == 0
    assert worker._engine.status().running == worker._engine.status().waiting == 0
    return Counter(r.status for r in found)


async def unread(stack, seed):
    """The dispatcher starts somewhere in the midst of it."""
    race = asyncio.ensure_future(Race(stack, seed, 4.0).run())
    await asyncio.sleep(1.5)
    stack.dispatcher("d1")
    worker = stack.worker("w1")
    await race
    return await ended(stack, worker)


async def queued(stack, seed):
    """The worker comes somewhere in the midst of it."""
    stack.dispatcher("d1")
    await asyncio.sleep(1)
    race = asyncio.ensure_future(Race(stack, seed, 4.0).run())
    await asyncio.sleep(1.5)
    worker = stack.worker("w1")
    await race
    return await ended(stack, worker)


async def at_work(stack, seed, *race, **tokens):
    stack.dispatcher("d1")
    worker = stack.worker("w1")
    await asyncio.sleep(1)
    await Race(stack, seed, *race, **tokens).run()
    return await ended(stack, worker)


async def on_the_runway(stack, seed):
    """One slot, and always some that wait for it in the worker or in front of it."""
    return await at_work(stack, seed, 3.0, tokens=10)


async def running(stack, seed):
    """All run at once, for about a second."""
    return await at_work(stack, seed, 1.5, tokens=200)


async def in_backoff(stack, seed):
    """Every run fails, and is tried again after a while."""
    return await at_work(stack, seed, 2.0)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("state", "slots", "options"),
    [
        (unread, 8, {}),
        (queued, 8, {}),
        (on_the_runway, 1, {}),
        (running, 100, {"interference": 0}),
        (in_backoff, 8, {"fail_every": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_terminal_result_in_every_race(state, slots, options, seed):
    statuses = on_stack(lambda stack: state(stack, seed), config_of(slots=slots, **options))
    assert set(statuses) <= {"cancelled", "completed", "failed"}
    assert statuses["cancelled"] >= 10
    assert statuses["cancelled"] < COUNT or state is in_backoff, "no race at all: the cancel always won"


def test_a_cancelled_run_frees_its_slot_within_a_step():
    async def scenario(stack):
        stack.dispatcher("d1")
        worker = stack.worker("w1")
        await stack.produce([request(n, 4_000) for n in range(4)])
        await asyncio.sleep(3)
        assert worker._engine.status().running == 4
        producer = await stack.transport.producer()
        value = encode_control(Cancel(tenant="default"))
        await (await producer.send(Outgoing(TOPICS.control, value, value)))
        await asyncio.sleep(0.02)
        assert worker._engine.status().running == 0
        return await stack.results(4)

    results = on_stack(scenario)
    assert Counter(r.status for r in results) == {"cancelled": 4}
    assert all(r.error.code == "cancelled" and r.output_tokens and r.finish_reason == "abort" for r in results)
