"""Rows 1 to 3: the dispatcher with its full policy against a bare loop, on the same broker, alternating."""

import asyncio
import time
from statistics import median

from bare import BareLoop

from broker.transport.kafka import KafkaTransport
from broker.transport.protocol import Outgoing, TopicPartition
from dispatcher.active import Active
from schemas import EngineStatus, Topics, parse_config

PARTITIONS, WORKERS, TENANTS, BYTES = 4, 12, 1_000, 1_024
FILLER = "x" * BYTES


def config(kafka: str, prefix: str, delivery: str):
    return parse_config(
        {
            "kafka": {"bootstrap": kafka, "topic_prefix": prefix, "delivery": delivery},
            "topics": {
                "request_partitions": PARTITIONS,
                "engine_partitions": WORKERS,
                "retry_partitions": 1,
                "lane_partitions": 1,
            },
            "engines": {"bench": {"kind": "transformer", "model": "bench"}},
        }
    )


class Counted(Active):
    """A dispatcher that tells how much it has moved."""

    done = 0

    def committed(self, work, places) -> None:
        super().committed(work, places)
        self.done += 1


def statuses(beat: int) -> list[EngineStatus]:
    """Twelve workers that read whatever comes at once."""
    return [
        EngineStatus(
            engine="bench",
            kind="transformer",
            pool="bench",
            worker=f"w{n:02d}",
            epoch=1,
            updated_at_ms=beat,
            partitions=[n],
            positions={n: 1 << 60},
            slots=1_000,
            models=["bench"],
        )
        for n in range(WORKERS)
    ]


async def yes() -> bool:
    return True


class Bench:
    """One mode's topics on one broker."""

    def __init__(self, kafka: str, prefix: str, delivery: str) -> None:
        self.kafka, self.prefix, self.delivery = kafka, prefix, delivery
        self.config = config(kafka, prefix, delivery)
        self.topics = Topics(prefix)
        self.source = self.topics.requests("batch")

    async def prepare(self, count: int) -> None:
        transport = KafkaTransport(self.config.kafka)
        admin = await transport.admin()
        await admin.ensure(self.topics.specs(self.config.topics, self.config.pools), 1, 1)
        producer = await transport.producer()
        last = None
        for n in range(count):
            last = await producer.send(self.request(n))
        if last is not None:
            await last
        await producer.close()
        await transport.close()

    def request(self, n: int) -> Outgoing:
        head = f'{{"id":"r{n:08d}","tenant":"t{n * 7919 % TENANTS}","max_output_tokens":64,"prompt":"'
        value = head + FILLER[: BYTES - len(head) - 2] + '"}'
        return Outgoing(self.source, value.encode(), f"r{n:08d}".encode(), (), n % PARTITIONS)

    async def ours(self, count: int) -> float:
        """Records per second through the dispatcher."""
        transport = KafkaTransport(self.config.kafka)
        active = Counted(self.config, transport, yes)
        run = asyncio.ensure_future(active.run())
        beat = 0
        while not active.done:
            beat += 1
            for status in statuses(beat):
                active.seen(status)
            await asyncio.sleep(0.002)
            if run.done():
                run.result()
        began, first, told = time.perf_counter(), active.done, time.perf_counter()
        while active.done < count:
            await asyncio.sleep(0.002)
            if time.perf_counter() - told > 1:
                beat, told = beat + 1, time.perf_counter()
                for status in statuses(beat):
                    active.seen(status)
            if run.done():
                run.result()
        seconds = time.perf_counter() - began
        active.stop()
        await run
        await transport.close()
        return (count - first) / seconds

    async def bare(self, count: int, group: str) -> float:
        """Records per second through the bare loop."""
        loop = BareLoop(
            self.kafka, self.source, self.topics.engine("bench"), group, PARTITIONS, exactly_once=self.delivery == "exactly_once"
        )
        await loop.start()
        seconds = await loop.run(count)
        await loop.close()
        return count / seconds


async def throughput(kafka: str, delivery: str, rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Alternate the two; gives records per second of ours and of the bare loop."""
    ours, bare = [], []
    for n in range(rounds):
        bench = Bench(kafka, f"bench{int(time.time() * 1000)}", delivery)
        await bench.prepare(count)
        first, second = (bench.ours(count), bench.bare(count, f"bare-{bench.prefix}"))
        if n % 2:
            bare.append(await second)
            ours.append(await first)
        else:
            ours.append(await first)
            bare.append(await second)
    return ours, bare


async def latency(kafka: str, delivery: str, rounds: int, count: int, gap_s: float) -> dict[str, list[float]]:
    """Milliseconds from produced to readable behind one hop under light load; p50 and p99 of each round."""
    found: dict[str, list[float]] = {"ours p50": [], "ours p99": [], "bare p50": [], "bare p99": []}
    for n in range(rounds):
        for name in ("ours", "bare") if n % 2 else ("bare", "ours"):
            bench = Bench(kafka, f"bench{int(time.time() * 1000)}", delivery)
            await bench.prepare(0)
            times = sorted(await (_ours_latency if name == "ours" else _bare_latency)(bench, count, gap_s))
            found[f"{name} p50"].append(median(times))
            found[f"{name} p99"].append(times[int(len(times) * 0.99)])
    return found


async def _ours_latency(bench: Bench, count: int, gap_s: float) -> list[float]:
    transport = KafkaTransport(bench.config.kafka)
    active = Counted(bench.config, transport, yes)
    run = asyncio.ensure_future(active.run())

    async def tell() -> None:
        beat = 0
        while True:
            beat += 1
            for status in statuses(beat):
                active.seen(status)
            await asyncio.sleep(1)

    telling = asyncio.ensure_future(tell())
    try:
        return await _probe(bench, count, gap_s)
    finally:
        telling.cancel()
        active.stop()
        await run
        await transport.close()


async def _bare_latency(bench: Bench, count: int, gap_s: float) -> list[float]:
    loop = BareLoop(
        bench.kafka,
        bench.source,
        bench.topics.engine("bench"),
        f"bare-{bench.prefix}",
        PARTITIONS,
        exactly_once=bench.delivery == "exactly_once",
    )
    await loop.start()
    run = asyncio.ensure_future(loop.run(1 << 60))
    try:
        return await _probe(bench, count, gap_s)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await loop.close()


async def _probe(bench: Bench, count: int, gap_s: float) -> list[float]:
    """Produce at a light rate and note when each record can be read behind the hop."""
    transport = KafkaTransport(bench.config.kafka)
    producer = await transport.producer()
    tps = [TopicPartition(bench.topics.engine("bench"), n) for n in range(WORKERS)]
    consumer = await transport.assign(tps)
    for tp in tps:
        consumer.seek(tp, 0)
    warm, sent, times = 20, {}, []

    async def produce() -> None:
        for n in range(-warm, count):
            record = bench.request(n + warm)
            sent[record.key] = time.perf_counter() if n >= 0 else None
            await producer.send(record)
            await asyncio.sleep(gap_s)

    producing = asyncio.ensure_future(produce())
    deadline = time.perf_counter() + 120
    while len(times) < count:
        for record in await consumer.poll(tps, 1_000, 200):
            since = sent.get(record.key)
            if since is not None:
                times.append((time.perf_counter() - since) * 1_000)
        if time.perf_counter() > deadline:
            message = f"only {len(times)} of {count} records came through"
            raise RuntimeError(message)
    await producing
    await consumer.close()
    await producer.close()
    await transport.close()
    return times
