"""Kafka in one process: partitions, groups, transactions and fencing under the loop's own time, with faults on demand."""

from broker.transport.memory.cluster import Hook, MemoryCluster, Step
from broker.transport.memory.transport import MemoryTransport

__all__ = ["Hook", "MemoryCluster", "MemoryTransport", "Step"]
