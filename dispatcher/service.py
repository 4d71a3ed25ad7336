"""The dispatcher process: stands by, is elected, serves a term, stands by again.

Whoever owns the one partition of the control topic in the group of dispatchers is active. Two that both believe so
are harmless: each input partition's outbox fences the older one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from broker.transport.errors import TransportError
from broker.transport.protocol import Consumer, Membership, TopicPartition, Transport
from broker.transport.tasks import end
from dispatcher.active import Active
from dispatcher.plugins import ready_plugins
from memory_coordinator.asking import Asking
from memory_coordinator.board import Board
from memory_coordinator.seen import SeenLog
from schemas.clock import now_ms
from schemas.config import Config
from schemas.questions import Answer, Question
from schemas.topics import Topics

log = logging.getLogger("forebay.dispatcher")

POLL_MS = 500
PAUSE_S = 0.5


class DispatcherService:
    """Runs one dispatcher process.

    Args:
        config: The configuration.
        transport: The cluster.
        board: Where workers publish their status.
        name: Client id in the election.
        clock: Unix time in milliseconds.
        seen_log: Where a term leaves the requests seen lately for the next one; None: nowhere.
        asking: Over which it is asked what it has in hand; None: nobody asks.

    Raises:
        ConfigError: A plugin of routing cannot be loaded, or is not known.
    """

    def __init__(
        self,
        config: Config,
        transport: Transport,
        board: Board,
        name: str,
        *,
        clock: Callable[[], int] = now_ms,
        seen_log: SeenLog | None = None,
        asking: Asking | None = None,
    ) -> None:
        ready_plugins(config.routing)
        self._config, self._transport, self._board, self._name = config, transport, board, name
        self._clock, self._seen_log, self._asking = clock, seen_log, asking
        self._topics = Topics(config.kafka.topic_prefix)
        self._elected = asyncio.Event()
        self._stopping = asyncio.Event()
        self._control: Consumer | None = None
        self._active: Active | None = None
        self._term: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Leave in good order; `run` then returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Stand for election and serve until `stop`.

        Raises:
            TransportError: When a term ends for a reason that waiting does not mend.
        """
        self._control = await self._transport.subscribe([self._topics.control], self._topics.election_group, self, self._name)
        works = [self._watch()] if self._asking is None else [self._watch(), self._asking.answer(self._answer)]
        background = [asyncio.ensure_future(work) for work in works]
        try:
            while not self._stopping.is_set():
                await self._poll_control()
                await self._serve_or_stand_by()
        finally:
            await end(*background)
            try:
                await self._end_term()
            finally:
                await self._control.close()

    # -- the election's listener -----------------------------------------------------------------------------------

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        """Go on until somebody else is known to be elected: a rebalance alone ends no term."""

    def assigned(self, partitions: Sequence[TopicPartition], membership: Membership) -> None:
        """Elected, or not."""
        log.info("election name=%s generation=%d active=%s", self._name, membership.generation, bool(partitions))
        if partitions:
            self._elected.set()
        else:
            self._elected.clear()

    # -- terms ------------------------------------------------------------------------------------------------------------

    async def _poll_control(self) -> None:
        control = self._require_control()
        try:
            await control.poll([], 1, POLL_MS)
        except TransportError as error:
            log.warning("control_poll_failed error=%s", error)
            await asyncio.sleep(PAUSE_S)

    async def _serve_or_stand_by(self) -> None:
        if self._term is not None and self._term.done():
            term, self._term, self._active = self._term, None, None
            term.result()  # a term that ended by itself ended by a failure
        if self._elected.is_set() and self._term is None:
            log.info("term_begins name=%s", self._name)
            self._active = Active(self._config, self._transport, self._still_leader, self._clock, self._seen_log)
            self._term = asyncio.ensure_future(self._active.run())
        elif not self._elected.is_set() and self._term is not None:
            await self._end_term()

    async def _end_term(self) -> None:
        if self._active is not None and self._term is not None:
            log.info("term_ends name=%s", self._name)
            self._active.stop()
            term, self._term, self._active = self._term, None, None
            await term

    async def _still_leader(self) -> bool:
        return self._elected.is_set() and await self._require_control().still_member()

    def _require_control(self) -> Consumer:
        if self._control is None:
            message = "the service does not run"
            raise RuntimeError(message)
        return self._control

    # -- questions ----------------------------------------------------------------------------------------------------

    def _answer(self, question: Question) -> Answer:
        return Answer(self._name, "standby") if self._active is None else self._active.answer(question, self._name)

    # -- status -------------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Pass the workers' snapshots on, also while standing by, so that a term begins with fresh knowledge."""
        while True:
            try:
                async for status in self._board.watch(self._config.dispatcher.status_poll_ms):
                    if self._active is not None:
                        self._active.seen(status)
            except (RedisError, OSError) as error:
                log.warning("status_unreadable error=%r", error)
                await asyncio.sleep(PAUSE_S)
