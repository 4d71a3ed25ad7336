"""Headers, identifiers, topics and the error taxonomy."""

import pytest
from ulid import ULID

from schemas import ErrorCode, Topics, headers, ids, parse_config


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (b"\x00\x00\x00\x05", 5),
        (b"\x00\x00\x01\x00", 256),
        (b"\x05", 5),
        (b"\xff\xff\xff\xff", -1),
        (b"\x7f\xff\xff\xff\xff\xff\xff\xff", 2**63 - 1),
        (b"", None),
        (b"\x00" * 9, None),
    ],
)
def test_numbers_are_big_endian(raw, number):
    assert headers.number(raw) == number


def test_a_number_is_written_as_spring_writes_it():
    assert headers.pack_number(3) == b"\x00\x00\x00\x03"


def test_of_a_header_given_twice_the_last_counts():
    given = (("a", b"1"), ("b", b"2"), ("a", b"3"))
    assert headers.get(given, "a") == b"3"
    assert headers.get(given, "A") is None
    assert headers.without(given, "a") == (("b", b"2"),)


def test_a_header_that_is_no_text_is_read_all_the_same():
    assert headers.text((("a", b"x\xff"),), "a") == "x\ufffd"
    assert headers.text((), "a") is None


def test_a_record_always_gets_the_same_id_and_no_two_share_one():
    places = [(topic, partition, offset) for topic in ("t", "t1") for partition in range(12) for offset in range(12)]
    made = [ids.derived_id(*place, 1_700_000_000_000) for place in places]
    assert made == [ids.derived_id(*place, 1_700_000_000_000) for place in places]
    assert len(set(made)) == len(places)
    assert made[0] == "01HF7YAT00ZH4D6KA98G3KM69E"
    assert all(ULID.from_str(one).milliseconds == 1_700_000_000_000 for one in made)


def test_derived_ids_sort_by_time_and_take_any_timestamp():
    stamps = [-1, 0, 1, 1_700_000_000_000, 2**48 - 1, 2**63 - 1]
    made = [ids.derived_id("t", 0, 0, stamp) for stamp in stamps]
    assert made == sorted(made)
    assert all(len(one) == 26 for one in made)


def test_a_seed_is_derived_from_the_id_alone():
    assert ids.derived_seed("a") == ids.derived_seed("a") != ids.derived_seed("b")
    assert all(0 <= ids.derived_seed(str(n)) < 2**31 for n in range(1_000))


def test_fresh_ids_differ():
    assert len({ids.new_id() for _ in range(1_000)}) == 1_000


def test_a_cell_has_its_own_topics_and_groups():
    one, other = Topics("forebay"), Topics("forebay2")
    names = [[spec.name for spec in topics.specs(parse_config({}).topics, ["a", "b"])] for topics in (one, other)]
    assert not set(names[0]) & set(names[1])
    assert len(names[0]) == len(set(names[0])) == 10
    assert all(one.is_internal(name) and not one.is_internal(other_name) for name, other_name in zip(*names, strict=True))
    assert one.is_internal("__consumer_offsets")
    assert not one.is_internal("acme.replies")


def test_nothing_that_waits_expires():
    topics = Topics()
    specs = {spec.name: spec for spec in topics.specs(parse_config({"topics": {"engine_partitions": 3}}).topics, ["p"])}
    for name in (
        topics.requests("interactive"),
        topics.requests("batch"),
        topics.retries,
        topics.lanes,
        topics.engine("p"),
        topics.control,
    ):
        assert specs[name].settings["retention.ms"] == "-1"
    assert specs[topics.engine("p")].partitions == 3
    assert specs[topics.control].partitions == 1
    assert specs[topics.results].partitions == specs[topics.streams].partitions, "a result and its chunks share a partition"


def test_requests_and_cancels_bear_the_brokers_time():
    topics = Topics()
    specs = {spec.name: spec.settings for spec in topics.specs(parse_config({}).topics, ["p"])}
    for name in (topics.requests("interactive"), topics.requests("batch"), topics.control):
        assert specs[name]["message.timestamp.type"] == "LogAppendTime"


def test_the_taxonomy_is_the_documented_one():
    assert {code.value for code in ErrorCode if code.retryable} == {
        "capacity_exceeded",
        "unhealthy",
        "timeout",
        "internal",
        "preempted",
    }
    assert {code.value for code in ErrorCode if not code.retryable} == {
        *("invalid_request", "context_overflow", "model_not_found", "unsupported_feature", "cancelled", "expired", "poison")
    }
    assert not any(code.retryable and code.is_client_fault for code in ErrorCode)
