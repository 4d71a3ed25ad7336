"""The runs an engine has open, and whether it takes more: the part that is the same in every engine."""

import asyncio
from typing import Generic, TypeVar

from engine_consumers.errors import EngineError
from schemas.errors import ErrorCode

R = TypeVar("R")


class Runs(Generic[R]):
    """Open runs by name. Death is told once and is final; a backend that is only away comes back."""

    def __init__(self) -> None:
        self._open: dict[str, R] = {}
        self._is_ready = False
        self._is_draining = False
        self._death: str | None = None
        self.away: str | None = None  # why the backend is not there for the time being
        self._dead = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def states(self) -> list[R]:
        """States of the open runs, as they are now."""
        return list(self._open.values())

    def items(self) -> list[tuple[str, R]]:
        """The open runs, as they are now."""
        return list(self._open.items())

    @property
    def death(self) -> str | None:
        """Why the backend is dead, or None while it lives."""
        return self._death

    def ready(self) -> None:
        """The engine has started."""
        self._is_ready = True

    def close(self) -> None:
        """The engine was closed and admits nothing more."""
        self._is_ready = False

    def admit(self, run: str) -> None:
        """Check that a run may be opened.

        Raises:
            EngineError: `unhealthy` before the start and after death, `capacity_exceeded` while draining, `internal` for a
                name that is in use.
        """
        self.check_alive()
        if not self._is_ready:
            raise EngineError(ErrorCode.UNHEALTHY, "the engine is not started, or closed")
        if self._is_draining:
            raise EngineError(ErrorCode.CAPACITY_EXCEEDED, "the engine is draining and takes no more requests")
        if run in self._open:
            message = f"run {run!r} is open already"
            raise EngineError(ErrorCode.INTERNAL, message)

    def check_alive(self) -> None:
        """Check that the backend is there.

        Raises:
            EngineError: `unhealthy` with the reason of its death, or why it is away.
        """
        if self._death is not None:
            message = f"the engine is dead: {self._death}"
            raise EngineError(ErrorCode.UNHEALTHY, message)
        if self.away is not None:
            raise EngineError(ErrorCode.UNHEALTHY, self.away)

    def add(self, run: str, state: R) -> None:
        """Open a run that was admitted."""
        self._open[run] = state
        self._empty.clear()

    def get(self, run: str) -> R | None:
        """Give an open run's state."""
        return self._open.get(run)

    def remove(self, run: str, state: R) -> None:
        """A run has ended; told again, or after its name was taken anew, it changes nothing."""
        if self._open.get(run) is state:
            del self._open[run]
        if not self._open:
            self._empty.set()

    def die(self, reason: str) -> bool:
        """The backend is dead; False where that was known."""
        if self._death is not None:
            return False
        self._death = reason
        self._dead.set()
        return True

    async def died(self) -> str:
        """Wait for death and give its reason."""
        await self._dead.wait()
        return self._death or ""

    async def drain(self) -> None:
        """Admit nothing more and wait until no run is open."""
        self._is_draining = True
        await self._empty.wait()
