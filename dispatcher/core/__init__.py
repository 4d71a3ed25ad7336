"""The dispatcher's mind: plain code without clock or I/O. Start reading in `machine.py`."""

from dispatcher.core.events import Arrived, Cancelled, Dropped, Effect, Event, Finish, Forward, Sent, StatusSeen, Tick
from dispatcher.core.item import Item
from dispatcher.core.machine import Dispatcher

__all__ = [
    "Arrived",
    "Cancelled",
    "Dispatcher",
    "Dropped",
    "Effect",
    "Event",
    "Finish",
    "Forward",
    "Item",
    "Sent",
    "StatusSeen",
    "Tick",
]
