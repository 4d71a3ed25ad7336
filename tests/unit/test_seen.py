"""The table of requests seen lately, and how a request is named in it."""

import pytest

from broker.transport.protocol import Record
from dispatcher.core.admission import admit, readmit
from dispatcher.core.seen import Seen, key_of
from schemas import codecs, headers

FIRST, SECOND = ("requests", 0, 7), ("requests", 1, 7)
KEY = b"k" * 16


def test_another_record_inside_the_window_is_a_repeat_and_the_same_one_never_is():
    seen = Seen(1_000, 10)
    assert not seen.is_repeat(KEY, FIRST, 0)
    seen.remember(KEY, FIRST, 0)
    assert not seen.is_repeat(KEY, FIRST, 1)
    assert seen.is_repeat(KEY, SECOND, 999)
    assert seen.first(KEY, 999).origin == FIRST
    assert not seen.is_repeat(KEY, SECOND, 1_000)
    assert seen.first(KEY, 1_000) is None


@pytest.mark.parametrize("origin", [("other", 0, 7), ("requests", 1, 7), ("requests", 0, 8), ("requests", 0, 2**62)])
def test_origins_are_told_apart_by_each_of_their_parts(origin):
    seen = Seen(1_000, 10)
    seen.remember(KEY, FIRST, 0)
    assert seen.is_repeat(KEY, origin, 0)
    seen.remember(b"o" * 16, origin, 0)
    assert seen.first(b"o" * 16, 0).origin == origin


def test_a_window_of_nothing_remembers_nothing():
    seen = Seen(0, 10)
    seen.remember(KEY, FIRST, 0)
    assert not seen.is_repeat(KEY, SECOND, 0)
    assert len(seen) == 0


def test_the_oldest_go_when_there_are_too_many_and_when_their_time_is_over():
    seen = Seen(1_000, 3)
    for n in range(5):
        seen.remember(bytes([n]), ("requests", 0, n), n)
    assert [seen.first(bytes([n]), 5) is not None for n in range(5)] == [False, False, True, True, True]
    seen.remember(KEY, FIRST, 1_003)
    assert len(seen) == 2


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_anew_keeps_nobody_from_running_for_longer_than_the_window(step_ms):
    seen = Seen(1_000, 10)
    seen.remember(KEY, FIRST, 10_000_000)
    assert not seen.is_repeat(KEY, SECOND, 10_000_000 + step_ms)
    assert seen.is_repeat(KEY, SECOND, 10_000_000 - 5)  # a small step back is none


ADDRESS = [headers.REPLY_TOPIC, headers.REPLY_PARTITION, headers.CORRELATION_ID, headers.RESULT_PARTITION, headers.CLIENT]


def test_tenant_id_and_each_part_of_the_address_name_a_request_and_nothing_else_does():
    plain = key_of("t", "r", ())
    others = [key_of("u", "r", ()), key_of("t", "s", ())]
    others += [key_of("t", "r", ((name, b"x"),)) for name in ADDRESS]
    others += [key_of("t", "r", ((name, b""),)) for name in ADDRESS]
    others += [key_of("t", "r", ((headers.CLIENT, b"xy"),)), key_of("t", "r", ((ADDRESS[0], b"x"), (ADDRESS[1], b"y")))]
    assert len({plain, *others}) == 1 + len(others)
    assert key_of("t", "r", ((headers.CONTENT_TYPE, b"x"), (headers.TRACEPARENT, b"y"), ("mine", b"z"))) == plain


def record(value, *more, topic="requests"):
    return Record(topic, 1, 7, None, value, more, 1_000)


def test_only_a_clients_own_record_with_an_id_of_its_own_is_looked_at():
    named, nameless = b'{"id":"r","tenant":"t","prompt":"a"}', b'{"tenant":"t","prompt":"a"}'
    item = admit(record(named), "batch", 1_000)
    assert item.seen_key == key_of("t", "r", ())
    assert admit(record(nameless), "batch", 1_000).seen_key is None
    assert admit(record(named, (headers.REPLAY, b"")), "batch", 1_000).seen_key is None
    again = record(named, (headers.ENVELOPE, codecs.encode_envelope(item.envelope)), topic="retries")
    assert readmit(again).seen_key is None
