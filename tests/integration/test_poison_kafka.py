"""A request that kills whoever runs it, among five hundred that do not: on Apache Kafka, with workers that really die."""

import json
import os
import subprocess
import time

from cells import CLI, Cell, toml
from raw import request, tally
from trees import ROOT

from deploy.local import ready

REQUESTS, AT = 500, 250
LIMIT_S = 120.0
WORKERS = ("w0", "w1")
SECRET = "open sesame"


def tables(services, name, **options):
    return {
        "kafka": {
            "bootstrap": services.kafka,
            "topic_prefix": name,
            "session_timeout_ms": 1_500,
            "heartbeat_ms": 300,
            "rebalance_timeout_ms": 1_000,
        },
        "redis": {"url": services.redis},
        "topics": {"request_partitions": 2, "engine_partitions": 4, "retry_partitions": 1, "lane_partitions": 1},
        "engines": {"sim": {"kind": "sim", "slots": 16, "options": {"ttft_ms": 100, "tpot_ms": 5, **options}}},
    }


def revive(cell):
    """Start each worker that has died again; give how many had."""
    dead = [name for name in WORKERS if cell.processes[name].exit_code is not None]
    for name in dead:
        cell.worker(name)
    return len(dead)


def test_one_poison_request_among_five_hundred_ends_alone_and_can_be_put_back(kafka, tmp_path):
    name = f"poison-{os.getpid()}-{time.time_ns() // 1_000_000}"
    idents = [f"p{n:03d}" for n in range(REQUESTS)]
    culprit = idents[AT]
    with Cell(tmp_path, tables(kafka, name, kill_on=SECRET)) as cell:
        cell.dispatcher("d")
        for worker in WORKERS:
            cell.worker(worker)
        cell.produce([request(ident, **({"prompt": SECRET} if ident == culprit else {})) for ident in idents])
        deaths, results = 0, []

        def is_over():
            nonlocal deaths
            deaths += revive(cell)
            results[:] = cell.results()
            return len(tally(results)) == REQUESTS

        ready.until(is_over, LIMIT_S, f"{REQUESTS} requests, one of which kills")
        assert tally(results) == dict.fromkeys(idents, 1)
        (failed,) = [one for one in results if one["status"] != "completed"]
        assert (failed["request_id"], failed["status"], failed["error"]["code"]) == (culprit, "failed", "poison")
        counted = cell.config.worker.poison_crashes
        assert f"died {counted} times" in failed["error"]["message"]
        # whoever a partition is just taken from may still die of the request, which is not counted
        assert counted <= deaths <= 2 * counted
        (letter,) = cell.dead_letters()
        headers = dict(letter.headers)
        assert (letter.key, headers["forebay-error-code"]) == (culprit.encode(), b"poison")
        assert json.loads(letter.value)["prompt"] == SECRET

        cell.path.write_text(toml(tables(kafka, name)), encoding="utf-8")  # the engine is mended
        cell.stop(*WORKERS)
        for worker in WORKERS:
            cell.worker(worker)
        replay = [*CLI, "dead-letters", "replay", culprit, "--config", str(cell.path)]
        done = subprocess.run(replay, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        ready.until(lambda: tally(cell.results())[culprit] == 2, LIMIT_S, "the one that was put back")
        cell.stop()
        assert tally(cell.results()) == {**dict.fromkeys(idents, 1), culprit: 2}
        last = [one for one in cell.results() if one["request_id"] == culprit][-1]
        assert last["status"] == "completed"
