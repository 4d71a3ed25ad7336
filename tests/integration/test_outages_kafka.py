"""What happens when Redis or the broker goes away in the middle of work; on services of their own, since they are killed."""

import json
import subprocess
import sys
import threading

import pytest
from cells import Cell
from raw import request, tally
from redis import Redis
from trees import ROOT

from deploy.local import ready
from deploy.local.services import services

AWAY_S = 30.0
REQUESTS, LINES = 2_000, 5_000
ANSWER_S = 150.0
PREFIX = "outages"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A broker and a Valkey that may be killed."""
    with services(tmp_path_factory.mktemp("own"), "kafka") as running:
        yield running


@pytest.fixture(scope="module")
def cell(own, tmp_path_factory):
    """A dispatcher and two workers that answer some hundred requests a second."""
    tables = {
        "kafka": {"bootstrap": own.kafka, "topic_prefix": PREFIX},
        "redis": {"url": own.redis},
        "topics": {"request_partitions": 2, "engine_partitions": 4, "retry_partitions": 1, "lane_partitions": 1},
        "engines": {"sim": {"kind": "sim", "slots": 48, "options": {"ttft_ms": 100, "tpot_ms": 20}}},
    }
    with Cell(tmp_path_factory.mktemp("cell"), tables) as made:
        made.dispatcher("d")
        made.worker("w0")
        made.worker("w1")
        yield made


def mine(cell, idents):
    """The results of these requests; the cell is shared."""
    wanted = set(idents)
    return [one for one in cell.results() if one["request_id"] in wanted]


def must_all_be_completed_once(cell, idents):
    def are_answered():
        return len(tally(mine(cell, idents))) == len(idents)

    ready.until(are_answered, ANSWER_S, f"{len(idents)} requests")
    found = mine(cell, idents)
    assert tally(found) == dict.fromkeys(idents, 1)
    assert [one for one in found if one["status"] != "completed"] == []


def test_redis_away_for_half_a_minute_costs_no_request(own, cell):
    idents = [f"away{n:04d}" for n in range(REQUESTS)]
    cell.produce([request(ident) for ident in idents])
    ready.until(lambda: len(mine(cell, idents)) >= 200, ANSWER_S, "the first answers")
    back = threading.Timer(AWAY_S, own.start_redis)
    own.kill_redis()
    back.start()
    try:
        assert len(mine(cell, idents)) < REQUESTS, "all was over before Redis went: nothing was shown"
    finally:
        back.join()
    must_all_be_completed_once(cell, idents)


def test_redis_flushed_costs_no_request(own, cell):
    idents = [f"flush{n:04d}" for n in range(REQUESTS)]
    cell.produce([request(ident) for ident in idents])
    ready.until(lambda: len(mine(cell, idents)) >= 200, ANSWER_S, "the first answers")
    with Redis.from_url(own.redis) as redis:
        redis.flushall()
    assert len(mine(cell, idents)) < REQUESTS, "all was over before the flush: nothing was shown"
    must_all_be_completed_once(cell, idents)


def test_a_batch_run_goes_on_by_itself_when_the_broker_is_killed_and_comes_back(own, cell, tmp_path):
    source, output, errors = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "err.jsonl"))
    with source.open("w") as file:
        for n in range(LINES):
            body = {"model": "sim", "messages": [{"role": "user", "content": f"About {n}?"}], "max_tokens": 8}
            one = {"custom_id": f"line{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    command = [sys.executable, "-m", "deploy.cli", "batch", "run", str(source), "-o", str(output), "-e", str(errors), "--json"]
    process = subprocess.Popen(
        [*command, "--config", str(cell.path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        ready.until(lambda: ended(output) >= LINES // 5, ANSWER_S, "a fifth of the lines", lambda: must_run(process))
        own.kill_broker()
        reached = ended(output)
        own.start_broker()
        out, told = process.communicate(timeout=ANSWER_S)
    finally:
        process.kill()
    assert reached < LINES, "all was over before the broker went: nothing was shown"
    assert process.returncode == 0, told
    assert "Traceback" not in told
    counts = json.loads(out)
    assert (counts["total"], counts["answered"], counts["errors"]) == (LINES, LINES, 0)
    assert [json.loads(line)["custom_id"] for line in output.read_text().splitlines()] == [f"line{n}" for n in range(LINES)]
    assert errors.read_text() == ""
    found = tally(one for one in cell.results() if not one["request_id"].startswith(("away", "flush")))
    assert len(found) == LINES
    assert set(found.values()) == {1}  # also of lines sent again since their acknowledgement was lost


def ended(output):
    """How many lines have ended, as the journal beside the output says."""
    journal = output.with_name(output.name + ".progress")
    entries = journal.read_bytes().splitlines() if journal.exists() else []
    return sum(entry.startswith((b"O ", b"E ")) for entry in entries)


def must_run(process):
    assert process.poll() is None, process.communicate()[1]
