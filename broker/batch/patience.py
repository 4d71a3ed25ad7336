"""How long a cluster is borne that gives nothing but errors, and for how long it has done so."""

import asyncio
import logging

from broker.batch.errors import Stalled
from broker.transport.errors import TransportError

log = logging.getLogger("forebay.batch")

RETRY_S = 1.0
FORGET_S = 180.0  # an error so long ago has nothing to do with the next one


class Patience:
    """One kind of call on the cluster: since when it fails. Lives on one event loop.

    Args:
        limit_s: How long it may fail without a success.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._failed_at = 0.0
        self._error: TransportError | None = None

    @property
    def failing_s(self) -> float:
        """For how many seconds it has failed; 0 where it is well."""
        now_s = asyncio.get_running_loop().time()
        if self._since is None or now_s - self._failed_at > FORGET_S:
            return 0.0
        return now_s - self._since

    def well(self) -> None:
        """Something went well."""
        self._since = None

    def failed(self, error: TransportError, since_s: float | None = None) -> None:
        """Something did not.

        Args:
            error: What.
            since_s: The loop's time of the last success, where that is known; else the trouble begins now.
        """
        log.warning("batch_retry error=%s", error)
        now_s = asyncio.get_running_loop().time()
        if self.failing_s == 0.0:
            self._since = now_s if since_s is None else since_s
        self._failed_at, self._error = now_s, error

    def check(self) -> None:
        """Give up where it has failed for too long.

        Raises:
            Stalled: It has.
        """
        if self.failing_s > self._limit_s:
            message = (
                f"gave up after {self._limit_s:g} s of errors: {self._error}; "
                "what was reached is kept: the same command goes on from there"
            )
            raise Stalled(message) from self._error

    async def bear(self, error: TransportError, since_s: float | None = None) -> None:
        """Wait a little after a failure, or give up; arguments as for `failed`, error as for `check`."""
        self.failed(error, since_s)
        self.check()
        await asyncio.sleep(RETRY_S)
