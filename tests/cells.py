"""A cell of real processes on real services, and what it left in Kafka, read without our client.

Each process stands behind a guard of the local stack, so it ends with the test that started it; its output goes to
`home/logs/NAME.log`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import ConsumerRecord

from broker.transport.kafka import KafkaTransport
from deploy.local import ready
from deploy.local.program import Program, Running
from schemas import Topics, parse_config

ROOT = Path(__file__).parents[1]
CLI = (sys.executable, "-m", "deploy.cli")
GRACE_S = 30.0  # a worker's drain, and some
READ_S = 30.0
LOOK_S = 0.05


def toml(tables: dict[str, Any], path: str = "") -> str:
    """Write nested tables as TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    parts = ["\n".join([f"[{path}]", *lines]) + "\n"] if path and lines else []
    for key, value in tables.items():
        if isinstance(value, dict):
            parts.append(toml(value, f"{path}.{key}" if path else key))
    return "\n".join(parts)


class Cell:
    """The configuration of one cell, its topics, and its processes by name."""

    def __init__(self, home: Path, raw: dict[str, Any]) -> None:
        self.home, self.config = home, parse_config(raw)
        self.bootstrap = self.config.kafka.bootstrap
        self.topics = Topics(self.config.kafka.topic_prefix)
        self.running: dict[str, Running] = {}
        home.mkdir(parents=True, exist_ok=True)
        self.path = home / "forebay.toml"
        self.path.write_text(toml(raw), encoding="utf-8")

    def __enter__(self) -> Self:
        self.ensure_topics()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    def log_of(self, name: str) -> str:
        """What a process has said so far."""
        path = self.logs / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def ensure_topics(self) -> None:
        ready.run_apart(self._ensure_topics())

    async def _ensure_topics(self) -> None:
        transport = KafkaTransport(self.config.kafka)
        try:
            admin = await transport.admin()
            config = self.config
            await admin.ensure(self.topics.specs(config.topics, config.pools, config.kafka.record_bytes_max), 1, 1)
        finally:
            await transport.close()

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name: str, *arguments: str, entry: Sequence[str] = CLI, env: dict[str, str] | None = None) -> Running:
        """Run a command of ours under that name."""
        argv = [*entry, *arguments, "--config", str(self.path)]
        program = Program(name, argv, str(self.logs / f"{name}.log"), grace_s=GRACE_S, env=env or {}, cwd=str(ROOT))
        self.running[name] = Running(program)
        return self.running[name]

    def dispatcher(self, name: str, **more: Any) -> Running:
        return self.start(name, "dispatch", "--name", name, **more)

    def worker(self, name: str, engine: str = "sim", **more: Any) -> Running:
        return self.start(name, "work", "--engine", engine, "--name", name, **more)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Signal a process that lives."""
        one = self.running[name]
        if one.exit_code is None:
            os.kill(one.pid, number)

    def stop(self) -> None:
        """Wake what is stopped, and end everything in good order."""
        for name, one in self.running.items():
            self.signal(name, signal.SIGCONT)
            one.end()
        for one in self.running.values():
            one.stop()

    # -- what lies in Kafka -----------------------------------------------------------------------------------------

    def results(self) -> list[dict[str, Any]]:
        """All terminal results, as they lie there."""
        return [json.loads(record.value) for record in self.read(self.topics.results)]

    def dead_letters(self) -> list[ConsumerRecord]:
        return self.read(self.topics.dead_letters)

    def read(self, topic: str, isolation: str = "read_committed") -> list[ConsumerRecord]:
        """All records of a topic, to its very end."""
        return ready.run_apart(read_all(self.bootstrap, topic, isolation))


async def read_all(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[ConsumerRecord]:
    """Read a topic to its end with a plain consumer.

    Raises:
        TimeoutError: The end cannot be reached: a transaction is open, or the broker does not answer.
    """
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level=isolation,
        enable_auto_commit=False,
        max_partition_fetch_bytes=8 << 20,
        fetch_max_wait_ms=100,
    )
    await consumer.start()
    try:
        async with asyncio.timeout(READ_S):
            tps = [TopicPartition(topic, number) for number in await partitions(consumer, topic)]
            consumer.assign(tps)
            await consumer.seek_to_beginning(*tps)
            ends = await consumer.end_offsets(tps)
            found: list[ConsumerRecord] = []
            while True:
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    found += records
                if all([await consumer.position(tp) >= end for tp, end in ends.items()]):
                    return found
    finally:
        await consumer.stop()


async def partitions(consumer: AIOKafkaConsumer, topic: str) -> list[int]:
    """The partitions of a topic."""
    found = consumer.partitions_for_topic(topic)
    while not found:
        await consumer._client.force_metadata_update()
        await consumer._client.set_topics([topic])
        found = consumer.partitions_for_topic(topic)
    return sorted(found)


async def until(probe: Callable[[], bool], limit_s: float | None = None) -> None:
    """Look again and again until it is so.

    Raises:
        TimeoutError: It was not so in time.
    """
    pause = asyncio.Event()  # never set: only its time runs out
    async with asyncio.timeout(limit_s):
        while not probe():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pause.wait(), LOOK_S)


def request(ident: str, **fields: Any) -> dict[str, Any]:
    """A request as a producer without our client would write it."""
    return {"id": ident, "prompt": f"About {ident}.", "max_output_tokens": 16, **fields}


async def produce(bootstrap: str, topic: str, requests: Iterable[dict[str, Any]]) -> None:
    """Write requests with a plain producer; all are acknowledged when it returns."""
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    await producer.start()
    try:
        sent = [await producer.send(topic, json.dumps(one).encode(), key=one["id"].encode()) for one in requests]
        await asyncio.gather(*sent)
    finally:
        await producer.stop()


def tally(results: Iterable[dict[str, Any]]) -> Counter[str]:
    """How many terminal results each request has."""
    return Counter(one["request_id"] for one in results)
