"""Traces of both formats, and what is said of bad ones: one line with the file and the line."""

import json

import pytest

from deploy.simulate.errors import TraceError
from deploy.simulate.trace_files import SHIPPED, find_trace, read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
NEXT = "2023-11-16 18:15:50.9951690,396,109\n"


@pytest.fixture
def write(tmp_path):
    def make(text, name="trace"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def mooncake(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def line(ms, given=10, said=5, **more):
    return {"timestamp": ms, "input_length": given, "output_length": said, **more}


def test_azure_is_read_by_its_columns_wherever_they_stand(write):
    trace = read_trace(write(HEAD + ROW + NEXT + "2023-11-16 18:15:51,1,0\n"))
    assert list(trace.at_ms) == pytest.approx([0, 4314.579, 4319.41], abs=0.01)
    assert list(trace.input_tokens) == [374, 396, 1]
    assert list(trace.output_tokens) == [44, 109, 1]  # an answer of nothing ends with its first token
    other = read_trace(
        write(
            "GeneratedTokens,Model,TIMESTAMP,ContextTokens\n5,x,2024-05-10 00:00:00.5+00:00,7\n6,y,2024-05-10 00:00:01+00:00,8\n"
        )
    )
    assert (list(other.input_tokens), list(other.output_tokens), list(other.at_ms)) == ([7, 8], [5, 6], [0, 500])


def test_mooncake_is_read(write):
    trace = read_trace(write(mooncake(line(3_000, 10, 5, hash_ids=[1, 2]), line(3_000), line(4_000.5, 99, 1))))
    assert (list(trace.at_ms), list(trace.input_tokens), list(trace.output_tokens)) == ([0, 0, 1000.5], [10, 10, 99], [5, 5, 1])


def test_a_round_ends_one_mean_gap_after_its_last_request(write):
    assert read_trace(write(mooncake(line(0), line(100), line(400)))).span_ms == 600


def test_the_shipped_trace_is_whole():
    trace = read_trace(SHIPPED["azure_conv"])
    assert len(trace) == 19_366
    assert sum(trace.input_tokens) / len(trace) == pytest.approx(1154.7, abs=0.1)
    assert sum(trace.output_tokens) / len(trace) == pytest.approx(211.1, abs=0.1)
    licence = SHIPPED["azure_conv"].with_name("LICENSE-azure-CC-BY-4.0.txt")
    assert "Attribution 4.0 International" in licence.read_text(encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("", 1, "expected the columns TIMESTAMP, ContextTokens, GeneratedTokens or lines of JSON: TIMESTAMP is missing"),
        ("TIMESTAMP,ContextTokens\n", 1, "GeneratedTokens is missing"),
        (HEAD + ROW + "2023-11-16 18:15:50.99,39", 3, "expected 3 columns, got 2"),
        (HEAD + ROW + "soon,1,1\n", 3, "TIMESTAMP: expected a time such as 2023-11-16 18:15:46.68, got 'soon'"),
        (HEAD + "2023-11-16 18:15:50,nan,1\n", 2, "ContextTokens: expected a whole number from 1 to 2147483647, got 'nan'"),
        (HEAD + "2023-11-16 18:15:50,-3,1\n", 2, "ContextTokens: expected a whole number from 1 to 2147483647, got '-3'"),
        (HEAD + "2023-11-16 18:15:50,3,-1\n", 2, "GeneratedTokens: expected a whole number from 0 to 2147483647, got '-1'"),
        (HEAD + "2023-11-16 18:15:50,1.5,1\n", 2, "ContextTokens: expected a whole number"),
        (HEAD + "2023-11-16 18:15:50,inf,1\n", 2, "ContextTokens: expected a whole number"),
        (HEAD + "2023-11-16 18:15:50,1e99,1\n", 2, "ContextTokens: expected a whole number"),
        (HEAD + NEXT + ROW, 3, "it came before the line above: sort the trace by time"),
        (mooncake(line(1)) + '{"timestamp": 5, "inp', 2, "not JSON: Input data was truncated"),
        (mooncake(line(1)) + "[]\n", 2, "expected an object with timestamp, input_length, output_length"),
        (mooncake({"timestamp": 1, "input_length": 2}), 1, "output_length is missing"),
        (mooncake(line(1), line("2")), 2, "timestamp: expected milliseconds, got '2'"),
        (mooncake(line(1), line(2, given=True)), 2, "input_length: expected a whole number"),
        (mooncake(line(1), line(2, given=None)), 2, "input_length: expected a whole number"),
        (mooncake(line(1), line(2, said=-7)), 2, "output_length: expected a whole number from 0 to 2147483647, got '-7'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', 1, "not JSON"),
    ],
)
def test_a_bad_trace_is_one_line_with_the_place(write, text, at, said):
    path = write(text)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    told = str(refused.value)
    assert told.startswith(f"{path}:{at}: ")
    assert said in told
    assert "\n" not in told


@pytest.mark.parametrize("text", [HEAD, HEAD + ROW, HEAD + ROW + ROW, mooncake(line(5))])
def test_too_few_requests_are_no_trace(write, text):
    path = write(text)
    with pytest.raises(TraceError, match=r"expected two requests at least, at different times"):
        read_trace(path)


def test_what_is_no_text_and_what_is_not_there(tmp_path):
    (tmp_path / "bytes").write_bytes(b"TIMESTAMP,\xff\xfe")
    with pytest.raises(TraceError, match=r"bytes: .*utf-8"):
        read_trace(tmp_path / "bytes")
    with pytest.raises(TraceError, match="no such trace: give a file, or one of azure_conv"):
        read_trace(tmp_path / "gone")
    with pytest.raises(TraceError):
        read_trace(tmp_path)


def test_a_trace_is_found_by_name_beside_the_scenario_and_as_a_path(tmp_path):
    (tmp_path / "mine.csv").write_text("")
    assert find_trace("azure_conv") == SHIPPED["azure_conv"]
    assert find_trace("mine.csv", tmp_path) == tmp_path / "mine.csv"
    assert str(find_trace("else/mine.csv", tmp_path)) == "else/mine.csv"
