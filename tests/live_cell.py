"""A cell with three kinds of simulated engines on real services, and what its topics tell of shares, loads and places.

Everything is reckoned from raw records: when a request was handed to an engine is the time of its record there, when it
ended that of its result.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from cells import Cell
from raw import COMMITTED, Watch, request

from deploy.local import ready
from deploy.local.services import Services
from schemas import codecs, headers

KINDS = ("transformer", "ssm", "moe")
UP_S = 60.0
QUICK = {"session_timeout_ms": 3_000, "heartbeat_ms": 500, "rebalance_timeout_ms": 2_000}


class Run(NamedTuple):
    """One request from the engine's topic to its result; Unix milliseconds.

    Attributes:
        sent_ms: Handed to the engine, the last time.
        began_ms: Its run began.
        ended_ms: Its result was written.
    """

    ident: str
    tenant: str
    pool: str
    sent_ms: float
    began_ms: float
    ended_ms: float
    result: dict[str, Any]


def tables(services: Services, prefix: str, run_ms: float, slots: int = 16, **more: Any) -> dict[str, Any]:
    """Three pools, each of a kind, with one worker; a run takes `run_ms`, whatever runs beside it.

    Args:
        services: Where Kafka and Redis are.
        prefix: The cell's.
        run_ms: Of a request.
        slots: Of each worker.
        more: Tables that differ or come on top; those of engines are merged into each.
    """
    options = {"ttft_ms": run_ms, "tpot_ms": 0, "prefill_tokens_per_s": 0, "interference": 0, "max_context": 32_768}
    profile = {"ttft_ms": run_ms, "tpot_ms": 0.0, "prefill_ms_per_1k": 0.0, "prefill_quadratic_ms": 0.0}
    engine = {"backend": "sim", "slots": slots, "profile": profile, "options": options}
    engines = {kind: {"kind": kind, "model": f"{kind}-model", **engine} for kind in KINDS}
    for kind, changes in more.pop("engines", {}).items():
        engines[kind] = {**engines[kind], **changes, "options": {**options, **changes.get("options", {})}}
    return {
        "kafka": {"bootstrap": services.kafka, "topic_prefix": prefix, **QUICK},
        "redis": {"url": services.redis},
        "topics": {"request_partitions": 1, "engine_partitions": 2, "retry_partitions": 1, "result_partitions": 1},
        "engines": engines,
        **more,
    }


class LiveCell(Cell):
    """One dispatcher, and a worker for each engine, called like it."""

    def __init__(self, home: Path, raw: dict[str, Any]) -> None:
        super().__init__(home, raw)
        self.interactive, self.batch = self.topics.requests("interactive"), self.topics.requests("batch")

    def start_all(self) -> None:
        """Start everything and wait until the dispatcher may send to each worker."""
        self.dispatcher("dispatcher")
        for engine in self.config.engines:
            self.worker(engine, engine)
        ready.until(lambda: all(self.is_serving(engine) for engine in self.config.engines), UP_S, "all engines")
        ready.until(lambda: "taken_over" in self.log_of("dispatcher"), UP_S, "the dispatcher")

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Note the ids of results as they come, at little cost: to read them all again and again would slow the others down."""
        watch, is_over = Watch(self.bootstrap, self.topics.results), threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(_watch(watch, is_over)), daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            is_over.set()
            thread.join()

    def is_serving(self, engine: str) -> bool:
        """Whether an engine's worker has told that it owns its partitions."""
        status = self.status(engine)
        return status is not None and len(status.partitions) == self.config.topics.engine_partitions

    def sent(self, engine: str) -> list[tuple[str, float]]:
        """What an engine was handed: id and time, in order."""
        found = []
        for record in self.read(self.topics.engine(engine), COMMITTED):
            envelope = codecs.decode_envelope(dict(record.headers)[headers.ENVELOPE])
            found.append((envelope.id, float(record.timestamp)))
        return sorted(found, key=lambda one: one[1])

    def runs(self) -> list[Run]:
        """All requests that have a result of an engine, by the end of their runs."""
        results = self.read(self.topics.results, COMMITTED)  # first: whatever has a result was sent before
        sent = {(engine, ident): at_ms for engine in self.config.engines for ident, at_ms in self.sent(engine)}
        found = []
        for record in results:
            result = json.loads(record.value)
            pool, timing = result.get("engine"), result.get("timing", {})
            if pool is None or "latency_ms" not in timing:
                continue
            ident, ended_ms = result["request_id"], float(record.timestamp)
            began_ms = ended_ms - (timing["latency_ms"] - timing.get("queued_ms", 0.0))
            found.append(Run(ident, result["tenant"], pool, sent[pool, ident], began_ms, ended_ms, result))
        return sorted(found, key=lambda run: run.ended_ms)

    def ask(self, topic: str, limit_s: float, ident: str, **fields: Any) -> dict[str, Any]:
        """Send one request and give its result.

        Raises:
            NotReady: None came in time.
        """
        with self.watching() as watch:
            self.produce([request(ident, **fields)], topic)
            ready.until(lambda: ident in watch.seen, limit_s, f"the request {ident}")
        return next(one for one in self.results() if one["request_id"] == ident)

    def length(self, topic: str) -> int:
        """About how many records were ever written to a topic."""
        return ready.run_apart(self._length(topic))

    async def _length(self, topic: str) -> int:
        consumer = AIOKafkaConsumer(topic, bootstrap_servers=self.bootstrap)
        await consumer.start()
        try:
            tps = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic) or ()]
            return sum((await consumer.end_offsets(tps)).values())
        finally:
            await consumer.stop()


async def _watch(watch: Watch, is_over: threading.Event) -> None:
    watching = asyncio.ensure_future(watch.run())
    await asyncio.to_thread(is_over.wait)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def share(runs: Iterable[Run], tenant: str, from_ms: float, to_ms: float) -> float:
    """A tenant's part of the engine time that was given in a span."""
    given = dict.fromkeys((True, False), 0.0)
    for run in runs:
        given[run.tenant == tenant] += overlap(run, from_ms, to_ms)
    return given[True] / (given[True] + given[False])


def utilisation(runs: Iterable[Run], slots: int, from_ms: float, to_ms: float) -> float:
    """The part of a span in which slots were in use."""
    return sum(overlap(run, from_ms, to_ms) for run in runs) / (slots * (to_ms - from_ms))


def overlap(run: Run, from_ms: float, to_ms: float) -> float:
    """How much of a run lies in a span."""
    return max(0.0, min(run.ended_ms, to_ms) - max(run.began_ms, from_ms))


def most_at_once(sent_ms: Iterable[float], ended_ms: Iterable[float]) -> int:
    """The most requests that were in a worker's hands at one time."""
    held = most = 0
    for _, change in sorted([*((at, 1) for at in sent_ms), *((at, -1) for at in ended_ms)]):
        held += change
        most = max(most, held)
    return most
