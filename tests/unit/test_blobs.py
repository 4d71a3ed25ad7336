"""The store of what is too large for a record: written once, checked whenever it is read."""

import asyncio
import hashlib
import threading

import pytest
from fsspec.implementations.local import LocalFileSystem
from msgspec import structs

from broker.transport.blobs import BlobError, Blobs
from schemas import ConfigError, ErrorCode, InferenceRequest, InferenceResult, InvalidMessage, codecs, parse_config
from schemas.formats import Alternative, TokenLogprob
from schemas.messages import BlobRef, ChatMessage


def blobs_in(folder, **more):
    return Blobs(parse_config({"blobs": {"store": f"file://{folder}", **more}}).blobs)


def ref_of(path, data, **more):
    return BlobRef(f"file://{path}", len(data), hashlib.sha256(data).hexdigest(), **more)


@pytest.mark.parametrize(
    "given",
    [{"prompt": "a\u00e9\U0001f600"}, {"messages": [ChatMessage("user", "hello")]}, {"input_tokens": [1, 2, 3]}],
    ids=["prompt", "messages", "input_tokens"],
)
def test_an_input_comes_back_as_it_was(tmp_path, given):
    blobs, request = blobs_in(tmp_path), InferenceRequest(id="a", max_output_tokens=7, **given)

    async def there_and_back():
        small = await blobs.shrink(request)
        again = await blobs.shrink(request)
        return small, again, await blobs.fill(codecs.decode_request(codecs.encode(small)))

    small, again, whole = asyncio.run(there_and_back())
    assert whole == request
    assert small == again, "the same bytes are the same blob"
    assert (small.prompt, small.messages, small.input_tokens) == (None, None, None)
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_an_output_comes_back_as_it_was(tmp_path):
    blobs = blobs_in(tmp_path)
    result = InferenceResult("a", "completed", output_text="long", output_tokens=[1, 2], finish_reason="stop")
    result = structs.replace(result, logprobs=[TokenLogprob(1, "lo", -0.5, [Alternative(3, "x", -1.0)])])

    async def there_and_back():
        small = await blobs.put_output(result)
        return small, await blobs.output_of(codecs.decode_result(codecs.encode(small)))

    small, whole = asyncio.run(there_and_back())
    assert (small.output_text, small.output_tokens, small.logprobs) == ("", [], [])
    assert structs.replace(whole, output_ref=None) == result


def test_a_plain_text_is_a_prompt(tmp_path):
    data = "Once upon a time \u2026".encode()
    (tmp_path / "tale.txt").write_bytes(data)
    request = InferenceRequest(input_ref=ref_of(tmp_path / "tale.txt", data, content_type="text/plain"))
    assert asyncio.run(blobs_in(tmp_path).fill(request)).prompt == data.decode()


GOOD = b'{"prompt":"a"}'


@pytest.mark.parametrize(
    ("change", "there", "told"),
    [
        ({"size_bytes": 13}, GOOD, "expected 13 bytes, found 14"),
        ({"size_bytes": 15}, GOOD, "expected 15 bytes, found 14"),
        ({"sha256": "0" * 64}, GOOD, "expected sha256 000"),
        ({}, b'{"prompt":"b"}', "expected sha256"),
        ({}, GOOD[:-1], "expected 14 bytes, found 13"),
        ({}, None, "no such file"),
        ({"size_bytes": 5_000}, GOOD, "more than `blobs.bytes_max` \\(1000\\)"),
        ({"url": "file:///etc/passwd"}, GOOD, "outside of `blobs.store`"),
        ({"url": "s3://somewhere/else"}, GOOD, "outside of `blobs.store`"),
    ],
)
def test_what_is_not_as_the_reference_says_is_the_requests_fault(tmp_path, change, there, told):
    path = tmp_path / "blob.json"
    if there is not None:
        path.write_bytes(there)
    ref = structs.replace(ref_of(path, GOOD), **change)
    with pytest.raises(BlobError, match=told) as raised:
        asyncio.run(blobs_in(tmp_path, bytes_max=1_000).read(ref))
    assert raised.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "url", ["{store}/../secret.json", "{store}/a/../../secret.json", "{store}/x::file:///etc/passwd", "{store}s/a"]
)
def test_a_reference_cannot_leave_the_store(tmp_path, url):
    (tmp_path / "store").mkdir()
    (tmp_path / "secret.json").write_bytes(GOOD)
    ref = structs.replace(ref_of("/", GOOD), url=url.format(store=f"file://{tmp_path}/store"))
    with pytest.raises(BlobError, match=r"outside of|neither be chained"):
        asyncio.run(blobs_in(tmp_path / "store").read(ref))


def test_what_may_be_read_beside_the_store_is_configured(tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "one.json").write_bytes(GOOD)
    ref = ref_of(tmp_path / "documents" / "one.json", GOOD)
    allowing = blobs_in(tmp_path / "store", readable=[f"file://{tmp_path}/documents"])
    assert asyncio.run(allowing.read(ref)) == GOOD
    with pytest.raises(BlobError, match="outside"):
        asyncio.run(blobs_in(tmp_path / "store").read(ref))


@pytest.mark.parametrize(
    "data",
    [
        b"not JSON",
        b"[]",
        b"{}",
        b'{"prompt":""}',
        b'{"prompt":"a","input_tokens":[1]}',
        b'{"unknown":1}',
        b'{"prompt":"\xff"}',
        b'{"input_ref":{}}',
    ],
)
def test_a_blob_that_is_no_input_is_the_requests_fault(tmp_path, data):
    (tmp_path / "blob").write_bytes(data)
    with pytest.raises(BlobError, match="blob: ") as raised:
        asyncio.run(blobs_in(tmp_path).fill(InferenceRequest(input_ref=ref_of(tmp_path / "blob", data))))
    assert raised.value.code is ErrorCode.INVALID_REQUEST


def test_a_store_that_cannot_be_used_may_be_usable_later(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError) as raised:
        asyncio.run(blobs_in(tmp_path / "file").write(GOOD))
    assert raised.value.code is ErrorCode.INTERNAL
    with pytest.raises(BlobError, match=r"set `blobs\.store`"):
        asyncio.run(Blobs(parse_config({}).blobs).write(GOOD))


@pytest.mark.parametrize(
    "ref",
    [
        b'{"url":"no protocol","size_bytes":1,"sha256":"%s"}' % (b"0" * 64),
        b'{"url":"file:///a","size_bytes":0,"sha256":"%s"}' % (b"0" * 64),
        b'{"url":"file:///a","size_bytes":1,"sha256":"short"}',
        b'{"url":"file:///a","size_bytes":1,"sha256":"%s","more":1}' % (b"0" * 64),
        b'{"url":"file:///a","size_bytes":1,"sha256":"%s"},"prompt":"a"' % (b"0" * 64),
    ],
)
def test_a_malformed_reference_is_refused_with_its_path(ref):
    with pytest.raises(InvalidMessage, match="input_ref"):
        codecs.decode_ingress(b'{"input_ref":%s}' % ref)


def test_a_malformed_store_is_a_config_error():
    with pytest.raises(ConfigError, match=r"blobs\.store"):
        parse_config({"blobs": {"store": "/srv/forebay"}})


def test_a_store_that_hangs_is_given_up_and_keeps_nobody_from_ending(monkeypatch, tmp_path):
    released = threading.Event()
    monkeypatch.setattr(LocalFileSystem, "pipe_file", lambda *_, **__: released.wait())
    with pytest.raises(BlobError, match=r"no answer within 50 ms \(`blobs\.timeout_ms`\)") as raised:
        asyncio.run(blobs_in(tmp_path, timeout_ms=50).write(GOOD))  # `run` would wait for threads of its own
    assert raised.value.code is ErrorCode.TIMEOUT
    released.set()
