"""The store on S3: a server that speaks it, and the library that users install with `forebay[s3]`."""

import asyncio

import pytest
import s3fs
from moto.server import ThreadedMotoServer
from msgspec import structs

from broker.transport.blobs import BlobError, Blobs
from schemas import ErrorCode, InferenceRequest, parse_config


@pytest.fixture(scope="module")
def s3():
    """An S3 server; gives what fsspec has to be told."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    server.stop()


def blobs_of(options, store="s3://forebay/inputs"):
    return Blobs(parse_config({"blobs": {"store": store, "options": options, "timeout_ms": 20_000}}).blobs)


def test_an_input_goes_to_s3_and_comes_back(s3):
    s3fs.S3FileSystem(**s3).mkdir("forebay")
    blobs, request = blobs_of(s3), InferenceRequest(id="a", prompt="long " * 400_000)

    async def there_and_back():
        small = await blobs.shrink(request)
        return small, await blobs.fill(small)

    small, whole = asyncio.run(there_and_back())
    assert whole == request
    assert small.input_ref.url.startswith("s3://forebay/inputs/")
    absent = structs.replace(small.input_ref, url="s3://forebay/inputs/absent")
    with pytest.raises(BlobError, match="no such file") as raised:
        asyncio.run(blobs.read(absent))
    assert raised.value.code is ErrorCode.INVALID_REQUEST


def test_a_server_that_is_away_is_an_error_that_may_pass(s3):
    away = {**s3, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2}}
    with pytest.raises(BlobError, match="s3://forebay/inputs/") as raised:
        asyncio.run(blobs_of(away).write(b"{}"))
    assert raised.value.code.retryable
