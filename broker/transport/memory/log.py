"""One partition's log, and the transactions that write to it.

As in Kafka, whatever is written takes an offset: records, those of aborted transactions, and the marker that ends a
transaction in each partition it wrote to. A reader sees what lies below the last stable offset, which is where the
oldest open transaction begins, and is spared markers and aborted records.
"""

import asyncio
from typing import Literal

from broker.transport.protocol import Committed, Outgoing, Record, TopicPartition

PendingOffset = tuple[str, TopicPartition, Committed]


class Transaction:
    """One transaction: where it wrote and which offsets it will commit."""

    def __init__(self) -> None:
        self.state: Literal["open", "committed", "aborted"] = "open"
        self.logs: list[PartitionLog] = []
        self.offsets: list[PendingOffset] = []

    def end(self, *, commit: bool) -> None:
        """Decide it; a marker is written to every partition it wrote to."""
        self.state = "committed" if commit else "aborted"
        for log in self.logs:
            log.mark(self)


class PartitionLog:
    """The records of one partition, from `first` to `end`."""

    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.first = 0
        self._entries: list[tuple[Record | None, Transaction | None]] = []  # one per offset; a marker holds no record
        self._open: dict[Transaction, int] = {}  # -> its first offset here
        self._waiting: dict[asyncio.Future[None], None] = {}  # a set's order would differ from run to run

    @property
    def end(self) -> int:
        """Next offset to be written."""
        return self.first + len(self._entries)

    @property
    def stable(self) -> int:
        """Last stable offset: what lies below is decided."""
        return min(self._open.values(), default=self.end)

    def append(self, record: Outgoing, timestamp_ms: int, transaction: Transaction | None) -> int:
        """Write a record and give its offset."""
        offset = self.end
        if transaction is not None and transaction not in self._open:
            self._open[transaction] = offset
            transaction.logs.append(self)
        stored = Record(*self.tp, offset, record.key, record.value, tuple(record.headers), timestamp_ms)
        self._entries.append((stored, transaction))
        if transaction is None:
            self.wake()
        return offset

    def mark(self, transaction: Transaction) -> None:
        """Write the marker that ends a transaction here."""
        del self._open[transaction]
        self._entries.append((None, None))
        self.wake()

    def read(self, position: int, records_max: int, bytes_max: int | None = None) -> tuple[list[Record], int]:
        """Read committed records from a position on: at most so many, and one or else so many bytes.

        Returns:
            The records, and the position behind them and behind whatever was skipped.
        """
        records: list[Record] = []
        size, stable = 0, self.stable
        while position < stable and len(records) < records_max:
            record, transaction = self._entries[position - self.first]
            size += 0 if record is None else len(record.value or b"")
            if records and bytes_max is not None and size > bytes_max:
                break
            position += 1
            if record is not None and (transaction is None or transaction.state == "committed"):
                records.append(record)
        return records, position

    def trim(self, before: int) -> None:
        """Delete what lies below an offset."""
        if before > self.first:
            del self._entries[: before - self.first]
            self.first = before

    def expire(self, older_than_ms: int) -> None:
        """Delete decided records from the front that are older than the given time."""
        before, stable = self.first, self.stable
        while before < stable:
            record = self._entries[before - self.first][0]
            if record is not None and record.timestamp_ms >= older_than_ms:
                break
            before += 1
        self.trim(before)

    def call_when_written(self, waiter: asyncio.Future[None]) -> None:
        """End the future when there is something new to read."""
        self._waiting[waiter] = None

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Take a future back."""
        self._waiting.pop(waiter, None)

    def wake(self) -> None:
        """Wake whoever waits for records."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
