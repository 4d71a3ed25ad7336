"""The reader's rule for streams: the newest run counts, nothing twice, the result completes."""

from hypothesis import given
from hypothesis import strategies as st

from broker import StreamRestarted
from broker.assembly import Assembly
from schemas import InferenceResult, TokenChunk
from schemas.formats import TokenLogprob


def likely(text):
    return [TokenLogprob(ord(c), c, -1.0) for c in text]


def chunks(run, *texts, end="stop", first=0):
    made = [TokenChunk("r", run, first + n, [ord(c) for c in t], t, logprobs=likely(t)) for n, t in enumerate(texts)]
    if end:
        made.append(TokenChunk("r", run, first + len(texts), [], "", end))
    return made


def result(text, run="1", status="completed"):
    said = {"output_text": text, "output_tokens": [ord(c) for c in text], "logprobs": likely(text)}
    return InferenceResult("r", status, run_id=run, finish_reason="stop", **said)


def play(*events):
    """What a reader makes of it: text, tokens and number of restarts, as someone who prints would keep them."""
    assembly, text, tokens, logprobs, restarts = Assembly("r"), "", [], [], 0
    for event in events:
        for item in assembly.result(event) if isinstance(event, InferenceResult) else assembly.chunk(event):
            if isinstance(item, StreamRestarted):
                text, tokens, logprobs, restarts = "", [], [], restarts + 1
            else:
                text, tokens, logprobs = text + item.text, tokens + item.token_ids, logprobs + item.logprobs
    assert tokens == [ord(c) for c in text]
    assert logprobs == likely(text)
    return text, restarts


def test_chunks_are_given_as_they_come_and_the_result_adds_nothing():
    assert play(*chunks("1", "ab", "cd"), result("abcd")) == ("abcd", 0)


def test_a_run_that_was_given_up_is_dropped_and_the_newer_one_goes_on_without_repeating():
    old, new = chunks("1", "ab", "cd", end=None), chunks("2", "a", "bc", "def")
    assert play(*old, *new, result("abcdef", "2")) == ("abcdef", 0)
    late = chunks("1", "XX", end=None, first=1)
    assert play(*old, new[0], *late, *new[1:], result("abcdef", "2")) == ("abcdef", 0)


def test_a_newer_run_that_says_something_else_restarts_the_stream():
    assert play(*chunks("1", "abc", end=None), *chunks("2", "a", "xy"), result("axy", "2")) == ("axy", 1)


def test_a_newer_run_that_ends_sooner_restarts_the_stream():
    assert play(*chunks("1", "abcdef", end=None), *chunks("2", "abc"), result("abc", "2")) == ("abc", 1)


def test_lost_and_repeated_chunks_are_completed_from_the_result():
    one, two, three, end = chunks("1", "ab", "cd", "ef")
    assert play(one, three, end, result("abcdef")) == ("abcdef", 0)
    assert play(one, one, two, one, result("abcdef")) == ("abcdef", 0)
    assert play(result("abcdef")) == ("abcdef", 0)


def test_a_failed_result_without_output_adds_nothing():
    assert play(*chunks("1", "ab", end=None), InferenceResult("r", "failed")) == ("ab", 0)


@given(st.data())
def test_whatever_is_lost_repeated_or_superseded_the_text_is_the_result(data):
    runs = data.draw(st.lists(st.lists(st.text("ab", max_size=3), max_size=5), min_size=1, max_size=4))
    events = [c for n, texts in enumerate(runs) for c in chunks(str(n), *texts)]
    kept = data.draw(st.lists(st.sampled_from(events), max_size=len(events) * 2))
    kept.sort(key=lambda c: (c.run_id, c.seq) if data.draw(st.booleans()) else ("0", 0))
    text = "".join(runs[-1])
    assert play(*kept, result(text, str(len(runs) - 1)))[0] == text
