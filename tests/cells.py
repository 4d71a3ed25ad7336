"""A cell of real processes on real services.

Each process stands behind a guard of the local stack, so it ends with whoever started it; its output goes to
`HOME/logs/NAME.log`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import raw
from aiokafka.structs import ConsumerRecord
from trees import ROOT

from broker.transport.kafka import KafkaTransport
from broker.transport.protocol import TopicPartition
from deploy.local import ready
from deploy.local.program import Program, Running
from memory_coordinator import StatusBoard
from schemas import EngineStatus, Topics, parse_config

CLI = (sys.executable, "-m", "deploy.cli")
GRACE_S = 30.0  # a worker's drain, and some
LOOK_S = 0.05


class Cell:
    """The configuration of one cell, its topics, and its processes by name."""

    def __init__(self, home: Path, tables: dict[str, Any]) -> None:
        self.home, self.config = home, parse_config(tables)
        self.bootstrap = self.config.kafka.bootstrap
        self.topics = Topics(self.config.kafka.topic_prefix)
        self.processes: dict[str, Running] = {}
        home.mkdir(parents=True, exist_ok=True)
        self.path = home / "forebay.toml"
        self.path.write_text(toml(tables), encoding="utf-8")

    def __enter__(self) -> Self:
        """Make the topics."""
        ready.run_apart(self._ensure_topics())
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self.stop()

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str, *arguments: str, entry: Sequence[str] = CLI) -> Running:
        """Run a command of ours under that name."""
        argv = [*entry, *arguments, "--config", str(self.path)]
        program = Program(name, argv, str(self.home / "logs" / f"{name}.log"), grace_s=GRACE_S, cwd=str(ROOT))
        self.processes[name] = Running(program)
        return self.processes[name]

    def dispatcher(self, name: str, **more: Any) -> Running:
        return self.start(name, "dispatch", "--name", name, **more)

    def worker(self, name: str, engine: str = "sim", **more: Any) -> Running:
        return self.start(name, "work", "--engine", engine, "--name", name, **more)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process, where it lives."""
        one = self.processes[name]
        if one.exit_code is None:
            os.kill(one.pid, number)

    def log_of(self, name: str) -> str:
        """What a process has said so far."""
        path = self.home / "logs" / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def stop(self, *names: str) -> None:
        """Wake what is stopped, and end these processes, or all, in good order."""
        chosen = names or tuple(self.processes)
        for name in chosen:
            self.signal(name, signal.SIGCONT)
            self.processes[name].end()
        for name in chosen:
            self.processes[name].stop()

    def members(self, engine: str = "sim") -> dict[str, tuple[TopicPartition, ...]]:
        """Which worker owns which partitions of an engine's topic, as the group says."""
        owned: dict[str, tuple[TopicPartition, ...]] = {}
        for client, tps in ready.run_apart(self._members(self.config.pool(engine))).items():
            worker = client.partition("@")[0]  # behind it stands which life of it
            owned[worker] = owned.get(worker, ()) + tps
        return owned

    def status(self, worker: str) -> EngineStatus | None:
        """What a worker says of itself."""
        return next((one for one in ready.run_apart(self._statuses()) if one.worker == worker), None)

    def running(self, worker: str) -> int:
        """How many requests a worker says that it runs."""
        status = self.status(worker)
        return 0 if status is None else status.running

    # -- what lies in Kafka -----------------------------------------------------------------------------------------

    def produce(self, requests: Iterable[dict[str, Any]], topic: str | None = None) -> None:
        """Write requests, by default as batch."""
        ready.run_apart(raw.produce(self.bootstrap, topic or self.topics.requests("batch"), requests))

    def results(self, isolation: str = raw.COMMITTED) -> list[dict[str, Any]]:
        """All terminal results, as they lie there."""
        return [json.loads(record.value) for record in self.read(self.topics.results, isolation)]

    def dead_letters(self) -> list[ConsumerRecord]:
        return self.read(self.topics.dead_letters, raw.COMMITTED)

    def answered(self, number: int, limit_s: float) -> list[dict[str, Any]]:
        """Wait until so many requests have a result, and give all results.

        Raises:
            NotReady: They had not in time.
        """
        found: list[dict[str, Any]] = []

        def is_over() -> bool:
            found[:] = self.results()
            return len(raw.tally(found)) >= number

        ready.until(is_over, limit_s, f"{number} requests in {self.home}")
        return found

    # -- inside ------------------------------------------------------------------------------------------------------

    def read(self, topic: str, isolation: str = raw.COMMITTED) -> list[ConsumerRecord]:
        """All records of a topic, to its very end."""
        return ready.run_apart(raw.read_all(self.bootstrap, topic, isolation))

    async def _ensure_topics(self) -> None:
        config, transport = self.config, KafkaTransport(self.config.kafka)
        try:
            admin = await transport.admin()
            await admin.ensure(self.topics.specs(config.topics, config.pools, config.kafka.record_bytes_max), 1, 1)
        finally:
            await transport.close()

    async def _statuses(self) -> list[EngineStatus]:
        board = StatusBoard(self.config.redis, self.config.kafka.topic_prefix)
        try:
            return await board.read()
        finally:
            await board.close()

    async def _members(self, pool: str) -> dict[str, tuple[TopicPartition, ...]]:
        transport = KafkaTransport(self.config.kafka)
        try:
            return await (await transport.admin()).members(self.topics.engine_group(pool))
        finally:
            await transport.close()


def toml(tables: dict[str, Any], path: str = "") -> str:
    """Write nested tables as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    parts = ["\n".join([f"[{path}]", *lines]) + "\n"] if path and lines else []
    for key, value in tables.items():
        if isinstance(value, dict):
            parts.append(toml(value, f"{path}.{key}" if path else key))
    return "\n".join(parts)


async def until(probe: Callable[[], object], limit_s: float | None = None) -> None:
    """Look again and again until it is so.

    Raises:
        TimeoutError: It was not so in time.
    """
    pause = asyncio.Event()  # never set: only its time runs out
    async with asyncio.timeout(limit_s):
        while not probe():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pause.wait(), LOOK_S)
