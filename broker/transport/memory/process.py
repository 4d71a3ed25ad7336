"""One process of ours as the cluster sees it: every call goes through here, where it can be delayed, failed or killed."""

import asyncio
from collections.abc import Callable
from typing import Literal, TypeVar

from broker.transport.errors import TransportError
from broker.transport.memory.cluster import MemoryCluster, Step

T = TypeVar("T")


class Process:
    """Name and fate of a process, and its way to the cluster."""

    def __init__(self, cluster: MemoryCluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.is_killed = False

    async def call(self, operation: str, subject: str, act: Callable[[], T], limit_ms: int | None = None) -> T:
        """Do one operation on the cluster, within the request time-out.

        Raises:
            TransportError: The cluster did not answer in time, or the process was killed.
        """
        limit_s = (limit_ms or self.cluster.config.request_timeout_ms) / 1000
        try:
            async with asyncio.timeout(limit_s):
                await self.step("before", operation, subject)
                await self.cluster.until_up()
                self.must_live()
                result = act()
                await self.step("after", operation, subject)
                self.must_live()
                return result
        except TimeoutError:
            message = f"{operation} on {subject}: no answer within {limit_s:g} s"
            raise TransportError(message) from None

    async def step(self, moment: Literal["before", "after"], operation: str, subject: str) -> None:
        """Let the hook act; others run first in any case, as they do while a request is on its way."""
        if moment == "before":
            await asyncio.sleep(0)
        if self.cluster.hook is not None:
            await self.cluster.hook(Step(moment, operation, self.name, subject))

    def must_live(self) -> None:
        """Refuse to act for a dead process.

        Raises:
            TransportError: The process was killed.
        """
        if self.is_killed:
            message = f"process {self.name} was killed"
            raise TransportError(message)
