"""Row 16: a batch of 100,000 lines through the sim engine, and what the dispatcher holds in memory, also before a million.

The baseline does the least that a batch needs: a plain producer writes the same requests, one bare exactly-once loop
moves each to the results, a plain consumer reads them; all at once, as in ours.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from bare import BareLoop
from cells import CLI, Cell
from trees import ROOT

from broker.transport.kafka import KafkaTransport
from deploy.local.services import Services
from schemas.config import KafkaConfig
from schemas.topics import TopicSpec

LINES, BACKLOG, BACKLOG_S = 100_000, 1_000_000, 240.0
PARTITIONS, WORKERS, SLOTS = 4, 2, 256
LOOK_S, LIMIT_S, PRODUCED_AT_ONCE = 0.25, 1_800, 2_000
ENGINE = {"ttft_ms": 0, "prefill_tokens_per_s": 0, "tpot_ms": 0}


class Memory:
    """Resident memory of a process, sampled."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.samples_mb: list[float] = []

    def sample(self) -> None:
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(self._pid)], capture_output=True, text=True, check=False).stdout
        if found.strip():
            self.samples_mb.append(int(found) / 1024)

    def figures(self) -> dict[str, float]:
        """The greatest, and what the last quarter has above the second: a flat one has nothing there."""
        quarter = max(1, len(self.samples_mb) // 4)
        before, last = self.samples_mb[quarter : 2 * quarter] or self.samples_mb, self.samples_mb[-quarter:]
        return {"max MB": round(max(self.samples_mb)), "growth MB": round(max(last) - max(before))}


def make_cell(services: Services, home: Path, prefix: str) -> Cell:
    """A dispatcher and two workers whose engine takes no time at all."""
    return Cell(
        home,
        {
            "kafka": {"bootstrap": services.kafka, "topic_prefix": prefix},
            "redis": {"url": services.redis},
            "topics": {"request_partitions": PARTITIONS, "engine_partitions": 4, "retry_partitions": 1, "lane_partitions": 1},
            "engines": {"sim": {"kind": "sim", "slots": SLOTS, "options": ENGINE}},
        },
    )


def start(cell: Cell) -> Memory:
    """Start its processes; gives the dispatcher's memory."""
    dispatcher = cell.dispatcher("dispatcher")
    for n in range(WORKERS):
        cell.worker(f"worker-{n}")
    while not all("taken_over" in cell.log_of(name) for name in cell.processes):
        time.sleep(LOOK_S)
    return Memory(dispatcher.pid)


def batch(services: Services, home: Path) -> tuple[float, dict[str, float]]:
    """Run the batch by the command line; gives seconds and the dispatcher's memory."""
    home.mkdir(parents=True, exist_ok=True)
    source = home / "in.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for n in range(LINES):
            body = {"model": "sim", "messages": [{"role": "user", "content": f"About {n}?"}], "max_tokens": 8}
            one = {"custom_id": f"line{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    files = ["-o", str(home / "out.jsonl"), "-e", str(home / "err.jsonl")]
    with make_cell(services, home, f"batch{time.time_ns() // 1_000_000}") as cell:
        memory = start(cell)
        began = time.perf_counter()
        command = [*CLI, "batch", "run", str(source), *files, "--config", str(cell.path)]
        running = subprocess.Popen(command, cwd=ROOT, stderr=sys.stderr)
        while running.poll() is None and time.perf_counter() - began < LIMIT_S:
            memory.sample()
            time.sleep(LOOK_S)
        seconds = time.perf_counter() - began
        if running.poll() is None:
            running.kill()
    if running.wait() or sum(1 for _ in (home / "out.jsonl").open(encoding="utf-8")) != LINES:
        message = f"the batch ended with status {running.returncode}: see {home}"
        raise RuntimeError(message)
    return seconds, memory.figures()


def backlog(services: Services, home: Path) -> tuple[int, dict[str, float]]:
    """Put a million requests before the dispatcher; gives how many it moved in the time that is left for it, and its memory."""
    with make_cell(services, home, f"backlog{time.time_ns() // 1_000_000}") as cell:
        memory = start(cell)
        topic, until = cell.topics.requests("batch"), time.perf_counter() + BACKLOG_S
        asyncio.run(_produce(services.kafka, topic, BACKLOG, memory.sample))
        while time.perf_counter() < until:
            memory.sample()
            time.sleep(LOOK_S)
        moved = min(BACKLOG, asyncio.run(_end(services.kafka, cell.topics.engine("sim"))))  # markers take offsets too
    return moved, memory.figures()


def bare(services: Services) -> float:
    """Seconds of the baseline."""
    return asyncio.run(_bare(services.kafka, f"bare{time.time_ns() // 1_000_000}"))


async def _bare(bootstrap: str, prefix: str) -> float:
    await _topics(bootstrap, f"{prefix}-in", f"{prefix}-out")
    loop = BareLoop(bootstrap, f"{prefix}-in", f"{prefix}-out", prefix, PARTITIONS, exactly_once=True)
    await loop.start()
    reader = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False)
    await reader.start()
    tps = [TopicPartition(f"{prefix}-out", n) for n in range(PARTITIONS)]
    reader.assign(tps)
    await reader.seek_to_beginning(*tps)
    began, found = time.perf_counter(), 0
    moving = asyncio.ensure_future(loop.run(LINES))
    producing = asyncio.ensure_future(_produce(bootstrap, f"{prefix}-in", LINES, lambda: None))
    try:
        while found < LINES:
            found += sum(map(len, (await reader.getmany(timeout_ms=1_000)).values()))
        seconds = time.perf_counter() - began
        await asyncio.gather(moving, producing)
    finally:
        await reader.stop()
        await loop.close()
    return seconds


async def _topics(bootstrap: str, *names: str) -> None:
    transport = KafkaTransport(KafkaConfig(bootstrap=bootstrap))
    await (await transport.admin()).ensure([TopicSpec(name, PARTITIONS, {}) for name in names], 1, 1)
    await transport.close()


async def _produce(bootstrap: str, topic: str, number: int, between: Callable[[], Any]) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_batch_size=1 << 20)
    await producer.start()
    try:
        for idents in _chunks(number):
            sent = [await producer.send(topic, value, key=key) for key, value in map(_request, idents)]
            await asyncio.gather(*sent)
            between()
    finally:
        await producer.stop()


def _chunks(number: int) -> Iterator[list[int]]:
    numbers = iter(range(number))
    return iter(lambda: list(itertools.islice(numbers, PRODUCED_AT_ONCE)), [])


def _request(n: int) -> tuple[bytes, bytes]:
    ident = f"b{n:07d}"
    return ident.encode(), json.dumps({"id": ident, "prompt": f"About {n}?", "max_output_tokens": 8}).encode()


async def _end(bootstrap: str, topic: str) -> int:
    """The end offsets of a topic, together."""
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap)
    await consumer.start()
    try:
        tps = [TopicPartition(topic, n) for n in consumer.partitions_for_topic(topic)]
        return sum((await consumer.end_offsets(tps)).values())
    finally:
        await consumer.stop()
