"""Text and chunks: stop strings never leak, characters stay whole, chunks keep order and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_consumers.core.stream import Coalescer, StopText, Utf8Text
from schemas.formats import Alternative, TokenLogprob

letters = st.text(alphabet="ab💧", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab💧", min_size=1, max_size=4), max_size=3)


def by_the_book(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read letter by letter; the first moment at which the text ends in a stop string decides, the longest one first."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(letters, stop_lists, st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_stop_strings_end_the_text_whatever_the_chunks(text, stops, sizes):
    wanted, stop = by_the_book(text, stops)
    filtered, shown, at = StopText(stops), "", 0
    for n in range(len(text)):
        size = sizes[n % len(sizes)]
        shown += filtered.push(text[at : at + size])
        assert wanted.startswith(shown), "something of a stop string was shown"
        at += size
    shown += filtered.finish()
    assert (shown, filtered.hit) == (wanted, stop)


def test_only_what_may_become_a_stop_string_is_held_back():
    filtered = StopText(["</end>"])
    assert filtered.push("a</e") == "a"
    assert filtered.push("x") == "</ex"
    assert filtered.push("y</end>z") == "y"
    assert filtered.push("more") == ""
    assert filtered.hit == "</end>"


def test_without_stop_strings_nothing_is_held_back():
    filtered = StopText([])
    assert filtered.push("abc") == "abc"
    assert filtered.finish() == ""


@given(st.text(max_size=30), st.lists(st.integers(1, 3), min_size=1, max_size=8))
def test_characters_stay_whole(text, sizes):
    data, joined, out, at = text.encode("utf-8", "replace"), Utf8Text(), [], 0
    for n in range(len(data)):
        size = sizes[n % len(sizes)]
        out.append(joined.push(data[at : at + size]))
        at += size
    assert "".join(out) == data.decode()


def test_bytes_that_are_no_utf8_are_replaced():
    assert Utf8Text().push(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"


def coalescer(chunk_ms=25, bytes_max=100):
    return Coalescer("q", "000000.000000", chunk_ms, bytes_max)


def test_the_first_piece_goes_at_once_and_the_next_ones_are_gathered():
    chunks = coalescer()
    assert chunks.due_ms is None
    first = chunks.add([1], "a", 1000)
    assert (first.seq, first.token_ids, first.text, first.finish_reason) == (0, [1], "a", None)
    assert chunks.due_ms is None
    assert chunks.add([2], "b", 1010) is None
    assert chunks.due_ms == 1025
    assert chunks.flush(1024) is None
    second = chunks.flush(1025)
    assert (second.seq, second.token_ids, second.text) == (1, [2], "b")
    assert chunks.flush(2000) is None
    last = chunks.finish("stop", 2001)
    assert (last.seq, last.token_ids, last.text, last.finish_reason) == (2, [], "", "stop")


def test_a_piece_after_a_pause_goes_at_once():
    chunks = coalescer()
    chunks.add([1], "a", 0)
    assert chunks.add([2], "b", 25).text == "b"


def test_size_sends_before_time():
    chunks = coalescer(bytes_max=6)
    chunks.add([1], "a", 0)
    assert chunks.add([2], "éé", 1) is None
    assert chunks.add([3], "é", 2).text == "ééé"


def test_tokens_without_text_are_no_first_chunk():
    chunks = coalescer()
    assert chunks.add([1], "", 0) is None
    assert chunks.due_ms is None
    assert chunks.add([2], "💧", 1).token_ids == [1, 2]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=3), letters, st.integers(0, 40)), max_size=20))
def test_chunks_lose_nothing_and_count_without_gaps(pieces):
    chunks, now, sent = coalescer(bytes_max=16), 0, []
    for token_ids, text, pause in pieces:
        now += pause
        sent += [chunk for chunk in (chunks.flush(now), chunks.add(token_ids, text, now)) if chunk]
    sent.append(chunks.finish("length", now))
    assert [chunk.seq for chunk in sent] == list(range(len(sent)))
    assert "".join(chunk.text for chunk in sent) == "".join(text for _, text, _ in pieces)
    assert [t for chunk in sent for t in chunk.token_ids] == [t for token_ids, _, _ in pieces for t in token_ids]
    assert [chunk.finish_reason for chunk in sent[:-1]] == [None] * (len(sent) - 1)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error"])
def test_the_last_chunk_carries_what_waits(reason):
    chunks = coalescer()
    chunks.add([1], "a", 0)
    chunks.add([2], "b", 1)
    last = chunks.finish(reason, 2)
    assert (last.seq, last.token_ids, last.text, last.finish_reason) == (1, [2], "b", reason)


def test_log_probabilities_go_with_their_tokens_and_fill_a_chunk():
    chunks = coalescer(chunk_ms=1_000, bytes_max=200)
    one, wide = TokenLogprob(1, "a", -0.5), TokenLogprob(2, "b", -0.5, [Alternative(3, "c", -1.0)] * 3)
    assert chunks.add([1], "a", 0, [one]).logprobs == [one]
    assert chunks.add([1], "a", 1, [one]) is None
    assert chunks.add([2], "b", 2, [wide]).logprobs == [one, wide]
    assert chunks.finish("stop", 3).logprobs == []
