"""Large prompts and results on Apache Kafka: up to 8 MB in the record, above what a record may be by the store."""

import asyncio
import hashlib
import json

import pytest
import raw
from cells import Cell

from broker import Client

LARGEST = 8_000_000  # bytes of a request's value, by default
MOST = 1_000_000  # tokens of one output, as the schema has it
SMALLER = 4 << 20  # a cluster that takes no larger records
LIMIT_S = 120


@pytest.fixture
def make_cell(kafka, tmp_path):
    cells = []

    def make(name, **more):
        quick = {"ttft_ms": 0, "prefill_tokens_per_s": 0, "tpot_ms": 0, "max_context": 10_000_000}
        tables = {
            "kafka": {"bootstrap": kafka.kafka, "topic_prefix": name, **more},
            "redis": {"url": kafka.redis},
            "topics": {"request_partitions": 1, "engine_partitions": 1, "result_partitions": 2, "lane_partitions": 1},
            "blobs": {"store": f"file://{tmp_path}/store"},
            "engines": {"sim": {"kind": "sim", "slots": 4, "options": quick}},
        }
        cell = Cell(tmp_path / name, tables)
        cells.append(cell)
        cell.__enter__()
        cell.dispatcher("d")
        cell.worker("w")
        return cell

    yield make
    for cell in cells:
        cell.stop()


def sized(ident, value_bytes, **fields):
    """A request whose value has exactly so many bytes."""
    empty = len(json.dumps({"id": ident, **fields, "prompt": ""}))
    return {"id": ident, **fields, "prompt": "x" * (value_bytes - empty)}


def produce(cell, *requests):
    """Write them by a plain client that sends as much as the topic takes."""
    asyncio.run(raw.produce(cell.bootstrap, cell.topics.requests("batch"), requests, max_request_size=8 << 20))


def test_prompts_and_results_of_eight_megabytes_go_in_a_record(make_cell):
    cell = make_cell("large")
    produce(
        cell,
        sized("largest", LARGEST, max_output_tokens=3),
        sized("beyond", LARGEST + 1, max_output_tokens=3),
        {"id": "much", "prompt": "a", "max_output_tokens": MOST},
    )
    found = {one["request_id"]: one for one in cell.answered(3, LIMIT_S)}
    statuses = {name: one["status"] for name, one in found.items()}
    assert statuses == {"largest": "completed", "beyond": "rejected", "much": "completed"}
    assert f"at most {LARGEST}" in found["beyond"]["error"]["message"]
    assert len(found["much"]["output_tokens"]) == MOST
    assert "output_ref" not in found["much"]
    assert max(len(record.value) for record in cell.read(cell.topics.results)) > 0.85 * LARGEST


def test_what_is_larger_than_a_record_goes_by_the_store(make_cell):
    cell = make_cell("small-records", record_bytes_max=SMALLER)
    produce(cell, {"id": "more", "prompt": "a", "max_output_tokens": MOST})
    (found,) = cell.answered(1, LIMIT_S)
    (record,) = cell.read(cell.topics.results)
    assert len(record.value) < 2_000
    ref = found["output_ref"]
    blob = (cell.home.parent / "store" / ref["url"].partition("/store/")[2]).read_bytes()
    assert (len(blob), hashlib.sha256(blob).hexdigest()) == (ref["size_bytes"], ref["sha256"])
    assert len(json.loads(blob)["output_tokens"]) == MOST

    async def scenario():
        async with Client(cell.config) as client:
            return await client.submit("y" * (LARGEST + 1_000_000), max_output_tokens=MOST, timeout_s=LIMIT_S)

    result = asyncio.run(scenario())
    assert result.status == "completed"
    assert result.output_ref is not None
    assert (len(result.output_tokens), result.usage.output_tokens) == (MOST, MOST)
    assert len(result.output_text) > MOST
    assert result.usage.input_tokens > LARGEST / 5
