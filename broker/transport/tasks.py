"""Ending tasks that run for ever."""

import asyncio
from typing import Any

AGAIN_S = 1.0  # much longer than the clean-up of a loop that holds nothing
CLEAN_UP_S = 15.0  # and of one that lets go of partitions


async def end(*tasks: "asyncio.Future[Any]", again_s: float = AGAIN_S) -> None:
    """Cancel tasks until they are over, whatever they end with.

    One cancel is not enough: before Python 3.12 `asyncio.wait_for` swallows it where what it waited for has just come,
    and the clients of Kafka and Redis call that as well as we do. The loop inside then goes on, and whoever waits for
    its end waits for ever.

    Args:
        tasks: The loops.
        again_s: When to cancel anew; longer than their clean-up takes, which would be cut off.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not logged as lost
