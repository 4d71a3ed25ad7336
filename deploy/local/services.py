"""A broker and Valkey alone, for whoever brings the rest: tests, benchmarks, trials.

with services(folder, broker="kafka") as parts:
    ... parts.kafka, parts.redis ...
    parts.kill_broker()
    parts.start_broker()
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from deploy.local import brokers, ready
from deploy.local.errors import NotReady
from deploy.local.ports import HOST, free_ports
from deploy.local.program import Program, Running
from schemas.config import Delivery

READY_S = 120.0


class Services:
    """A running broker and Valkey.

    Attributes:
        kafka: The broker's address, host:port.
        redis: Valkey's URL.
        delivery: What the broker can promise.
    """

    def __init__(self, home: Path, broker: Literal["kafka", "tansu"], settings: Mapping[str, str] | None = None) -> None:
        controller_port, broker_port, redis_port = free_ports(3)
        self.home = home
        self.kafka = f"{HOST}:{broker_port}"
        self.redis = f"redis://{HOST}:{redis_port}/0"
        self.delivery: Delivery = "exactly_once" if broker == "kafka" else "at_least_once"
        logs = home / "logs"
        self._valkey = brokers.valkey(home / "valkey", logs, redis_port)
        if broker == "kafka":
            self._others, self._broker = _split(brokers.kafka(home / "kafka", logs, controller_port, broker_port, settings))
        else:
            self._others, self._broker = [], brokers.tansu(logs, broker_port)
        self._running: dict[str, Running] = {}
        self._down: set[str] = set()  # on purpose

    def start(self) -> None:
        """Start everything, and wait until it answers."""
        for program in [*self._others, self._broker, self._valkey]:
            self._begin(program)
        self.wait_redis()
        self.wait_broker()

    def kill_broker(self) -> None:
        """Kill the broker (SIGKILL); Kafka's controller lives on, Tansu forgets everything."""
        self._end(self._broker, Running.kill)

    def stop_broker(self) -> None:
        """Stop the broker as one should."""
        self._end(self._broker, Running.stop)

    def start_broker(self, *, wait: bool = True) -> None:
        """Start the broker again, at its address and with its data."""
        self._begin(self._broker)
        if wait:
            self.wait_broker()

    def restart_broker(self) -> None:
        """Kill the broker and start it again; returns when it answers."""
        self.kill_broker()
        self.start_broker()

    def kill_redis(self) -> None:
        """Kill Valkey (SIGKILL): all it holds is gone."""
        self._end(self._valkey, Running.kill)

    def start_redis(self) -> None:
        """Start Valkey again, empty, at its address."""
        self._begin(self._valkey)
        self.wait_redis()

    def wait_broker(self, limit_s: float = READY_S) -> None:
        """Wait until the broker answers."""
        probe = ready.transactions_work if self.delivery == "exactly_once" else ready.kafka_answers
        ready.until(lambda: probe(self.kafka), limit_s, f"{self._broker.name} at {self.kafka}", self._check)

    def wait_redis(self, limit_s: float = READY_S) -> None:
        """Wait until Valkey answers."""
        ready.until(lambda: ready.redis_answers(self.redis), limit_s, f"Valkey at {self.redis}", self._check)

    def stop(self) -> None:
        """Stop everything: first all are asked, the last started first, then all are waited for."""
        running = list(reversed(self._running.values()))
        for one in running:
            if one.program not in self._others:
                one.stop()
        for one in running:
            one.stop()

    def _begin(self, program: Program) -> None:
        self._running[program.name] = Running(program)
        self._down.discard(program.name)

    def _end(self, program: Program, how: Callable[[Running], None]) -> None:
        self._down.add(program.name)  # before it is: somebody may be waiting for another part
        how(self._running[program.name])

    def _check(self) -> None:
        for one in self._running.values():
            if one.exit_code is not None and one.program.name not in self._down:
                message = f"{one.program.name} ended with status {one.exit_code}: see {one.program.log}"
                raise NotReady(message)


@contextmanager
def services(
    home: Path, broker: Literal["kafka", "tansu"] = "kafka", settings: Mapping[str, str] | None = None
) -> Iterator[Services]:
    """Run a broker and Valkey with their data in `home`, on free ports; `settings` are Kafka's, before our own.

    Raises:
        NotAvailable: A part cannot be had here.
        NotReady: A part does not answer.
    """
    parts = Services(home, broker, settings)
    try:
        parts.start()
        yield parts
    finally:
        parts.stop()


def _split(programs: list[Program]) -> tuple[list[Program], Program]:
    return programs[:-1], programs[-1]
