"""An event loop whose clock jumps to the next timer instead of sleeping, and tells a deadlock."""

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpSelector(selectors.SelectSelector):
    """Never waits: where nothing is ready it moves the loop's clock to the next timer."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None):
        ready = super().select(0)
        if not ready and timeout is None:
            message = "deadlock: every task waits and no timer is set"
            raise RuntimeError(message)
        if not ready and timeout is not None:
            self.loop.now = max(self.loop.now + timeout, math.nextafter(self.loop.now, math.inf))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time is `now`, in seconds, and starts at 0."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpSelector()
        super().__init__(selector)
        selector.loop = self
        self._clock_resolution = 0.0  # a timer that fires early would be set again for no time at all, for ever

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor, func, *arguments):  # noqa: ARG002 - there is none
        """Do the work of a thread at once: the clock would not wait for one."""
        done = self.create_future()
        try:
            done.set_result(func(*arguments))
        except Exception as error:  # noqa: BLE001 - whatever it is goes to whoever waits
            done.set_exception(error)
        return done


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end under virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
