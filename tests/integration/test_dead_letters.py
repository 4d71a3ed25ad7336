"""`forebay dead-letters` as a user runs it, on Apache Kafka: an engine that fails everything, and then a mended one."""

import json
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

COUNT = 300
LIMIT_S = 120


class Cell:
    """A cell of its own on the shared broker, served by whichever processes a test starts."""

    def __init__(self, folder, kafka, prefix):
        self.folder, self.kafka, self.prefix = folder, kafka, prefix

    def config(self, name, options):
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'[kafka]\nbootstrap = "{self.kafka.kafka}"\ntopic_prefix = "{self.prefix}"\n'
            f'[redis]\nurl = "{self.kafka.redis}"\n'
            "[topics]\ndead_letter_partitions = 2\n"
            "[dispatcher]\nretry_backoff_ms = 50\nbreaker = { failures = 1_000_000 }\n"  # it fails because it was told to
            f'[engines.sim]\nkind = "sim"\nslots = 64\noptions = {{ ttft_ms = 5, tpot_ms = 0, {options} }}\n'
        )
        return path

    def command(self, path, *arguments):
        return [sys.executable, "-P", "-m", "deploy.cli", *arguments, "--config", str(path)]

    def forebay(self, path, *arguments, code=0, **more):
        done = subprocess.run(self.command(path, *arguments), capture_output=True, timeout=LIMIT_S, check=False, **more)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done

    def objects(self, path, *arguments, **more):
        return [json.loads(line) for line in self.forebay(path, *arguments, "--json", **more).stdout.splitlines()]

    @contextmanager
    def running(self, path, *arguments):
        log = self.folder / f"{'-'.join(arguments[:1])}.{path.stem}.log"
        with log.open("wb") as out, subprocess.Popen(self.command(path, *arguments), stdout=out, stderr=out) as process:
            try:
                yield
            finally:
                process.terminate()

    def produce(self, *values, topic="requests.batch"):
        producer = KafkaProducer(bootstrap_servers=self.kafka.kafka, acks="all")
        for value in values:
            producer.send(f"{self.prefix}.{topic}", value, headers=[("x-mine", b"1")])
        producer.flush(60)
        producer.close()

    def raw(self, topic):
        """All that read_committed readers see of a topic."""
        name = f"{self.prefix}.{topic}"
        reader = KafkaConsumer(bootstrap_servers=self.kafka.kafka, isolation_level="read_committed", consumer_timeout_ms=3_000)
        reader.assign([TopicPartition(name, n) for n in reader.partitions_for_topic(name)])
        reader.seek_to_beginning()
        records = list(reader)
        reader.close()
        return records


@pytest.fixture
def cell(kafka, tmp_path):
    return Cell(tmp_path, kafka, f"dead{tmp_path.name}")


def request(name):
    return json.dumps({"id": name, "tenant": "alice", "prompt": name, "max_output_tokens": 4}).encode()


def test_list_show_replay_of_a_malformed_record_and_of_one_that_failed(cell):
    broken, mended = cell.config("broken", "fail_every = 1"), cell.config("mended", "fail_every = 0")
    cell.forebay(broken, "topics", "ensure")
    with cell.running(broken, "dispatch"):
        with cell.running(broken, "work", "--engine", "sim"):
            cell.produce(b"not json", request("r1"))
            cell.forebay(broken, "results", "--follow", "--request", "r1", "--timeout", "60")
            bad, failed = sorted(cell.objects(broken, "dead-letters", "list"), key=lambda letter: letter["code"], reverse=True)
        assert (bad["code"], bad["id"], bad["service_class"]) == ("invalid_request", None, "batch")
        assert (failed["code"], failed["id"], failed["tenant"]) == ("internal", "r1", "alice")
        shown = cell.forebay(broken, "dead-letters", "show", "r1").stdout.decode()
        assert "attempt 3 of 3" in shown
        assert shown.count("route ") == 2
        assert cell.forebay(broken, "dead-letters", "show", bad["place"], "--raw").stdout == b"not json"
        with cell.running(mended, "work", "--engine", "sim"):
            (told,) = cell.objects(mended, "dead-letters", "replay", "--all")
            assert (told["place"], told["id"], told["topic"]) == (failed["place"], "r1", f"{cell.prefix}.requests.batch")
            follow = ("results", "--follow", "--timeout", "60", "--replay")
            (result,) = cell.objects(mended, *follow, failed["place"])
            assert (result["request_id"], result["status"]) == ("r1", "completed")
            assert "not JSON" in cell.forebay(mended, "dead-letters", "replay", bad["place"], code=1).stderr.decode()
            cell.forebay(mended, "dead-letters", "replay", bad["place"], "--value", "-", input=request("mended"))
            (result,) = cell.objects(mended, *follow, bad["place"])
            assert (result["request_id"], result["status"]) == ("mended", "completed")
        assert cell.objects(mended, "dead-letters", "list") == []
        assert len(cell.objects(mended, "dead-letters", "list", "--all")) == 2
        assert cell.objects(mended, "dead-letters", "replay", "--all") == []
    found = {(r.value, dict(r.headers).get("forebay-replay")) for r in cell.raw("requests.batch")}
    assert found == {
        (b"not json", None),
        (request("r1"), None),
        (request("r1"), failed["place"].encode()),
        (request("mended"), bad["place"].encode()),
    }
    assert all(dict(r.headers)["x-mine"] == b"1" for r in cell.raw("requests.batch"))


def test_two_replays_at_once_put_each_back_once(cell):
    broken, mended = cell.config("broken", "fail_every = 1"), cell.config("mended", "fail_every = 0")
    cell.forebay(broken, "topics", "ensure")
    names = [f"r{n}" for n in range(COUNT)]
    with cell.running(broken, "dispatch"):
        with cell.running(broken, "work", "--engine", "sim"):
            cell.produce(*(request(name) for name in names))
            ids = [argument for name in names for argument in ("--request", name)]
            cell.forebay(broken, "results", "--follow", "--timeout", "60", *ids)
        both = [
            subprocess.Popen(
                cell.command(mended, "dead-letters", "replay", "--all", "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for _ in range(2)
        ]
        ended = [(*process.communicate(timeout=LIMIT_S), process.returncode) for process in both]
        assert all(code == 0 or b"somebody else puts back" in error for _, error, code in ended), ended
        cell.forebay(mended, "dead-letters", "replay", "--all")
        with cell.running(mended, "work", "--engine", "sim"):
            places = [argument for r in cell.raw("requests.batch") for argument in _followed(r)]
            results = cell.objects(mended, "results", "--follow", "--timeout", "60", *places)
    replayed = Counter(json.loads(r.value)["id"] for r in cell.raw("requests.batch") if _followed(r))
    assert replayed == Counter(names)
    assert Counter(r["request_id"] for r in results if r["status"] == "completed") == Counter(names)
    assert cell.objects(mended, "dead-letters", "list") == []


def _followed(record):
    place = dict(record.headers).get("forebay-replay")
    return [] if place is None else ["--replay", place.decode()]
