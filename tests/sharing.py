"""Engines in processes of their own that share one device, each kept busy, and what came of it by the turns that they took."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from trees import ROOT

from deploy.engines import engine_config, install
from engine_consumers.core.slices import Seat, Table
from schemas.config import EngineConfig, TimeSlicesConfig

LOOK_S = 0.005
STILL_S = 0.3  # without a token: it is idle
SLOTS = 2  # requests that each engine always has
OPTIONS = {
    "ssm": {"device": "cpu", "dtype": "float32", "max_context": 512, "threads": 1},
    "transformer": {"dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True},
}


class Moment(NamedTuple):
    """How far an engine had come.

    Attributes:
        turns: Of all engines of the device.
        tokens: That it made.
        used_ns: Of the device's time.
        at_ns: On the clock of the table.
    """

    turns: int
    tokens: int
    used_ns: int
    at_ns: int


class Sharing:
    """One engine that takes part.

    Args:
        kind: Of the engine.
        files: Where its own files go.
        name: Of these.
        slices: Its part; None: it has the device for itself.
    """

    def __init__(self, kind: str, files: Path, name: str, slices: TimeSlicesConfig | None) -> None:
        found = install(kind, "cpu", lambda _: None)
        installed = engine_config(kind, "cpu")
        assert installed is not None, "an engine that was just installed"
        config = EngineConfig(kind, model_path=found.model_path, slots=SLOTS, options=OPTIONS[kind], time_slices=slices)
        self._folder = Path(slices.folder) / slices.device if slices is not None and slices.folder else None
        self._count, self._log = files / f"{name}.count", files / f"{name}.log"
        self._process = subprocess.Popen(
            [found.python, ROOT / "tests/integration/sliced_engine.py", msgspec.json.encode(config).decode(), self._count],
            env={**os.environ, **installed.env, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
        )
        self.seat = ""

    def up(self) -> None:
        """Wait until it works."""
        assert self._process.stdout is not None
        line = b""
        for line in self._process.stdout:  # the log of vLLM goes there, too
            if line == b"up\n":
                break
        assert line == b"up\n", f"it ended with {self._process.wait()}: {self._log.read_text(errors='replace')[-3000:]}"

    def knows_seat(self, others: "list[Sharing]") -> None:
        """Find its seat: the one that is nobody else's."""
        taken = {other.seat for other in others}
        self.until(lambda: len(self.table().seats.keys() - taken) == 1)
        (self.seat,) = self.table().seats.keys() - taken

    @property
    def pid(self) -> int:
        """Of the process that uses the device."""
        return int(self.seat.partition("-")[0])

    @property
    def tokens(self) -> int:
        """That it made so far."""
        return int.from_bytes(self._count.read_bytes(), "little")

    @property
    def is_holder(self) -> bool:
        """Whether it is its turn."""
        return self.table().holder == self.seat

    def table(self) -> Table:
        """Give the device's table, as nobody is writing it."""
        assert self._folder is not None
        while True:
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode((self._folder / "table.json").read_bytes(), type=Table)

    def moment(self) -> Moment:
        """Give how far it has come."""
        table = self.table() if self._folder is not None else Table()
        return Moment(table.turns, self.tokens, table.seats.get(self.seat, Seat(1.0)).used_ns, time.monotonic_ns())

    def until(self, holds: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Wait for something that comes to pass while this engine works."""
        end = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < end, "it did not come to pass"
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK_S)
                message = f"it ended with {code}: {self._log.read_text(errors='replace')[-3000:]}"
                raise AssertionError(message)

    def pause(self) -> None:
        """Let it be idle, and wait until it is."""
        self._say("pause")
        made = -1
        while made != self.tokens:
            made, since = self.tokens, time.monotonic()
            self.until(lambda since=since: time.monotonic() > since + STILL_S)

    def go(self) -> None:
        """Let it work again, and wait until it does."""
        self._say("go")
        self.goes_on()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()

    def goes_on(self) -> None:
        """Wait until it has made some more tokens."""
        made = self.tokens
        self.until(lambda: self.tokens > made + 20)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process that uses the device."""
        os.kill(self.pid, number)

    def ended(self, limit_s: float = 60.0) -> int:
        """Wait for its end, and give its exit code."""
        return self._process.wait(limit_s)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def sharing(kinds: dict[str, str], files: Path, weights: dict[str, float], **slices: Any) -> Iterator[list[Sharing]]:
    """Start engines that share a device, name -> kind, one after another; give them once all work."""
    for kind in set(kinds.values()):  # a first install takes minutes, in which nobody need be busy
        install(kind, "cpu", lambda _: None)
    engines: list[Sharing] = []
    try:
        for name, kind in kinds.items():
            mine = TimeSlicesConfig("cpu", weights.get(name, 1.0), folder=str(files / "turns"), **slices)
            one = Sharing(kind, files, name, mine)
            engines.append(one)
            one.up()
            one.knows_seat(engines[:-1])
        yield engines
    finally:
        for one in engines:
            with contextlib.suppress(ProcessLookupError, ValueError):
                one.signal(signal.SIGCONT)
            one.close()


def over_time(engines: list[Sharing], seconds: float) -> list[Moment]:
    """Let time pass, and give what each engine made of it."""
    since = time.monotonic()
    return _between(engines, lambda: time.monotonic() >= since + seconds)


def over_turns(engines: list[Sharing], turns: int) -> list[Moment]:
    """Let so many turns pass, and give what each engine made of them."""
    since = engines[0].moment().turns
    return _between(engines, lambda: engines[0].table().turns >= since + turns)


def _between(engines: list[Sharing], ends: Callable[[], bool]) -> list[Moment]:
    before = [one.moment() for one in engines]
    engines[0].until(ends)
    after = [one.moment() for one in engines]
    return [Moment(*(b - a for a, b in zip(one, other, strict=True))) for one, other in zip(before, after, strict=True)]
