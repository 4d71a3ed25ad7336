"""Bugs to be planted, each one that somebody might really write; the simulation has to find them."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

from broker.assembly import Assembly
from broker.transport.errors import Fenced, NoSuchTopic, TooLarge, TransportError
from broker.transport.ledger import NOBODY, Ledger
from broker.transport.memory.writing import MemoryOutbox
from broker.transport.protocol import Committed
from dispatcher.core import Dispatcher
from dispatcher.rescue import Rescue
from engine_consumers.worker import Worker
from schemas.messages import run_id

REFUSED = (Fenced, NoSuchTopic, TooLarge)  # these are no unknown outcome
PLANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {}

commit, write = MemoryOutbox.commit, MemoryOutbox._write


def plant(make: Callable[[], AbstractContextManager[object]]) -> Callable[[], AbstractContextManager[object]]:
    """Make a bug known by its function's name."""
    PLANTS[make.__name__] = make
    return make


@plant
def the_position_is_committed_and_not_the_low_watermark():
    return patch.object(Ledger, "snapshot", lambda self, **_: Committed(max(self.position, self.horizon), ""))


@plant
def what_was_finished_above_the_watermark_is_forgotten():
    return patch("broker.transport.ledger._decode", lambda low, _: (low, NOBODY, {}))


@plant
def a_takeover_fences_nobody():
    async def open_as_it_is(self):
        holder = self._cluster.transactions._ids.get(self._id)
        if holder is None:
            self._epoch = await self._process.call("init", self._id, lambda: self._cluster.transactions.init(self._id))
        else:
            self._epoch = holder.epoch

    return patch.object(MemoryOutbox, "open", open_as_it_is)


@plant
def a_commit_of_unknown_outcome_is_taken_for_failed():
    async def commit_again(self, records, position):
        try:
            return await commit(self, records, position)
        except REFUSED:
            raise
        except TransportError:
            await self.open()
            return await commit(self, records, position)

    return patch.object(MemoryOutbox, "commit", commit_again)


@plant
def a_commit_of_unknown_outcome_is_taken_for_done():
    async def believe(self, records, position):
        epoch = self._epoch
        try:
            return await commit(self, records, position)
        except REFUSED:
            raise
        except TransportError:
            self._epoch = epoch
            return [(0, 0)] * len(records)

    return patch.object(MemoryOutbox, "commit", believe)


@plant
def results_are_written_outside_of_the_transaction():
    async def write_plainly(self, epoch, records, routed):
        self._transactional = False
        try:
            return await write(self, epoch, records, routed)
        finally:
            self._transactional = True

    return patch.object(MemoryOutbox, "_write", write_plainly)


@plant
def the_name_of_a_run_does_not_grow_with_takeovers():
    return patch("engine_consumers.worker.run_id", lambda hop, _: run_id(hop, 0))


@plant
def work_begins_before_it_stands_in_the_ledger():
    return patch.object(Worker, "claim", lambda *_: None)


@plant
def a_run_draws_its_own_seed():
    seeds = iter(range(1 << 30))
    return patch("engine_consumers.worker.ids.derived_seed", lambda _: next(seeds))


@plant
def a_reader_takes_every_chunk_of_every_run():
    return patch.object(Assembly, "chunk", lambda self, chunk: [self._give(chunk)])


@plant
def a_run_that_gives_nothing_is_waited_for():
    return patch.object(Worker, "_watch_runs", lambda _: asyncio.sleep(1e6))


@plant
def nobody_reads_the_lanes():
    return patch.object(Dispatcher, "takes", lambda *_: False)


@plant
def a_pool_without_workers_is_left_to_itself():
    return patch.object(Rescue, "run", lambda _: asyncio.sleep(1e6))
