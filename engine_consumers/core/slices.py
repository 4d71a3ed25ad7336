"""Who may use a device next, among engines that share it: start-time fair queueing over the time used.

Each engine has a clock that runs while it uses the device, the slower the greater its weight; of those that want the device,
the one whose clock shows least is next. One that comes, or comes back from idleness, starts at no less than the floor: what
the clock of the one that has the device showed when its turn began. So idle time saves nothing up, and while two both want the
device, the times they use, each divided by its weight, differ by no more than the longest turn of each divided by its weight
(Goyal, Vin and Cheng 1996).
"""

from collections.abc import Callable

from msgspec import Struct, field


class Seat(Struct):
    """One engine's process.

    Attributes:
        weight: Its share beside others.
        clock_ns: Time used, divided by its weight, and raised to the floor whenever it comes.
        used_ns: Time used.
        is_waiting: It wants the device and has not got it.
    """

    weight: float
    clock_ns: float = 0.0
    used_ns: int = 0
    is_waiting: bool = False


class Table(Struct):
    """All that share one device. Times are those of one clock that all of them read.

    Attributes:
        floor_ns: Where a clock starts.
        holder: Whose turn it is.
        since_ns: Until when the holder's time is booked: also its last sign of life.
        has_begun: The holder knows that it is its turn. Until one that waited has woken up nobody uses the device, and nobody's
            clock runs: on a busy host that is milliseconds, and would cost the one with the shorter turns the greater part.
        turns: How often the device went from one to another.
    """

    seats: dict[str, Seat] = field(default_factory=dict)
    floor_ns: float = 0.0
    holder: str | None = None
    since_ns: int = 0
    has_begun: bool = False
    turns: int = 0

    def ask(self, name: str, weight: float, now_ns: int) -> bool:
        """One wants the device; whether it has it now. It may ask again while it waits."""
        if self.holder == name:
            self._begin(now_ns)
            return True
        seat = self.seats.setdefault(name, Seat(weight))
        if not seat.is_waiting:
            seat.clock_ns = max(seat.clock_ns, self.floor_ns)
            seat.is_waiting = True
        if self.holder is None:
            self._next(now_ns)
        if self.holder != name:
            return False
        self._begin(now_ns)
        return True

    def boundary(self, name: str, now_ns: int) -> None:
        """One has used up its slice and would go on: book its time; where another is due, it waits for its next turn."""
        if self.holder != name:
            return  # it lost it meanwhile
        seat = self._book(name, now_ns)
        if any(other.is_waiting and other.clock_ns <= seat.clock_ns for other in self.seats.values()):
            self._next(now_ns)
            seat.is_waiting = True
        else:
            self.floor_ns = max(self.floor_ns, seat.clock_ns)

    def rest(self, name: str, now_ns: int) -> None:
        """One wants the device no more, or does not let go of it: the next one has it, where it was its turn."""
        if self.holder == name:
            self._book(name, now_ns)
            self._next(now_ns)
        elif name in self.seats:
            self.seats[name].is_waiting = False

    def leave(self, name: str, now_ns: int) -> None:
        """One is gone, dead or alive."""
        self.rest(name, now_ns)
        self.seats.pop(name, None)

    def pass_over_dead(self, is_alive: Callable[[str], bool], now_ns: int) -> None:
        """See that the device went to one that lives."""
        while self.holder is not None and not is_alive(self.holder):
            self.leave(self.holder, now_ns)

    def _begin(self, now_ns: int) -> None:
        if not self.has_begun:
            self.since_ns, self.has_begun = now_ns, True

    def _book(self, name: str, now_ns: int) -> Seat:
        seat = self.seats[name]
        used_ns = max(now_ns - self.since_ns, 0) if self.has_begun else 0
        seat.used_ns += used_ns
        seat.clock_ns += used_ns / seat.weight
        self.since_ns = now_ns
        return seat

    def _next(self, now_ns: int) -> None:
        waiting = {name: seat for name, seat in self.seats.items() if seat.is_waiting}
        self.holder = min(waiting, key=lambda name: (waiting[name].clock_ns, name), default=None)
        self.since_ns, self.has_begun = now_ns, False
        if self.holder is not None:
            seat = waiting[self.holder]
            seat.is_waiting = False
            self.floor_ns = max(self.floor_ns, seat.clock_ns)
            self.turns += 1
