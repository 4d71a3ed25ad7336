"""The transport's pure parts: the partitioner, turns, plans for topics, and the log's filter."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as stock

from broker.transport import TopicPartition
from broker.transport.kafka.link import client_settings
from broker.transport.kafka.noise import Quiet
from broker.transport.partitioner import murmur2, partition_for
from broker.transport.protocol import Record
from broker.transport.topic_plan import Existing, plan_topic
from broker.transport.turns import take_in_turn
from schemas.config import KafkaConfig
from schemas.errors import ConfigError
from schemas.topics import TopicSpec


@pytest.mark.parametrize(
    ("key", "signed"),
    [  # the vectors of org.apache.kafka.common.utils.UtilsTest
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_javas(key, signed):
    assert murmur2(key) == signed & 0xFFFFFFFF


@given(st.binary(max_size=64), st.integers(1, 1000))
def test_murmur2_is_that_of_stock_clients(key, partitions):
    assert murmur2(key) == stock(key)
    assert 0 <= partition_for(key, partitions) < partitions


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 20), st.integers(1, 120), st.integers(1, 60))
def test_turns_take_all_that_fits_in_order_and_leave_nobody_out(sizes, first, records_max, each_max):
    queues = {
        TopicPartition("t", n): [Record("t", n, offset, None, None, (), 0) for offset in range(size)]
        for n, size in enumerate(sizes)
    }

    def take(tp, most):
        taken, queues[tp] = queues[tp][:most], queues[tp][most:]
        return taken

    taken = take_in_turn(list(queues), first, records_max, take, each_max)
    assert len(taken) == min(records_max, sum(min(size, each_max) for size in sizes))
    for tp, left in queues.items():
        offsets = [r.offset for r in taken if r.partition == tp.partition]
        assert offsets == list(range(len(offsets)))
        assert len(offsets) <= each_max
        if left and records_max >= len(sizes):
            share = min(records_max // len(sizes), each_max)
            assert len(offsets) >= share, "everybody with enough gets at least an equal share"


SPEC = TopicSpec("t", 4, {"retention.ms": "-1"})


def test_a_missing_topic_is_planned_whole():
    plan = plan_topic(SPEC, None, 3, 2)
    assert (plan.create, plan.partitions, plan.settings) == (True, 4, {"retention.ms": "-1", "min.insync.replicas": "2"})
    assert plan.lines == ("created topic t: 4 partitions, replication 3, min.insync.replicas=2, retention.ms=-1",)


def test_a_topic_as_it_should_be_or_larger_needs_nothing():
    plan = plan_topic(SPEC, Existing(9, {"retention.ms": "-1", "min.insync.replicas": "1", "other": "x"}), 1, 1)
    assert (plan.create, plan.partitions, plan.settings, plan.lines) == (False, None, {}, ())


def test_a_topic_is_mended_where_it_differs():
    plan = plan_topic(SPEC, Existing(2, {"retention.ms": "5", "min.insync.replicas": "1"}), 1, 1)
    assert (plan.partitions, plan.settings) == (4, {"retention.ms": "-1"})
    assert plan.lines == ("added partitions to topic t: 2 -> 4", "set retention.ms=-1 on topic t (was 5)")


def test_the_log_filter_lets_one_of_a_kind_through(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("broker.transport.kafka.noise.time.monotonic", lambda: now[0])
    quiet = Quiet()

    def line(template, *args, level=logging.ERROR):
        record = logging.LogRecord("aiokafka.client", level, "", 0, template, args, None)
        return record.getMessage() if quiet.filter(record) else None

    assert line("Unable to update metadata from %s", [1]) == "Unable to update metadata from [1]"
    assert [line("Unable to update metadata from %s", [n]) for n in range(500)] == [None] * 500
    assert line("something else") == "something else"
    assert line("for the curious", level=logging.DEBUG) == "for the curious"
    now[0] = 11
    assert line("Unable to update metadata from %s", [7]) == "Unable to update metadata from [7] (500 more like this)"
    assert line('Unable connect to "%s:%s": %s', "host", 1, "refused") is None
    assert quiet.last_reason == "refused"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"security_protocol": "SASL_PLAINTEXT"}, r"kafka\.sasl_username and kafka\.sasl_password: expected with SASL_PLAINTEXT"),
        ({"security_protocol": "SSL", "ssl_cafile": "/no/such/file.pem"}, r"kafka\.ssl_cafile: cannot read /no/such/file\.pem"),
    ],
)
def test_security_settings_that_cannot_work_stop_the_start(settings, told):
    with pytest.raises(ConfigError, match=told):
        client_settings(KafkaConfig(**settings))


def test_security_settings_reach_the_library():
    config = KafkaConfig(security_protocol="SASL_SSL", sasl_mechanism="SCRAM-SHA-512", sasl_username="u", sasl_password="p")
    settings = client_settings(config)
    assert [settings[f"sasl_{name}"] for name in ("mechanism", "plain_username", "plain_password")] == ["SCRAM-SHA-512", "u", "p"]
    assert settings["ssl_context"].check_hostname
    assert "ssl_context" not in client_settings(KafkaConfig())
