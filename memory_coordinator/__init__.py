"""What lives in Redis, which is advice and never truth: engine status, ids seen lately, and later GPU memory leases."""

from memory_coordinator.board import Board, MemoryBoard
from memory_coordinator.seen import MemorySeenLog, RedisSeenLog, SeenLog
from memory_coordinator.status import StatusBoard

__all__ = ["Board", "MemoryBoard", "MemorySeenLog", "RedisSeenLog", "SeenLog", "StatusBoard"]
