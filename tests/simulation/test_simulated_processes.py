"""What the simulation's processes stand on: a killed one says no last word, a stopped one goes on where it was, and late."""

import asyncio

import pytest
from simulation.processes import Fate, run_with_processes


def on_loop(scenario):
    async def main():
        return await scenario(asyncio.get_running_loop())

    return run_with_processes(main())


def test_a_killed_process_runs_nothing_any_more_not_even_a_finally():
    said = []

    async def program():
        try:
            while True:
                await asyncio.sleep(1)
                said.append("tick")
        finally:
            said.append("last word")

    async def scenario(loop):
        fate = Fate("p", loop)
        fate.spawn(program())
        await asyncio.sleep(2.5)
        fate.kill()
        await asyncio.sleep(10)
        return list(said)

    assert on_loop(scenario) == ["tick", "tick"]


def test_a_stopped_process_finds_its_timers_late_and_in_order():
    said = []

    async def program(loop):
        loop.call_later(4, lambda: said.append(("second", loop.time())))
        loop.call_later(3, lambda: said.append(("first", loop.time())))
        try:
            async with asyncio.timeout(2):
                await asyncio.sleep(60)
        except TimeoutError:
            said.append(("limit", loop.time()))

    async def scenario(loop):
        fate = Fate("p", loop)
        fate.spawn(program(loop))
        await asyncio.sleep(1)
        fate.stop()
        await asyncio.sleep(9)
        assert said == []
        fate.go_on()
        await asyncio.sleep(1)

    on_loop(scenario)
    assert [name for name, _ in said] == ["first", "second", "limit"]
    assert {round(at, 6) for _, at in said} == {10.0}


def test_a_timer_called_off_while_its_process_was_stopped_does_not_run():
    said = []

    async def scenario(loop):
        fate = Fate("p", loop)
        timer = loop.call_later(1, said.append, "late", context=fate.context)
        fate.stop()
        await asyncio.sleep(2)
        timer.cancel()
        fate.go_on()
        await asyncio.sleep(2)

    on_loop(scenario)
    assert said == []


@pytest.mark.parametrize("after", range(6))
def test_a_process_is_struck_between_any_two_awaits(after):
    steps = []

    async def program():
        for step in range(10):
            steps.append(step)
            await asyncio.sleep(0)

    async def scenario(loop):
        fate = Fate("p", loop)
        fate.strike(after, fate.kill)
        fate.spawn(program())
        await asyncio.sleep(1)

    on_loop(scenario)
    assert steps == list(range(after))


def test_what_one_process_wakes_in_another_runs_as_the_others():
    async def scenario(loop):
        waiter, other, said = Fate("waiter", loop), Fate("other", loop), []
        bell = asyncio.Event()

        async def wait():
            await bell.wait()
            said.append("woken")

        waiter.spawn(wait())
        await asyncio.sleep(1)
        waiter.kill()
        other.context.run(bell.set)
        await asyncio.sleep(1)
        return said

    assert on_loop(scenario) == []
