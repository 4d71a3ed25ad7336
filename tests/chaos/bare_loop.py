"""What one writes without us: read some, work on them side by side, write each result, commit when all are written.

    python tests/chaos/bare_loop.py --config forebay.toml

At least once, a member of a consumer group, no transactions; anything that goes wrong ends the process. The work takes
as long as the `sim` engine's of a chaos run. It is the baseline of what such a run loses and repeats.
"""

import argparse
import asyncio
import json
import sys
import tomllib
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.abc import ConsumerRebalanceListener

GROUP = "bare"
AT_ONCE = 24
TTFT_S, TOKEN_S = 0.050, 0.015


class Told(ConsumerRebalanceListener):
    """Says on stderr, as ours does, that the partitions are there."""

    def on_partitions_revoked(self, revoked: set) -> None:
        """Nothing is done about them: what runs goes on."""

    def on_partitions_assigned(self, assigned: set) -> None:
        sys.stderr.write(f"taken_over partitions={len(assigned)}\n")
        sys.stderr.flush()


async def serve(bootstrap: str, prefix: str) -> None:
    """Read, work, write, commit."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=GROUP,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        session_timeout_ms=6_000,
        heartbeat_interval_ms=1_000,
        rebalance_timeout_ms=3_000,
    )
    consumer.subscribe([f"{prefix}.requests.interactive", f"{prefix}.requests.batch"], listener=Told())
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True)
    await consumer.start()
    await producer.start()

    async def work(value: bytes) -> None:
        request = json.loads(value)
        await asyncio.sleep(TTFT_S + TOKEN_S * request["max_output_tokens"])
        result = {"request_id": request["id"], "status": "completed"}
        await producer.send_and_wait(f"{prefix}.results", json.dumps(result).encode(), key=request["id"].encode())

    while True:
        batches = await consumer.getmany(timeout_ms=500, max_records=AT_ONCE)
        await asyncio.gather(*(work(record.value) for records in batches.values() for record in records))
        if batches:
            await consumer.commit()


def main() -> None:
    """Serve until something goes wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    kafka = tomllib.loads(parser.parse_args().config.read_text())["kafka"]
    asyncio.run(serve(kafka["bootstrap"], kafka.get("topic_prefix", "forebay")))


if __name__ == "__main__":
    main()
