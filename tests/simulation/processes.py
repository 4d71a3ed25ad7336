"""Processes that can be killed and stopped at any await: an event loop that knows whose callback it runs.

Each process has a context of its own, in which all of its tasks and timers are made, so every callback of the loop can
be asked whose it is. Of a killed process none is run any more: no `finally`, no last word, as after `kill -9`. Those of
a stopped one are put aside and run when it goes on: its timers are late then, as after SIGSTOP. What belongs to no
process (the cluster's own timers, the test) always runs.
"""

import asyncio
import contextlib
import contextvars
import heapq
import logging
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from virtual_loop import VirtualLoop

CLOSE_TRIES = 50
_PROCESS: contextvars.ContextVar["Fate"] = contextvars.ContextVar("process")


class Fate:
    """What may become of one process: it runs, is stopped, or is dead.

    Args:
        name: The process's name.
        loop: Where its callbacks run.
    """

    def __init__(self, name: str, loop: "ProcessLoop") -> None:
        self.name, self._loop = name, loop
        self.is_dead = self.is_stopped = False
        self._aside: list[asyncio.Handle] = []
        self._strike: Callable[[], None] | None = None
        self._strike_after = 0
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def spawn(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the process."""
        return self._loop.create_task(main, context=self.context)

    def strike(self, after: int, act: Callable[[], None]) -> None:
        """Do something to the process before the callback after the next so many: between any two awaits."""
        self._strike_after, self._strike = after, act

    def kill(self) -> None:
        """End it, now and for good."""
        self.is_dead = True
        self._aside.clear()

    def stop(self) -> None:
        """Let it do nothing until it goes on."""
        self.is_stopped = True

    def go_on(self) -> None:
        """Run what was due meanwhile, and what comes."""
        self.is_stopped = False
        self._loop.again(self._aside)
        self._aside = []

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether the callback may run now; kept for later where the process is stopped."""
        if self._strike is not None and not self.is_stopped:
            if self._strike_after:
                self._strike_after -= 1
            else:
                act, self._strike = self._strike, None
                act()
        if self.is_dead:
            return False
        if self.is_stopped:
            self._aside.append(handle)
            return False
        return True


class _Callback(asyncio.Handle):
    """A callback that runs only as long as its process does."""

    __slots__ = ()

    def _run(self) -> None:
        fate = self._context.get(_PROCESS)
        if fate is None or fate.admits(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    """The same, at a time."""

    __slots__ = ()

    def _run(self) -> None:
        fate = self._context.get(_PROCESS)
        if fate is None or fate.admits(self):
            super()._run()


class _Nothing(selectors.SelectSelector):
    """Looks at no file at all: time is all that passes here."""

    loop: "ProcessLoop"

    def select(self, timeout: float | None = None):
        if timeout is None:
            message = "deadlock: every task waits and no timer is set"
            raise RuntimeError(message)
        self.loop.now = max(self.loop.now + timeout, math.nextafter(self.loop.now, math.inf))
        return []


class ProcessLoop(VirtualLoop):
    """Virtual time, with processes."""

    def __init__(self) -> None:
        super().__init__()
        nothing = _Nothing()
        nothing.loop = self
        self._selector.close()
        self._selector = nothing
        self._kept: list[asyncio.Task[Any]] = []  # a task of a killed process must not be collected: that would end it in order
        self._is_over = False
        self.set_task_factory(self._make_task)

    def call_soon(self, callback, *args, context=None):
        handle = _Callback(callback, args, self, context)
        if not self._is_over:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback, *args, context=None):
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        timer = _Timer(when, callback, args, self, context)
        if not self._is_over:
            heapq.heappush(self._scheduled, timer)
            timer._scheduled = True
        return timer

    def again(self, handles: list[asyncio.Handle]) -> None:
        """Run callbacks that were put aside, in their order."""
        self._ready.extend(handles)

    def end(self) -> None:
        """Throw away whatever is not finished, in silence; nothing is run on this loop afterwards."""
        self._is_over = True
        logging.disable(logging.CRITICAL)  # nobody is there any more to say anything
        self._scheduled.clear()
        for handle in self._ready:  # the loop is counting them: they stay, and are not run
            handle.cancel()
        current = asyncio.current_task(self)
        while self._kept:
            task = self._kept.pop()
            if task is current:
                continue
            task._log_destroy_pending = False
            coroutine, tries = task.get_coro(), CLOSE_TRIES
            while getattr(coroutine, "cr_frame", None) is not None and tries:  # an `await` in a `finally` holds it up
                tries -= 1
                with contextlib.suppress(BaseException):
                    coroutine.close()
        logging.disable(logging.NOTSET)

    def _make_task(self, loop, coroutine, context=None):
        task = asyncio.Task(coroutine, loop=loop, context=context)
        self._kept.append(task)
        return task


def run_with_processes(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end under virtual time, then throw away what is left of its processes."""
    loop = ProcessLoop()
    asyncio.set_event_loop(loop)

    async def whole() -> Any:
        try:
            return await main
        finally:
            loop.stop()
            loop.end()

    future = loop.create_task(whole())
    try:
        loop.run_forever()
        return future.result()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
