"""One id produced again, on Apache Kafka and Valkey: to one dispatcher, and to the next after a kill."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter

from redis.asyncio import Redis

from broker import Client
from broker.transport.kafka import KafkaTransport
from broker.transport.protocol import Outgoing, TopicPartition
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import StatusBoard
from schemas import Topics, codecs, parse_config

COUNT = 50
LIMIT_S = 90


@contextlib.asynccontextmanager
async def working(config):
    """A worker of the cell, in this process."""
    transport, board = KafkaTransport(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
    admin = await transport.admin()
    await admin.ensure(Topics(config.kafka.topic_prefix).specs(config.topics, config.pools), 1, 1)
    await admin.close()
    worker = Worker(config, "sim", load(config.engines["sim"]), transport, board, "w")
    task = asyncio.ensure_future(worker.run())
    try:
        yield transport
    finally:
        worker.stop()
        await task
        await board.close()
        await transport.close()


@contextlib.contextmanager
def dispatching(path):
    """A dispatcher of the cell, as a process that is killed in the end."""
    process = subprocess.Popen([sys.executable, "-P", "-m", "deploy.cli", "dispatch", "--config", str(path)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_an_id_is_run_once_also_by_a_dispatcher_that_comes_after_a_killed_one(kafka, tmp_path):
    cell = {
        "kafka": {"bootstrap": kafka.kafka, "delivery": kafka.delivery, "topic_prefix": f"seen-{os.getpid()}"},
        "redis": {"url": kafka.redis},
        "topics": {"request_partitions": 3, "engine_partitions": 2, "result_partitions": 2, "lane_partitions": 1},
        "engines": {"sim": {"kind": "sim", "slots": 16, "options": {"ttft_ms": 5, "tpot_ms": 2}}},
    }
    config = parse_config(cell)
    path = tmp_path / "forebay.toml"
    path.write_text("".join(f"{a}.{b} = {json.dumps(v)}\n" for a in ("kafka", "redis", "topics") for b, v in cell[a].items()))
    with path.open("a") as file:
        file.write('engines.sim = { kind = "sim", slots = 16, options = { ttft_ms = 5, tpot_ms = 2 } }\n')
    names = [f"r{n}" for n in range(COUNT)]

    async def produce(transport, ids):
        producer = await transport.producer()
        for turn, name in enumerate(ids):  # a repeat lies in another partition than its first
            value = json.dumps({"id": name, "prompt": "a", "max_output_tokens": 2}).encode()
            await (await producer.send(Outgoing(f"{config.kafka.topic_prefix}.requests.batch", value, None, (), turn % 3)))
        await producer.close()

    async def answered(client, ids):
        missing = set(ids)
        async with client.results("beginning", ids=ids, timeout_s=LIMIT_S) as found:
            async for result in found:
                missing.discard(result.request_id)
        return not missing

    async def marks_are_written():
        """They come in batches, and a kill before the last would let its repeats run."""
        redis, last, count = Redis.from_url(config.redis.url, socket_timeout=2 * LIMIT_S), b"0", 0
        while count < COUNT:
            ((_, entries),) = await redis.xread({f"{config.kafka.topic_prefix}:seen": last}, block=LIMIT_S * 1000)
            last = entries[-1][0]
            count += sum(len(codecs.decode_seen(fields[b"b"]).marks) for _, fields in entries)
        await redis.aclose()

    async def scenario():
        async with working(config) as transport, Client(config) as client:
            with dispatching(path):
                await produce(transport, [*names, *names])
                assert await answered(client, names)
                await marks_are_written()
            with dispatching(path):
                last = [f"last{n}" for n in range(3)]  # one behind the repeats of each partition
                await produce(transport, [*names, "x", *last])
                assert await answered(client, last)
            return await runs(transport)

    async def runs(transport):
        """How often each id has a result, read without our client, which drops repeats."""
        partitions = [TopicPartition(f"{config.kafka.topic_prefix}.results", number) for number in range(2)]
        consumer = await transport.assign(partitions)
        missing = {tp: end for tp, (_, end) in (await consumer.bounds(partitions)).items() if end}
        for tp in partitions:
            consumer.seek(tp, 0)
        counted = Counter()
        while missing and (records := await consumer.poll(list(missing), 1_000, 5_000)):
            counted.update(record.key.decode() for record in records)
        await consumer.close()
        return counted

    found = asyncio.run(scenario())
    assert {name: found[name] for name in names} == dict.fromkeys(names, 1)
