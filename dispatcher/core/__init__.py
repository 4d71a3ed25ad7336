"""The dispatcher's mind: plain code without clock or I/O. Start reading in `machine.py`."""

from dispatcher.core.events import (
    Arrived,
    Cancelled,
    Divert,
    Dropped,
    Effect,
    Event,
    Finish,
    Forward,
    LaneRead,
    LaneSeen,
    Sent,
    StatusSeen,
    Steered,
    Tick,
)
from dispatcher.core.item import Item
from dispatcher.core.machine import Dispatcher

__all__ = [
    "Arrived",
    "Cancelled",
    "Dispatcher",
    "Divert",
    "Dropped",
    "Effect",
    "Event",
    "Finish",
    "Forward",
    "Item",
    "LaneRead",
    "LaneSeen",
    "Sent",
    "StatusSeen",
    "Steered",
    "Tick",
]
