"""A stream whose worker dies in the middle: what its subscriber sees."""

import asyncio

import pytest
from client_world import in_world
from memory_stack import config_of

from broker import StreamRestarted
from schemas import ids


async def killed_in_the_middle(world, **fields):
    """Stream a request, kill its worker after some tokens, start another, and give everything that came."""
    world.dispatcher()
    world.worker("w1")
    client = world.client()
    stream = client.stream("tell me", id="s", max_output_tokens=300, **fields)
    items = []
    async for item in stream:
        items.append(item)
        if len(items) == 5:
            world.kill("w1")
            world.worker("w2")
    return items, stream.result


@pytest.mark.parametrize("fields", [{}, {"sampling": {"temperature": 0.0}}, {"sampling": {"seed": 7}}])
def test_the_rest_comes_without_repeats_where_the_new_run_says_the_same(fields):
    items, result = in_world(lambda world: killed_in_the_middle(world, **fields))
    assert not [item for item in items if isinstance(item, StreamRestarted)]
    assert "".join(item.text for item in items) == result.output_text
    assert [token for item in items for token in item.token_ids] == result.output_tokens
    assert len({item.run_id for item in items}) == 2
    assert result.worker == "w2"


def test_a_notice_stands_before_a_run_that_says_something_else(monkeypatch):
    dice = iter(range(100))
    monkeypatch.setattr(ids, "derived_seed", lambda _: next(dice))
    items, result = in_world(killed_in_the_middle)
    (at,) = [n for n, item in enumerate(items) if isinstance(item, StreamRestarted)]
    assert at >= 5
    assert "".join(item.text for item in items[at + 1 :]) == result.output_text
    assert [token for item in items[at + 1 :] for token in item.token_ids] == result.output_tokens


def test_a_seed_is_derived_from_the_id_and_nothing_else():
    assert ids.derived_seed("a") == ids.derived_seed("a")
    assert ids.derived_seed("a") != ids.derived_seed("b")


def test_streams_of_many_requests_survive_kills_of_their_workers():
    async def scenario(world):
        world.dispatcher()
        world.worker("w0")
        client = world.client()

        async def one(n):
            stream = client.stream(f"tell {n}", id=f"s{n}", max_output_tokens=200)
            items = [item async for item in stream]
            return items, stream.result

        async def kills():
            for n in range(3):
                await asyncio.sleep(1.5)
                world.kill(f"w{n}")
                world.worker(f"w{n + 1}")

        killing = asyncio.ensure_future(kills())
        found = await asyncio.gather(*(one(n) for n in range(12)))
        await killing
        return found

    for items, result in in_world(scenario, config_of(tpot_ms=10)):
        assert result.status == "completed"
        assert "".join(item.text for item in items) == result.output_text
