"""Tasks that are ended are over."""

import asyncio

import pytest
from virtual_loop import run_virtual

from broker.transport.tasks import end


async def for_ever(swallows: int = 0) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallows -= 1
            if swallows < 0:
                raise


@pytest.mark.parametrize("swallows", [0, 1, 3])
def test_a_task_that_swallows_a_cancel_is_over_all_the_same(swallows):
    async def scenario():
        task = asyncio.ensure_future(for_ever(swallows))
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await end(task)
        return task.cancelled()

    assert run_virtual(scenario())


def test_tasks_that_ended_by_themselves_are_taken_as_they_are():
    async def scenario():
        async def fails():
            raise ValueError

        tasks = [asyncio.ensure_future(work) for work in (fails(), asyncio.sleep(0), for_ever())]
        await asyncio.sleep(1)
        await end(*tasks)
        await end()
        return [task.done() for task in tasks]

    assert run_virtual(scenario()) == [True, True, True]
