"""One input partition of a hop: its outbox, its ledger, its work in hand, and the one recovery path.

Assignment, return after a rebalance, fencing and a commit of unknown outcome all go the same way:

    ask the group whether the partition is still ours
    -> open a new outbox (fences every older one and settles what it left open)
    -> read the committed offset and ledger -> seek
    -> keep work that runs and is not finished, emit again what was not committed, drop the rest
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from broker.transport.errors import Fenced, NoSuchTopic, OffsetGone, TooLarge, TransportError
from broker.transport.handler import Handler, Place
from broker.transport.ledger import NOBODY, Inherited, Ledger
from broker.transport.protocol import Committed, Consumer, Membership, Outbox, Outgoing, Record, TopicPartition, Transport
from schemas.config import HopConfig

log = logging.getLogger("forebay.hop")

RETRY_S = 0.1
ASK_S = 5.0
LAST_COMMIT_S = 5.0
CLOSE_S = 10.0


class Owner(Protocol):
    """The hop, as its partitions see it."""

    transport: Transport
    group: str
    handler: Handler
    config: HopConfig
    held_bytes: int
    owner: int

    @property
    def consumer(self) -> Consumer:
        """Reads all partitions of the hop."""

    async def still_owner(self) -> bool:
        """Ask whoever knows whether our partitions are still ours."""

    async def is_alive(self, owner: int) -> bool:
        """Whether a member of the group has this tag; also where nobody can tell."""

    def freed(self) -> None:
        """A record was let go, so there may be room."""

    def pump(self) -> None:
        """Admit what was read ahead."""

    def fail(self, error: Exception) -> None:
        """Stop with an alarm: going on would lose records."""


class Part:
    """Owns one partition from its assignment until it is lost."""

    def __init__(self, hop: Owner, tp: TopicPartition) -> None:
        self._hop, self._tp = hop, tp
        self._ledger: Ledger | None = None
        self._outbox: Outbox | None = None
        self._ahead: deque[Record] = deque()  # read, not yet in the ledger
        self._claims: dict[int, tuple[Record, Inherited]] = {}  # in the ledger, to be started once that is committed
        self._claiming: dict[int, tuple[Record, Inherited]] = {}  # those in the commit that is under way
        self._notes: dict[int, int] = {}  # of work that runs, not committed yet
        self._takeovers: dict[int, int] = {}  # of work in hand, where there were any
        self._running: dict[int, int] = {}  # offset -> bytes held
        self._ready: dict[int, tuple[int, list[Outgoing]]] = {}  # offset -> bytes held, outputs; finished, not committed
        self._membership: Membership | None = None
        self._lost = self._retake = self._doubted = False
        self._kept_top = -1
        self.read_to: int | None = None  # as of the last poll: below it everything was offered, or nobody gets it
        self._wake = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    # -- what the hop asks -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the takeover is over, so that records may come."""
        return self._ledger is not None and not (self._lost or self._retake)

    @property
    def wants_records(self) -> bool:
        """Whether another poll should ask for this partition."""
        return self.is_open and not self._ahead and (self._hop.handler.takes(self._tp) or self.is_catching_up)

    @property
    def is_busy(self) -> bool:
        """Whether work runs or waits to be committed."""
        return bool(self._running or self._ready)

    @property
    def is_catching_up(self) -> bool:
        """Whether work kept over a takeover has not been read again yet: it cannot be committed before."""
        return self._ledger is not None and self._ledger.position <= self._kept_top

    @property
    def admitted(self) -> int:
        """Next offset to be admitted; 0 before the takeover is over."""
        return self._ledger.position if self._ledger else 0

    @property
    def in_work(self) -> int:
        """Records in hand, but for those read ahead."""
        return len(self._claims) + len(self._claiming) + len(self._running) + len(self._ready)

    @property
    def used(self) -> int:
        """Records in hand."""
        return len(self._ahead) + self.in_work

    def assigned(self, membership: Membership) -> None:
        """The partition is ours in this generation; start over unless nobody can have come between."""
        before, self._membership = self._membership, membership
        if before is None or self._retake:
            pass  # the takeover is under way
        elif membership != Membership(before.member, before.generation + 1) or not self._seek():
            self._retake = True
        self._wake.set()

    def lose(self) -> None:
        """The partition is not ours any more, or we stop."""
        self._lost = True
        self._wake.set()

    def doubt(self) -> None:
        """What lay at our position is gone: the recovery path tells whether it is lost, or was somebody else's to finish."""
        self._ledger, self._doubted = None, True
        self._wake.set()

    async def ended(self) -> None:
        """Wait until nothing of it is left."""
        await self._task

    def offer(self, record: Record) -> None:
        """Take a record that was read."""
        if self.is_open:
            self._ahead.append(record)

    def admit(self) -> bool:
        """Move records from read-ahead into the ledger and to work; False where nothing moved."""
        ledger, moved = self._ledger, False
        if ledger is None or self._lost or self._retake:
            return False
        hop, ahead, running, ready = self._hop, self._ahead, self._running, self._ready
        claim, takes, unfinished_max = hop.handler.claim, hop.handler.takes, hop.config.unfinished_max
        while ahead:
            record = ahead[0]
            offset = record.offset
            if (
                len(running) + len(self._claims) + len(self._claiming) >= unfinished_max  # the commit's metadata can name no more
                and offset >= ledger.horizon  # what it names already it always may
                and offset not in running
                and offset not in ready
            ):
                break
            if not (takes(self._tp) or self.is_catching_up):
                break
            ahead.popleft()
            moved = True
            inherited = ledger.admit(offset)
            if inherited is None or self._is_kept(offset, inherited):
                continue
            hop.held_bytes += _bytes_of(record)
            if (note := claim(record, inherited)) is not None:
                ledger.note(offset, note)
                self._claims[offset] = record, inherited
                self._wake.set()
            else:
                self._begin(record, inherited)
        return moved

    def _begin(self, record: Record, inherited: Inherited) -> None:
        self._running[record.offset] = _bytes_of(record)
        if inherited.takeovers:
            self._takeovers[record.offset] = inherited.takeovers
        self._hop.handler.start(record, inherited)

    def _is_kept(self, offset: int, inherited: Inherited) -> bool:
        """Whether a record that was read again is in work here and may go on; not where somebody else began it since."""
        if self._ledger is None or not (offset in self._running or offset in self._ready):
            return False
        takeovers = self._takeovers.get(offset, 0)
        if inherited.takeovers > takeovers + 1:
            self._drop(offset)
            return False
        self._ledger.keep(offset, takeovers)
        if offset in self._notes:
            self._write_note(offset, self._notes[offset])
        self._wake.set()
        return True

    def _drop(self, offset: int) -> None:
        """Forget a record in hand: somebody else ended it, or has begun it anew."""
        held = self._running.pop(offset) if offset in self._running else self._ready.pop(offset)[0]
        self._hop.held_bytes -= held
        self._notes.pop(offset, None)
        self._takeovers.pop(offset, None)
        self._hop.handler.drop((self._tp, offset))

    def finish(self, offset: int, outputs: Sequence[Outgoing]) -> None:
        """A record's work is over; its outputs hold their place until they are committed."""
        held = self._running.pop(offset, None)
        if held is None:
            return  # dropped meanwhile
        self._notes.pop(offset, None)
        self._ready[offset] = held, list(outputs)
        self._wake.set()

    def note(self, offset: int, note: int) -> None:
        """Write a note beside a record that is in work; the handler is told once it is durable."""
        if offset in self._running:
            self._notes[offset] = note
            self._write_note(offset, note)

    def _write_note(self, offset: int, note: int) -> None:
        if self._ledger is not None and self._ledger.is_open(offset):  # else once it was read again
            self._ledger.note(offset, note)
            self._wake.set()

    # -- its task ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._lost:
            try:
                await self._take_over()
                await self._commit_until_interrupted()
            except OffsetGone as error:
                log.critical("offset_gone topic=%s partition=%d error=%s", *self._tp, error)
                self._hop.fail(error)
                break
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("partition_fault topic=%s partition=%d error=%r", *self._tp, error)
                await self._after_fault(error)
            except Exception as error:  # a fault of ours: stop aloud rather than go on with half a state
                log.exception("partition_broken topic=%s partition=%d", *self._tp)
                self._hop.fail(error)
                break
            await self._drop_outbox()
        await self._drop_outbox()
        self._abandon()

    async def _commit_until_interrupted(self) -> None:
        while not (self._lost or self._retake):
            idle = not await self._woken()
            self._wake.clear()
            if self._doubted:
                message = f"{self._tp.topic}/{self._tp.partition}: nothing lies at the position read next any more"
                raise TransportError(message)
            if idle:
                await self._commit(self._hop.config.commit_timeout_ms / 1000, again=True)
            while not (self._lost or self._retake) and await self._commit(self._hop.config.commit_timeout_ms / 1000):
                pass
        if self._lost and not self._retake:
            self._forget_unstarted()
            while await self._commit(LAST_COMMIT_S, let_go=True) and self._committable():
                pass  # harmless where somebody took over: it is fenced

    async def _woken(self) -> bool:
        """Wait for something to do; False when nothing came for so long that the group might forget our position."""
        try:
            async with asyncio.timeout(self._hop.config.recommit_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    async def _after_fault(self, error: Exception) -> None:
        """Before a new outbox fences anybody, make sure that the partition is still ours."""
        self._ledger = None
        if not isinstance(error, Fenced):
            await asyncio.sleep(RETRY_S)
        while not self._lost:
            try:
                async with asyncio.timeout(ASK_S):
                    if await self._hop.still_owner():
                        return
            except (TransportError, TimeoutError, OSError) as reason:
                log.warning("ownership_unknown topic=%s partition=%d error=%r", *self._tp, reason)
            await asyncio.sleep(RETRY_S)

    async def _take_over(self) -> None:
        """Fence, settle, read offset and ledger, seek; keep what is still ours to finish."""
        self._ledger, self._retake, self._doubted = None, False, False
        self._forget_unstarted()
        hop, limit_s = self._hop, self._hop.config.commit_timeout_ms / 1000
        self._outbox = hop.transport.outbox(hop.group, self._tp, hop.consumer)
        async with asyncio.timeout(limit_s):
            await self._outbox.open()
        committed, first = await self._committed_position(limit_s)
        if self._lost or self._retake:
            return
        ledger = Ledger(committed, first, hop.owner)
        if ledger.claimer not in {NOBODY, hop.owner}:
            ledger.crashed = not await hop.is_alive(ledger.claimer)
            if self._lost or self._retake:
                return
        for offset in [o for o in self._ready if ledger.is_finished(o)]:
            hop.held_bytes -= self._ready.pop(offset)[0]
            self._takeovers.pop(offset, None)
            hop.handler.committed((self._tp, offset), ())  # the answer was lost, not the commit
        for offset in [o for o in self._running if ledger.is_finished(o)]:
            self._drop(offset)
        self._kept_top = max([*self._ready, *self._running], default=-1)
        log.info(
            "taken_over topic=%s partition=%d offset=%d unfinished=%d kept=%d",
            *self._tp,
            ledger.position,
            ledger.unfinished,
            len(self._ready) + len(self._running),
        )
        self._ledger = ledger
        self._seek()
        self._wake.set()
        hop.freed()
        hop.handler.moved()

    async def _committed_position(self, limit_s: float) -> tuple[Committed | None, int]:
        """Read the committed position and the first offset there is.

        Finished records are deleted below what is committed. So an offset outside of the partition is read once more:
        whoever took over while we looked has committed a later one.

        Raises:
            OffsetGone: What was committed lies outside, and stays so.
        """
        consumer, before = self._hop.consumer, None
        while True:
            async with asyncio.timeout(limit_s):
                committed = await consumer.committed(self._tp)
            async with asyncio.timeout(limit_s):
                first, end = (await consumer.bounds([self._tp]))[self._tp]
            if committed is None and first > 0:
                log.critical("position_missing topic=%s partition=%d action=begin_at_first first=%d", *self._tp, first)
            if committed is None or first <= committed.offset <= max(end, first):
                return committed, first
            if committed == before:
                message = (
                    f"{self._tp.topic}/{self._tp.partition}: committed offset {committed.offset} is outside of "
                    f"{first}..{end}: records were deleted before they were served"
                )
                raise OffsetGone(message)
            before = committed

    async def _commit(self, limit_s: float, *, let_go: bool = False, again: bool = False) -> bool:
        """Commit whatever is finished, with the claims and notes that wait; False where there is nothing to commit."""
        ledger, outbox, hop = self._ledger, self._outbox, self._hop
        if ledger is None or outbox is None:
            return False
        batch, claims = self._committable(), self._claims
        notes = {offset: note for offset, note in self._notes.items() if ledger.is_open(offset)}
        if not (batch or claims or notes or again or (let_go and ledger.holds)):
            return False
        for offset in batch:
            ledger.finish(offset)  # if this commit fails the ledger is read anew, so nothing is undone here
        outputs = [record for _, records in batch.values() for record in records]
        self._claims, self._claiming = {}, claims
        started = False
        try:
            async with asyncio.timeout(limit_s):
                places = await outbox.commit(outputs, ledger.snapshot(let_go=let_go))
            started = True
        except (NoSuchTopic, TooLarge) as error:
            self._leave_out(outputs[error.index] if error.index is not None else None, error)
            raise
        finally:
            self._claiming = {}
            if not started:
                for record, _ in claims.values():
                    hop.held_bytes -= _bytes_of(record)
        self._committed(batch, claims, notes, places)
        hop.pump()
        hop.freed()
        return True

    def _committed(
        self,
        batch: Mapping[int, tuple[int, list[Outgoing]]],
        claims: Mapping[int, tuple[Record, Inherited]],
        notes: Mapping[int, int],
        places: Sequence[Place],
    ) -> None:
        """What was to be durable is: tell the handler, and begin what was claimed."""
        hop, at = self._hop, 0
        for offset, (held, records) in batch.items():
            del self._ready[offset]
            self._takeovers.pop(offset, None)
            hop.held_bytes -= held
            hop.handler.committed((self._tp, offset), places[at : at + len(records)])
            at += len(records)
        for record, inherited in claims.values():
            self._begin(record, inherited)
        for offset, note in notes.items():
            if self._notes.get(offset) == note:  # it neither ended nor was noted anew meanwhile
                del self._notes[offset]
                hop.handler.noted((self._tp, offset))

    def _committable(self) -> dict[int, tuple[int, list[Outgoing]]]:
        """What is finished and in the ledger: work kept over a takeover has to be read again first."""
        position = self.admitted
        return {offset: done for offset, done in self._ready.items() if offset < position}

    def _leave_out(self, output: Outgoing | None, error: TransportError) -> None:
        """Nothing was sent. Without an output that may be left out there is no way forward: that is an alarm."""
        if output is None or not output.optional:
            self._hop.fail(error)
            return
        log.warning("output_left_out topic=%s error=%s", output.topic, error)
        for offset, (held, records) in self._ready.items():
            self._ready[offset] = held, [record for record in records if record is not output]

    def _seek(self) -> bool:
        """Go on reading behind what is in hand."""
        self.read_to = None
        if self._ledger is None:
            return True
        return self._hop.consumer.seek(self._tp, self._ahead[-1].offset + 1 if self._ahead else self._ledger.position)

    def _forget_unstarted(self) -> None:
        """Whatever was read and not started is read again."""
        self._hop.held_bytes -= sum(_bytes_of(r) for r, _ in self._claims.values())
        self._ahead.clear()
        self._claims = {}

    def _abandon(self) -> None:
        """Drop all work in hand: the partition's next owner does it anew."""
        self._ledger = None
        self._forget_unstarted()
        for offset in [*self._running, *self._ready]:
            self._drop(offset)
        self._hop.freed()

    async def _drop_outbox(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await outbox.close()
            except (TransportError, TimeoutError, OSError) as error:
                log.warning("outbox_close_failed topic=%s partition=%d error=%r", *self._tp, error)


def _bytes_of(record: Record) -> int:
    return len(record.value or b"")
