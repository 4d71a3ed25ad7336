"""What a program with a stock Kafka client sees: kafka-python, plain JSON, read_committed."""

import json
import os
import signal
import struct
import time
from collections import Counter
from itertools import count

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

LIMIT_S = 180
batches = count()


def producer_of(stack):
    return KafkaProducer(bootstrap_servers=stack.kafka, acks="all", linger_ms=5)


class Results:
    """Everything on a topic, raw, as a read_committed reader sees it."""

    def __init__(self, stack, topic="forebay.results"):
        self.consumer = KafkaConsumer(
            bootstrap_servers=stack.kafka,
            isolation_level="read_committed",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
        )
        partitions = [TopicPartition(topic, n) for n in sorted(self.consumer.partitions_for_topic(topic))]
        self.consumer.assign(partitions)
        self.records = []

    def until(self, prefix, expected):
        """Read until as many different ids of the prefix came, and then until nothing more comes."""
        deadline, quiet = time.monotonic() + LIMIT_S, 0
        while time.monotonic() < deadline and quiet < 3:
            found = [r for batch in self.consumer.poll(timeout_ms=700).values() for r in batch]
            self.records += found
            enough = len({i for i in self.ids() if i.startswith(prefix)}) >= expected
            quiet = quiet + 1 if enough and not found else 0
        return [json.loads(r.value) for r in self.records if r.key.decode().startswith(prefix)]

    def ids(self):
        return [r.key.decode() for r in self.records]


def send(stack, prefix, number, topic="forebay.requests.batch", **fields):
    producer = producer_of(stack)
    for n in range(number):
        body = {"id": f"{prefix}{n}", "tenant": f"tenant-{n % 5}", "prompt": f"Say {n}.", "max_output_tokens": 8, **fields}
        producer.send(topic, json.dumps(body).encode())
    producer.flush(60)
    producer.close()


def test_fifty_requests_of_five_tenants_get_one_result_each(sim_stack):
    prefix = f"fifty{next(batches)}-"
    send(sim_stack, prefix, 50, topic="forebay.requests.interactive")
    results = Results(sim_stack).until(prefix, 50)
    assert Counter(r["request_id"] for r in results) == Counter(f"{prefix}{n}" for n in range(50))
    assert {r["status"] for r in results} == {"completed"}
    assert Counter(r["tenant"] for r in results) == {f"tenant-{n}": 10 for n in range(5)}
    assert all(r["usage"]["output_tokens"] == 8 and r["engine"] == "sim" for r in results)


def test_two_thousand_requests_and_no_duplicate_among_the_raw_records(sim_stack):
    prefix = f"many{next(batches)}-"
    send(sim_stack, prefix, 2_000)
    results = Results(sim_stack).until(prefix, 2_000)
    assert Counter(r["request_id"] for r in results) == Counter(f"{prefix}{n}" for n in range(2_000))
    assert {r["status"] for r in results} == {"completed"}


def test_two_thousand_requests_and_a_worker_killed_in_the_middle(sim_stack):
    prefix = f"kill{next(batches)}-"
    reader = Results(sim_stack)
    send(sim_stack, prefix, 2_000)
    reader.until(prefix, 200)
    victim = sim_stack.status()["engines"][0]["workers"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    results = reader.until(prefix, 2_000)
    assert Counter(r["request_id"] for r in results) == Counter(f"{prefix}{n}" for n in range(2_000))
    assert {r["status"] for r in results} == {"completed"}


def test_malformed_records_are_dead_letters_and_the_stream_goes_on(sim_stack):
    prefix = f"bad{next(batches)}-"
    huge = json.dumps({"id": f"{prefix}huge", "prompt": "x" * 8_100_000}).encode()
    bad = [b"not json", json.dumps({"id": f"{prefix}type", "prompt": 5}).encode(), b"[1, 2]", huge]
    producer = KafkaProducer(bootstrap_servers=sim_stack.kafka, acks="all", max_request_size=8_300_000)
    for value in bad:
        producer.send("forebay.requests.interactive", value)
    producer.flush(60)
    send(sim_stack, prefix, 5, topic="forebay.requests.interactive")
    statuses = {r["request_id"]: r["status"] for r in Results(sim_stack).until(prefix, 7)}
    completed = {f"{prefix}{n}": "completed" for n in range(5)}
    assert statuses == {f"{prefix}huge": "rejected", f"{prefix}type": "rejected", **completed}
    reader = Results(sim_stack, "forebay.dead-letters")
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and len(reader.records) < len(bad):
        reader.records += [r for batch in reader.consumer.poll(timeout_ms=500).values() for r in batch]
    dead = {r.value: dict(r.headers) for r in reader.records}
    assert set(bad) <= set(dead)
    assert b"not JSON" in dead[b"not json"]["forebay-reason"]
    assert dead[b"not json"]["forebay-original-topic"] == b"forebay.requests.interactive"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers_and_its_neighbours_are_answered(sim_stack):
    prefix = f"long{next(batches)}-"
    send(sim_stack, prefix, 3)
    send(sim_stack, f"{prefix}x", 1, prompt="word " * 9_000)
    send(sim_stack, f"{prefix}y", 3)
    results = {r["request_id"]: r for r in Results(sim_stack).until(prefix, 7)}
    refused = results.pop(f"{prefix}x0")
    assert (refused["status"], refused["error"]["code"]) == ("rejected", "context_overflow")
    assert "11250" in refused["error"]["message"]
    assert "4096" in refused["error"]["message"]
    assert {r["status"] for r in results.values()} == {"completed"}


def test_request_and_reply_as_spring_does_it(sim_stack):
    prefix = f"reply{next(batches)}-"
    admin = KafkaAdminClient(bootstrap_servers=sim_stack.kafka)
    admin.create_topics([NewTopic(f"{prefix}mine.replies", 2, 1)])
    admin.close()
    producer = producer_of(sim_stack)
    body = json.dumps({"id": f"{prefix}0", "prompt": "Hello", "max_output_tokens": 4}).encode()
    correlation = b"\x00\x01\xfe\xff"

    def ask(topic, value):
        headers = [
            ("kafka_correlationId", correlation),
            ("kafka_replyTopic", topic.encode()),
            ("kafka_replyPartition", struct.pack(">i", 1)),
        ]
        producer.send("forebay.requests.interactive", value, headers=headers)

    ask(f"{prefix}mine.replies", body)
    ask(f"{prefix}gone.replies", body.replace(b"-0", b"-1"))
    ask("__consumer_offsets", body.replace(b"-0", b"-2"))
    producer.flush(30)
    by_id = {r["request_id"]: r for r in Results(sim_stack).until(prefix, 3)}
    assert by_id[f"{prefix}0"]["status"] == "completed"
    assert "does not exist" in by_id[f"{prefix}1"]["error"]["message"]
    assert "not allowed" in by_id[f"{prefix}2"]["error"]["message"]
    (reply,) = _replies(sim_stack, f"{prefix}mine.replies")
    assert reply.partition == 1
    assert dict(reply.headers)["kafka_correlationId"] == correlation
    assert json.loads(reply.value)["request_id"] == f"{prefix}0"


def _replies(stack, topic):
    reader = Results(stack, topic)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not reader.records:
        reader.records += [r for batch in reader.consumer.poll(timeout_ms=500).values() for r in batch]
    return reader.records
