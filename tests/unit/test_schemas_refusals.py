"""Every value that is refused gives one line, which begins with the path of the field at fault."""

import json
from datetime import UTC, datetime

import msgspec
import pytest

from schemas import InferenceRequest, InvalidMessage, Sampling, codecs, headers
from schemas.faults import REREAD_BYTES_MAX, TEXT_CHARS_MAX
from schemas.messages import Envelope

PROMPT = {"prompt": "p"}
MESSAGE = {"role": "user", "content": "hello"}

FIELDS = [  # a value, the path at fault, a part of what is said
    (PROMPT | {"n": 2}, "n", "unknown field"),
    (PROMPT | {"sampling": {"best_of": 5}}, "sampling.best_of", "unknown field"),
    (PROMPT | {"sampling": {"logprobs": 21}}, "sampling.logprobs", "<= 20"),
    (PROMPT | {"sampling": {"logprobs": True}}, "sampling.logprobs", "got `bool`"),
    (PROMPT | {"output_format": {}}, "output_format", "exactly one of `json_schema` and `regex`"),
    (PROMPT | {"output_format": {"regex": "a", "json_schema": {}}}, "output_format", "exactly one of"),
    (PROMPT | {"output_format": {"json_schema": "{}"}}, "output_format.json_schema", "got `str`"),
    (PROMPT | {"output_format": {"regex": ""}}, "output_format.regex", "length >= 1"),
    (PROMPT | {"output_format": {"grammar": "a"}}, "output_format.grammar", "unknown field"),
    ({"messages": [MESSAGE, MESSAGE | {"name": "x"}]}, "messages[1].name", "unknown field"),
    (PROMPT | {"two words": 1}, "['two words']", "unknown field"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot': expected one of assistant, system, user"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got `null`"),
    ({"messages": ["hello"]}, "messages[0]", "got `str`"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": {}}, "messages", "got `object`"),
    ({"prompt": ""}, "prompt", "length >= 1"),
    ({"prompt": 5}, "prompt", "got `int`"),
    ({"input_tokens": []}, "input_tokens", "length >= 1"),
    ({"input_tokens": [0, 7, -1]}, "input_tokens[2]", ">= 0"),
    ({"input_tokens": [2**31]}, "input_tokens[0]", "<= 2147483647"),
    ({"input_tokens": [1, "2"]}, "input_tokens[1]", "got `str`"),
    ({"input_tokens": [1.5]}, "input_tokens[0]", "got `float`"),
    ({"input_tokens": "1 2"}, "input_tokens", "got `str`"),
    ({"input_tokens": [[1]]}, "input_tokens[0]", "got `array`"),
    ({}, "prompt", "exactly one of"),
    ({"prompt": None}, "prompt", "exactly one of"),
    (PROMPT | {"messages": [MESSAGE]}, "messages", "cannot stand beside `prompt`"),
    (PROMPT | {"input_tokens": [1]}, "input_tokens", "cannot stand beside `prompt`"),
    ({"messages": [MESSAGE], "input_tokens": [1]}, "input_tokens", "cannot stand beside `messages`"),
    (PROMPT | {"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    (PROMPT | {"max_output_tokens": -5}, "max_output_tokens", ">= 1"),
    (PROMPT | {"max_output_tokens": 1_000_001}, "max_output_tokens", "<= 1000000"),
    (PROMPT | {"max_output_tokens": 1.5}, "max_output_tokens", "got `float`"),
    (PROMPT | {"max_output_tokens": True}, "max_output_tokens", "got `bool`"),
    (PROMPT | {"max_output_tokens": "5"}, "max_output_tokens", "got `str`"),
    (PROMPT | {"slo_latency_ms": -1}, "slo_latency_ms", ">= 1"),
    (PROMPT | {"slo_latency_ms": "soon"}, "slo_latency_ms", "got `str`"),
    (PROMPT | {"sampling": None}, "sampling", "got `null`"),
    (PROMPT | {"sampling": {"temperature": -0.1}}, "sampling.temperature", ">= 0"),
    (PROMPT | {"sampling": {"temperature": "hot"}}, "sampling.temperature", "got `str`"),
    (PROMPT | {"sampling": {"top_p": 0}}, "sampling.top_p", "> 0"),
    (PROMPT | {"sampling": {"top_k": -1}}, "sampling.top_k", ">= 0"),
    (PROMPT | {"sampling": {"seed": -1}}, "sampling.seed", ">= 0"),
    (PROMPT | {"sampling": {"seed": 2**63}}, "sampling.seed", "<= 9223372036854775807"),
    (PROMPT | {"sampling": {"stop": ["a", ""]}}, "sampling.stop[1]", "length >= 1"),
    (PROMPT | {"sampling": {"stop": ["a"] * 17}}, "sampling.stop", "length <= 16"),
    (PROMPT | {"sampling": {"stop": "a"}}, "sampling.stop", "got `str`"),
    (PROMPT | {"stream": "yes"}, "stream", "got `str`"),
    (PROMPT | {"stream": 1}, "stream", "got `int`"),
    (PROMPT | {"fallback": "maybe"}, "fallback", "'maybe': expected one of any, none, same_model"),
    (PROMPT | {"fallback": 5}, "fallback", "got `int`: expected one of any, none, same_model"),
    (PROMPT | {"fallback": "maybe", "metadata": {"a": "x"}}, "fallback", "expected one of any"),
    (PROMPT | {"routing_hint": "The Best"}, "routing_hint", "regex"),
    (PROMPT | {"tenant": "a b"}, "tenant", "regex"),
    (PROMPT | {"tenant": "acme\n"}, "tenant", "regex"),
    (PROMPT | {"tenant": ""}, "tenant", "regex"),
    (PROMPT | {"model": ""}, "model", "length >= 1"),
    (PROMPT | {"id": ""}, "id", "length >= 1"),
    (PROMPT | {"id": "x" * 129}, "id", "length <= 128"),
    (PROMPT | {"id": "a\n"}, "id", "regex"),
    (PROMPT | {"id": 7}, "id", "got `int`"),
    (PROMPT | {"deadline": "tomorrow"}, "deadline", "RFC3339"),
    (PROMPT | {"deadline": "2026-01-01T00:00:00"}, "deadline", "timezone"),
    (PROMPT | {"metadata": {"a": "x", "colour": 1}}, "metadata.colour", "got `int`"),
    (PROMPT | {"metadata": {"two words": None}}, "metadata['two words']", "got `null`"),
    (PROMPT | {"metadata": {"a": "x", "b": "y" * 513}}, "metadata.b", "length <= 512"),
    (PROMPT | {"metadata": {"a": "x", "": "y"}}, "metadata", "key ''"),
    (PROMPT | {"metadata": {"k" * 65: "y"}}, "metadata", "key 'kkk"),
    (PROMPT | {"metadata": {str(n): "" for n in range(17)}}, "metadata", "length <= 16"),
    (PROMPT | {"metadata": [1]}, "metadata", "got `array`"),
    (PROMPT | {"metadata": {"a": {"b": {}}}}, "metadata.a", "got `object`"),
]


def refusal(value, content_type=headers.JSON, decode=codecs.decode_ingress):
    with pytest.raises(InvalidMessage) as caught:
        decode(value, content_type)
    error = caught.value
    assert str(error) == error.message
    assert error.message.isprintable(), "one line, without control characters"
    assert len(error.message) <= TEXT_CHARS_MAX + 200
    assert error.code == "invalid_request"
    return error


@pytest.mark.parametrize(("value", "path", "said"), FIELDS, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(FIELDS)])
@pytest.mark.parametrize("content_type", [headers.JSON, headers.MSGPACK])
def test_a_refusal_names_the_field(value, path, said, content_type):
    encode = msgspec.msgpack.encode if content_type == headers.MSGPACK else msgspec.json.encode
    error = refusal(encode(value), content_type)
    assert error.param == path
    assert error.message.startswith(f"`{path}`")
    assert said in error.message


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
def test_numbers_that_are_none_are_refused_by_name(name, number):
    value = PROMPT | {"sampling": {name: number}}
    assert refusal(msgspec.msgpack.encode(value), headers.MSGPACK).param == f"sampling.{name}"
    error = refusal(json.dumps(value).encode())
    assert error.param == f"sampling.{name}"
    assert "number" in error.message


def test_a_number_beyond_what_a_float_holds_is_refused_by_name():
    assert refusal(b'{"prompt":"p","sampling":{"top_p":1e999}}').param == "sampling.top_p"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (b'{"prompt":"a\xff"}', "prompt"),
        (b'{"messages":[{"role":"user","content":"a"},{"role":"user","content":"\xc3("}]}', "messages[1].content"),
        (b'{"prompt":"p","metadata":{"a":"b","c":"\xed\xa0\x80"}}', "metadata.c"),
        (b'{"prompt":"p","metadata":{"\xff":"b"}}', "metadata"),
        (b'{"prompt":"p","sampling":{"stop":["a","\xff"]}}', "sampling.stop[1]"),
        (rb'{"prompt":"\ud800\ud800"}', "prompt"),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_name(value, path):
    error = refusal(value)
    assert error.param == path
    assert "not UTF-8" in error.message


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (PROMPT | {"prompt": "a?"}, "prompt"),
        ({"messages": [MESSAGE, MESSAGE | {"content": "a?"}]}, "messages[1].content"),
        (PROMPT | {"metadata": {"a": "b", "c": "a?"}}, "metadata.c"),
        (PROMPT | {"metadata": {"a?": "b"}}, "metadata"),
        (PROMPT | {"sampling": {"stop": ["a", "a?"]}}, "sampling.stop[1]"),
    ],
)
def test_text_that_is_not_utf8_is_refused_by_name_in_msgpack(value, path):
    error = refusal(msgspec.msgpack.encode(value).replace(b"a?", b"a\xff"), headers.MSGPACK)
    assert error.param == path
    assert "not UTF-8" in error.message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "no value"),
        (b"", "no value"),
        (b"null", "got `null`"),
        (b"[1]", "got `array`"),
        (b'"hello"', "got `str`"),
        (b"not json", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"prompt":"p"} {}', "trailing"),
        (b'{"prompt":"p",}', "not JSON"),
        (b"{'prompt':'p'}", "not JSON"),
        (b'\xef\xbb\xbf{"prompt":"p"}', "not JSON"),
        (b"[" * 200_000, "got `array`"),
    ],
)
def test_what_is_no_object_is_refused_as_a_whole(value, said):
    error = refusal(value)
    assert error.param is None
    assert said in error.message


@pytest.mark.parametrize("content_type", [headers.JSON, headers.MSGPACK])
def test_every_truncation_is_refused(content_type):
    request = InferenceRequest(
        prompt="grüße",
        sampling=Sampling(temperature=0.5, stop=["a"]),
        metadata={"k": "v"},
        deadline=datetime(2026, 1, 1, tzinfo=UTC),
    )
    whole = codecs.encode(request, content_type)
    for length in range(len(whole)):
        refusal(whole[:length], content_type)
    assert codecs.decode_request(whole, content_type) == request


@pytest.mark.parametrize("decode", [codecs.decode_ingress, codecs.decode_request])
@pytest.mark.parametrize(
    ("value", "content_type"),
    [
        (b'{"prompt":"p","metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}", headers.JSON),
        (b'{"prompt":"p","x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", headers.JSON),
        (b"\x82\xa6prompt\xa1p\xa1x" + b"\x91" * 100_000 + b"\x01", headers.MSGPACK),
    ],
)
def test_nesting_without_end_is_refused(value, content_type, decode):
    refusal(value, content_type, decode)
    assert codecs.salvage(value, content_type) == {}


def test_the_reader_inside_the_system_ignores_what_it_does_not_know():
    value = {"prompt": "p", "later": [1], "sampling": {"top_p": 0.5, "later": {}}}
    read = codecs.decode_request(json.dumps(value).encode())
    assert (read.prompt, read.sampling) == ("p", Sampling(top_p=0.5))
    assert refusal(json.dumps(value).encode()).param in {"later", "sampling.later"}
    for decode, required in (
        (codecs.decode_result, {"request_id": "r", "status": "completed"}),
        (codecs.decode_chunk, {"request_id": "r", "run_id": "0", "seq": 0}),
    ):
        assert decode(json.dumps(required | {"later": 1}).encode()).request_id == "r"


def test_the_reader_inside_the_system_still_checks_what_it_knows():
    error = refusal(b'{"prompt":"p","max_output_tokens":-1}', decode=codecs.decode_request)
    assert error.param == "max_output_tokens"
    error = refusal(b'{"request_id":"r","status":"finished"}', decode=codecs.decode_result)
    assert error.param == "status"
    assert refusal(b'{"request_id":"r","run_id":"0"}', decode=codecs.decode_chunk).param == "seq"


@pytest.mark.parametrize("decode", [codecs.decode_ingress, codecs.decode_request], ids=["at ingress", "inside"])
def test_of_a_field_given_twice_the_last_counts_for_every_reader(decode):
    read = decode(b'{"prompt":"first","tenant":"a","prompt":"last","metadata":{"k":"1","k":"2"}}')
    assert (read.prompt, read.metadata) == ("last", {"k": "2"})
    packed = b"\x82\xa6prompt\xa5first\xa6prompt\xa4last"
    assert decode(packed, headers.MSGPACK).prompt == "last"
    assert codecs.salvage(b'{"id":"a","id":"b"}') == {"id": "b"}


def test_a_huge_field_name_gives_a_short_line():
    error = refusal(json.dumps(PROMPT | {"n" * 50_000: 1}).encode())
    assert len(error.message) < 200
    error = refusal(json.dumps(PROMPT | {"evil\r\nline\x1b[31m": 1}).encode())
    assert "unknown field" in error.message
    error = refusal(json.dumps(PROMPT | {"fallback": "x" * 50_000}).encode())
    assert (error.param, len(error.message) < 400) == ("fallback", True)


def test_a_large_record_is_not_read_again():
    value = json.dumps({"prompt": "p" * REREAD_BYTES_MAX, "metadata": {"a": 1}}).encode()
    assert refusal(value).param == "metadata[...]"


def test_what_is_broken_behind_the_fault_does_not_hide_it():
    assert refusal(b'{"metadata":{"a":1},"prompt":').param == "metadata[...]"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-protobuf", "json"])
def test_an_unknown_content_type_is_refused(content_type):
    error = refusal(b'{"prompt":"p"}', content_type)
    assert error.param == headers.CONTENT_TYPE
    assert content_type in error.message


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON", ""])
def test_json_is_known_by_its_media_type(content_type):
    assert codecs.decode_ingress(b'{"prompt":"p"}', content_type).prompt == "p"


def test_the_envelope_is_refused_in_the_name_of_its_header():
    good = codecs.encode_envelope(Envelope("r", "t", "batch", ("topic", 0, 5), 1))
    assert codecs.decode_envelope(good).origin == ("topic", 0, 5)
    for value in (
        None,
        b"",
        b"\x01",
        good[:-1],
        b"\xff",
        good + b"x",
        msgspec.msgpack.encode(["r", "t", "hourly", ["a", 0, 0], 1]),
    ):
        with pytest.raises(InvalidMessage) as caught:
            codecs.decode_envelope(value)
        assert caught.value.param == headers.ENVELOPE


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b'{"id":"r1","tenant":"acme","prompt":5}', {"id": "r1", "tenant": "acme"}),
        (b'{"id":"r1","tenant":"a b"}', {"id": "r1"}),
        (b'{"id":5,"tenant":"acme"}', {"tenant": "acme"}),
        (b'{"id":null}', {}),
        (b'{"id":"a\\n"}', {}),
        (b"[1]", {}),
        (b"nonsense", {}),
        (b'{"id":"r1","prompt":"\xff"}', {"id": "r1"}),
        (b'{"id":"\xff","tenant":"acme"}', {"tenant": "acme"}),
        (b'{"id":"r1","prompt":"p","sampling":{"top_p":NaN}}', {"id": "r1"}),
        (b'{"id":"r1","prompt":"p"', {}),
        (None, {}),
    ],
)
def test_id_and_tenant_are_salvaged_where_they_are_sound(value, found):
    assert codecs.salvage(value) == found


def test_id_and_tenant_are_salvaged_from_msgpack():
    value = msgspec.msgpack.encode({"id": "r1", "tenant": "acme", "prompt": "a?", "n": {"a": [1]}})
    assert codecs.salvage(value, headers.MSGPACK) == {"id": "r1", "tenant": "acme"}
    assert codecs.salvage(value.replace(b"a?", b"a\xff"), headers.MSGPACK) == {"id": "r1", "tenant": "acme"}
    assert codecs.salvage(value.replace(b"r1", b"r\xff"), headers.MSGPACK) == {"tenant": "acme"}
    assert codecs.salvage(value[:-1], headers.MSGPACK) == {}


@pytest.mark.parametrize("content_type", [headers.JSON, headers.MSGPACK])
def test_text_that_no_encoding_can_write_is_refused_by_name(content_type):
    with pytest.raises(InvalidMessage) as caught:
        codecs.encode(InferenceRequest(prompt="p", metadata={"k": "\ud800"}), content_type)
    assert caught.value.param == "metadata.k"


def test_a_long_record_is_told_the_allowed_values_too():
    value = json.dumps({"prompt": "p" * REREAD_BYTES_MAX, "fallback": "never"}).encode()
    assert refusal(value).message == "`fallback`: Invalid enum value 'never': expected one of any, none, same_model"


def test_the_values_of_an_enumeration_are_named_in_results_and_lists_too():
    value = {"request_id": "r", "status": "done"}
    error = refusal(json.dumps(value).encode(), decode=codecs.decode_result)
    assert error.message.endswith("expected one of cancelled, completed, expired, failed, rejected")
    attempt = {"engine": "e", "worker": "w", "outcome": "failed", "error": {"code": "bad luck", "message": "m"}}
    value = {"request_id": "r", "status": "failed", "route": [attempt]}
    error = refusal(json.dumps(value).encode(), decode=codecs.decode_result)
    assert error.param == "route[0].error.code"
    assert "expected one of cancelled, capacity_exceeded" in error.message


@pytest.mark.parametrize("prompt", ["p", "p" * REREAD_BYTES_MAX])
def test_a_byte_order_mark_before_a_record_is_named_and_the_id_is_read_behind_it(prompt):
    value = b"\xef\xbb\xbf" + json.dumps({"id": "r1", "tenant": "acme", "prompt": prompt}).encode()
    error = refusal(value)
    assert error.message == "not JSON: it begins with a byte order mark (EF BB BF): write it as UTF-8 without one"
    assert codecs.salvage(value) == {"id": "r1", "tenant": "acme"}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_record_in_utf16_is_named_as_such_and_its_id_is_read(encoding):
    mark = "" if encoding == "utf-16" else "\ufeff"
    value = (mark + json.dumps({"id": "r1", "tenant": "acme", "prompt": "p"})).encode(encoding)
    assert "a byte order mark of UTF-16" in refusal(value).message
    assert codecs.salvage(value) == {"id": "r1", "tenant": "acme"}


@pytest.mark.parametrize("value", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff\xd8", b"\xef\xbb\xbf\xef\xbb\xbf{}"])
def test_a_mark_before_nothing_sound_gives_no_id(value):
    refusal(value)
    assert codecs.salvage(value) == {}
