"""The transaction coordinator: transactional ids, their epochs, and what each has open.

Opening an id again bumps its epoch and aborts what is open, so whoever held the old epoch is fenced at its next step.
A transaction that lasts longer than its time-out is aborted the same way.
"""

from collections.abc import Callable

from broker.transport.errors import Fenced
from broker.transport.memory.log import PartitionLog, Transaction
from broker.transport.protocol import Committed, Outgoing, TopicPartition

Cancel = Callable[[], None]
Later = Callable[[int, Callable[[], None]], Cancel]  # (milliseconds, what to do) -> how to call it off


class _Id:
    def __init__(self) -> None:
        self.epoch = -1
        self.open: Transaction | None = None
        self.cancel_timeout: Cancel | None = None


class Transactions:
    """All transactional ids of a cluster.

    Args:
        later: Sets a timer.
        timeout_ms: After which an open transaction is aborted.
        apply: Makes the offsets of a committed transaction those of their groups.
    """

    def __init__(self, later: Later, timeout_ms: int, apply: Callable[[str, TopicPartition, Committed], None]) -> None:
        self._later, self._timeout_ms, self._apply = later, timeout_ms, apply
        self._ids: dict[str, _Id] = {}

    def init(self, transactional_id: str) -> int:
        """Fence earlier holders of the id, settle what they left open and give the new epoch."""
        holder = self._ids.setdefault(transactional_id, _Id())
        self._close(holder, commit=False)
        holder.epoch += 1
        return holder.epoch

    def append(self, transactional_id: str, epoch: int, log: PartitionLog, records: list[Outgoing], now_ms: int) -> list[int]:
        """Write records inside the id's transaction, which begins with the first of them."""
        transaction = self._current(transactional_id, epoch)
        return [log.append(record, now_ms, transaction) for record in records]

    def add_offset(self, transactional_id: str, epoch: int, group: str, tp: TopicPartition, position: Committed) -> None:
        """Let the transaction commit a group's position."""
        self._current(transactional_id, epoch).offsets.append((group, tp, position))

    def commit(self, transactional_id: str, epoch: int) -> None:
        """End the id's transaction: records become visible and offsets apply, together."""
        self._current(transactional_id, epoch)
        self._close(self._ids[transactional_id], commit=True)

    def _current(self, transactional_id: str, epoch: int) -> Transaction:
        holder = self._ids[transactional_id]
        if holder.epoch != epoch:
            message = f"transactional id {transactional_id} was taken over: epoch {epoch} is not {holder.epoch}"
            raise Fenced(message)
        if holder.open is None:
            holder.open = Transaction()

            def time_out(transaction: Transaction = holder.open) -> None:
                if holder.open is transaction:
                    self._close(holder, commit=False)
                    holder.epoch += 1

            holder.cancel_timeout = self._later(self._timeout_ms, time_out)
        return holder.open

    def _close(self, holder: _Id, *, commit: bool) -> None:
        transaction, holder.open = holder.open, None
        if holder.cancel_timeout is not None:
            holder.cancel_timeout()
            holder.cancel_timeout = None
        if transaction is not None:
            if commit:
                for pending in transaction.offsets:
                    self._apply(*pending)
            transaction.end(commit=commit)
