"""Blocking work, out of the way of the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a daemon thread: unlike a pool's it does not keep a process that gives up from ending.

    Raises:
        BaseException: What the work raises.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name="forebay-engine-load", daemon=True).start()
    return await done
