"""What lives in Redis, which is advice and never truth: engine status, questions, ids seen lately, later GPU memory leases."""

from memory_coordinator.asking import Asking, MemoryAsking, RedisAsking
from memory_coordinator.board import Board, MemoryBoard
from memory_coordinator.seen import MemorySeenLog, RedisSeenLog, SeenLog
from memory_coordinator.status import StatusBoard

__all__ = [
    "Asking",
    "Board",
    "MemoryAsking",
    "MemoryBoard",
    "MemorySeenLog",
    "RedisAsking",
    "RedisSeenLog",
    "SeenLog",
    "StatusBoard",
]
