"""Who may use a device next, among engines that share it: start-time fair queueing over what each used.

Each engine has a clock that runs with the time that it uses the device, or with the tokens that it computes on it, the slower
the greater its weight; of those that want the device,
the one whose clock shows least is next. One that comes, or comes back from idleness, starts at no less than the floor: what
the clock of the one that has the device showed when its turn began. So idle time saves nothing up, and while two both want the
device, what they use, each divided by its weight, differs by no more than the greatest turn of each divided by its weight (Goyal,
Vin and Cheng 1996).

Time is what unlike engines have in common. Engines of one model get unlike numbers of tokens out of equal times: a turn's first
steps find the processor's caches full of the others' data, which costs the one with the shorter turns the greater part.
"""

from collections.abc import Callable

from msgspec import Struct, field

from schemas.config import Share


class Seat(Struct):
    """One engine's process.

    Attributes:
        weight: Its share beside others.
        clock: What it used, divided by its weight, and raised to the floor whenever it comes.
        used_ns: Time used.
        used_tokens: Tokens computed in it.
        is_waiting: It wants the device and has not got it.
    """

    weight: float
    clock: float = 0.0
    used_ns: int = 0
    used_tokens: int = 0
    is_waiting: bool = False


class Table(Struct):
    """All that share one device. Times are those of one clock that all of them read.

    Attributes:
        share_of: What the clocks run with: nanoseconds, or tokens.
        floor: Where a clock starts.
        holder: Whose turn it is.
        since_ns: Until when the holder's time is booked: also its last sign of life.
        has_begun: The holder knows that it is its turn. Until one that waited has woken up nobody uses the device, and nobody's
            clock runs: on a busy host that is milliseconds, and would cost the one with the shorter turns the greater part.
        turns: How often the device went from one to another.
    """

    seats: dict[str, Seat] = field(default_factory=dict)
    share_of: Share = "time"
    floor: float = 0.0
    holder: str | None = None
    since_ns: int = 0
    has_begun: bool = False
    turns: int = 0

    def join(self, name: str, weight: float, share_of: Share) -> None:
        """One takes part, or does so already; the first says what is shared out."""
        if not self.seats:
            self.share_of, self.floor = share_of, 0.0
        self.seats.setdefault(name, Seat(weight))

    def ask(self, name: str, now_ns: int) -> bool:
        """One wants the device; whether it has it now. It may ask again while it waits."""
        if self.holder == name:
            self._begin(now_ns)
            return True
        seat = self.seats[name]
        if not seat.is_waiting:
            seat.clock = max(seat.clock, self.floor)
            seat.is_waiting = True
        if self.holder is None:
            self._next(now_ns)
        if self.holder != name:
            return False
        self._begin(now_ns)
        return True

    def boundary(self, name: str, now_ns: int, tokens: int = 0) -> None:
        """One has used up its slice and would go on: book what it used; where another is due, it waits for its next turn.

        Args:
            name: Of the one.
            now_ns: The time.
            tokens: That it computed since it was last booked.
        """
        if self.holder != name:
            return  # it lost it meanwhile
        seat = self._book(name, now_ns, tokens)
        if any(other.is_waiting and other.clock <= seat.clock for other in self.seats.values()):
            self._next(now_ns)
            seat.is_waiting = True
        else:
            self.floor = max(self.floor, seat.clock)

    def rest(self, name: str, now_ns: int, tokens: int = 0) -> None:
        """One wants the device no more, or does not let go of it: the next one has it, where it was its turn."""
        if self.holder == name:
            self._book(name, now_ns, tokens)
            self._next(now_ns)
        elif name in self.seats:
            self.seats[name].is_waiting = False

    def leave(self, name: str, now_ns: int, tokens: int = 0) -> None:
        """One is gone, dead or alive."""
        self.rest(name, now_ns, tokens)
        self.seats.pop(name, None)

    def pass_over_dead(self, is_alive: Callable[[str], bool], now_ns: int) -> None:
        """See that the device went to one that lives."""
        while self.holder is not None and not is_alive(self.holder):
            self.leave(self.holder, now_ns)

    def _begin(self, now_ns: int) -> None:
        if not self.has_begun:
            self.since_ns, self.has_begun = now_ns, True

    def _book(self, name: str, now_ns: int, tokens: int) -> Seat:
        seat = self.seats[name]
        used_ns = max(now_ns - self.since_ns, 0) if self.has_begun else 0
        seat.used_ns += used_ns
        seat.used_tokens += tokens
        seat.clock += (used_ns if self.share_of == "time" else tokens) / seat.weight
        self.since_ns = now_ns
        return seat

    def _next(self, now_ns: int) -> None:
        waiting = {name: seat for name, seat in self.seats.items() if seat.is_waiting}
        self.holder = min(waiting, key=lambda name: (waiting[name].clock, name), default=None)
        self.since_ns, self.has_begun = now_ns, False
        if self.holder is not None:
            seat = waiting[self.holder]
            seat.is_waiting = False
            self.floor = max(self.floor, seat.clock)
            self.turns += 1
