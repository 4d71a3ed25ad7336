"""A dead letter always fits into a record, whatever was too large in the one that it is about."""

import pytest

from broker.transport.outputs import Outputs
from broker.transport.protocol import Record
from broker.transport.refusals import record_bytes
from schemas import ErrorCode, ErrorInfo, Topics, headers

BYTES_MAX = 200_000
ERROR = ErrorInfo(ErrorCode.INVALID_REQUEST, "it is too large " * 1_000)


@pytest.mark.parametrize("key", [b"k", b"k" * 150_000], ids=["short key", "long key"])
@pytest.mark.parametrize("header", [b"h", b"h" * 40_000, b"h" * 150_000], ids=["short header", "long header", "huge header"])
@pytest.mark.parametrize("value", [None, b"v", b"v" * 150_000, b"v" * 199_000], ids=["none", "short", "long", "full"])
def test_a_dead_letter_fits_and_keeps_what_it_can(key, header, value):
    record = Record("forebay.requests.batch", 3, 7, key, value, (("mine", header),), 0)
    letter = Outputs(Topics(), 1, BYTES_MAX).dead_letter(record, ERROR)
    assert record_bytes(letter) <= BYTES_MAX
    told = dict(letter.headers)
    assert told[headers.DEAD_OFFSET] == b"7"
    if record_bytes(record) < BYTES_MAX / 2:
        assert (letter.key, letter.value, told["mine"]) == (key, value, header)
        assert headers.DEAD_BYTES not in told
    elif (letter.value or b"") != (value or b""):
        assert told[headers.DEAD_BYTES] == str(len(value)).encode()
        assert value.startswith(letter.value)
