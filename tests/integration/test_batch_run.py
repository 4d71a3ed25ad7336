"""`forebay batch run` as a user runs it, on Apache Kafka with the sim engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from kafka import KafkaConsumer, TopicPartition

from deploy.local import ready

GOOD = 100
WAIT_S = 90


def line(custom_id, **body):
    body = {"model": "sim", "messages": [{"role": "user", "content": f"About {custom_id}?"}], "max_tokens": 24, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def write_input(folder, salt):
    """A hundred good lines, five bad ones of different kinds, and a prompt beyond the context."""
    folder.mkdir()
    lines = [line(f"{salt}-{n}") for n in range(GOOD)]
    lines.insert(10, "{not json")
    lines.insert(30, line("several", n=3))
    lines.insert(50, line(f"{salt}-7"))
    lines.insert(70, json.dumps({"custom_id": "embed", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}))
    lines.insert(90, line("hot", temperature=9))
    lines.append(line("long", messages=[{"role": "user", "content": "word " * 8_000}]))
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


BAD = {11: None, 31: "several", 51: "{salt}-7", 71: "embed", 91: "hot", 106: "long"}


def arguments(folder, *more):
    return ["batch", "run", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "-e", str(folder / "err.jsonl"), *more]


def outputs(folder):
    """Output and error lines without the moments of answering."""
    answered, errors = [[json.loads(x) for x in (folder / name).read_text().splitlines()] for name in ("out.jsonl", "err.jsonl")]
    for entry in answered:
        entry["response"]["body"].pop("created")
    return answered, errors


def results_with(stack, prefix):
    """How many raw read_committed results each id of a run has."""
    reader = KafkaConsumer(
        bootstrap_servers=stack.kafka, isolation_level="read_committed", enable_auto_commit=False, consumer_timeout_ms=3_000
    )
    partitions = [TopicPartition("forebay.results", n) for n in reader.partitions_for_topic("forebay.results")]
    reader.assign(partitions)
    reader.seek_to_beginning()
    found = Counter(record.key for record in reader if record.key and record.key.startswith(prefix))
    reader.close()
    return found


def started(stack, folder, *more):
    environment = {**os.environ, "FOREBAY_HOME": str(stack.home)}
    argv = [sys.executable, "-m", "deploy.cli", *arguments(folder, *more)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def has_ended(folder, count):
    """Whether the journal holds so many ends of lines."""
    progress = folder / "out.jsonl.progress"
    entries = progress.read_bytes().splitlines() if progress.exists() else []
    return sum(entry.startswith((b"O ", b"E ")) for entry in entries) >= count


def test_a_file_with_good_bad_and_overlong_lines(sim_stack, tmp_path):
    folder = tmp_path / "run"
    write_input(folder, "whole")
    done = sim_stack.forebay(*arguments(folder, "--json"), check=False)
    assert done.returncode == 1, done.stderr
    counts = json.loads(done.stdout)
    assert (counts["total"], counts["answered"], counts["errors"]) == (106, 100, 6)
    assert "Traceback" not in done.stderr
    assert "106 of 106 lines (100 %)" in done.stderr
    answered, errors = outputs(folder)
    assert [entry["custom_id"] for entry in answered] == [f"whole-{n}" for n in range(GOOD)]
    assert all(entry["response"]["body"]["usage"]["completion_tokens"] == 24 for entry in answered)
    assert {entry["error"]["line"]: entry["custom_id"] for entry in errors} == {
        number: custom_id and custom_id.format(salt="whole") for number, custom_id in BAD.items()
    }
    assert all(entry["error"]["message"].startswith(f"line {entry['error']['line']}: ") for entry in errors)
    assert errors[-1]["error"]["code"] == "context_overflow"
    again = sim_stack.forebay(*arguments(folder), check=False)
    assert again.returncode == 1
    assert "finished before" in again.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_interrupted_half_way_gives_the_same_files(sim_stack, tmp_path, number, code):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        write_input(folder, f"halves{number}")
    first = started(sim_stack, halves, "--max-in-flight", "10")
    ready.until(lambda: has_ended(halves, 50), WAIT_S, "the run to be half done")
    first.send_signal(number)
    _, told = first.communicate(timeout=30)
    assert first.returncode == code, told
    assert "Traceback" not in told
    if number != signal.SIGKILL:
        assert told.splitlines()[-1].startswith("stopped: ")
        assert "run the same command again to go on" in told
    assert not (halves / "out.jsonl").exists()
    prefix = (halves / "out.jsonl.progress").read_bytes().partition(b'"id":"batch_req_')[2].partition(b'"')[0][:-6]
    second = sim_stack.forebay(*arguments(halves, "--max-in-flight", "10"), check=False)
    assert second.returncode == 1, second.stderr
    runs = results_with(sim_stack, prefix)
    assert len(runs) == GOOD + 1  # the over-long prompt is for the engine to judge
    if number != signal.SIGKILL:
        assert set(runs.values()) == {1}
    assert sim_stack.forebay(*arguments(whole), check=False).returncode == 1
    assert outputs(halves) == outputs(whole)


def test_no_kafka_is_one_line_in_time(tmp_path, sim_stack):
    folder = tmp_path / "run"
    write_input(folder, "away")
    began = time.monotonic()
    done = sim_stack.forebay(*arguments(folder), check=False, env={"FOREBAY_KAFKA__BOOTSTRAP": "127.0.0.1:9"})
    assert time.monotonic() - began < 15
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("forebay: ")
    assert "127.0.0.1:9" in done.stderr
    assert sim_stack.forebay(*arguments(folder), check=False).returncode == 1  # and nothing stands in the way later
    assert len(outputs(folder)[0]) == GOOD


def test_a_broker_that_stands_still_is_told_in_time_and_the_run_goes_on_by_itself(sim_stack, tmp_path):
    folder = tmp_path / "run"
    write_input(folder, "outage")
    broker = next(one["pid"] for one in sim_stack.status()["programs"] if one["name"] == "kafka-broker")
    with started(sim_stack, folder, "--max-in-flight", "5", "--json") as run:
        ready.until(lambda: has_ended(folder, 20), WAIT_S, "the run to be on its way")
        os.kill(broker, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            while "cannot reach Kafka at" not in (said := run.stderr.readline()):
                assert said, "the run ended"
            told_s = time.monotonic() - stopped
        finally:
            os.kill(broker, signal.SIGCONT)
        out, rest = run.communicate(timeout=WAIT_S)
    assert told_s < 15
    assert "waiting for it up to 600 s (--absence)" in said
    assert "answers again: going on" in rest
    assert run.returncode == 1, rest
    counts = json.loads(out)
    assert (counts["answered"], counts["errors"]) == (GOOD, len(BAD))
    assert [entry["custom_id"] for entry in outputs(folder)[0]] == [f"outage-{n}" for n in range(GOOD)]
