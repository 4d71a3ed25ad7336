"""What lives in Redis, which is advice and never truth: engine status now, GPU memory leases later."""

from memory_coordinator.board import Board, MemoryBoard
from memory_coordinator.status import StatusBoard

__all__ = ["Board", "MemoryBoard", "StatusBoard"]
