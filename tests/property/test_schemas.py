"""Whatever a message holds, it is read as it was written, in JSON and in msgpack; whatever else is read is refused."""

from datetime import timedelta, timezone

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas import (
    ChatMessage,
    EngineStatus,
    Envelope,
    ErrorCode,
    ErrorInfo,
    InferenceRequest,
    InferenceResult,
    InvalidMessage,
    RouteAttempt,
    Sampling,
    Timing,
    TokenChunk,
    Usage,
    codecs,
    headers,
)
from schemas.formats import Alternative, OutputFormat, TokenLogprob
from schemas.messages import RUN_HOPS_MAX, ExpertFigures, run_id
from schemas.strict import StrictRequest

CONTENT_TYPES = st.sampled_from([headers.JSON, headers.MSGPACK])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SOME_TEXT = TEXT.filter(bool)
IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=128)
NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
KINDS = st.from_regex(r"[a-z][a-z0-9_-]{0,31}", fullmatch=True)
INT32 = st.integers(0, 2**31 - 1)
INT63 = st.integers(0, 2**63 - 1)
FIGURES = st.none() | st.floats(0, 1e12)
OFFSETS = st.builds(timezone, st.integers(-1439, 1439).map(lambda minutes: timedelta(minutes=minutes)))

SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=INT32,
    min_p=st.floats(0, 1),
    stop=st.lists(SOME_TEXT, max_size=16),
    seed=st.none() | INT63,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logprobs=st.none() | st.integers(0, 20),
)
FORMATS = st.builds(OutputFormat, json_schema=st.dictionaries(TEXT, TEXT | INT32 | st.none())) | st.builds(
    OutputFormat, regex=SOME_TEXT
)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        token=INT32,
        text=TEXT,
        logprob=st.floats(-9_999, 0),
        top=st.lists(st.builds(Alternative, token=INT32, text=TEXT, logprob=st.floats(-9_999, 0)), max_size=3),
    ),
    max_size=3,
)
INPUTS = st.one_of(
    st.fixed_dictionaries({"prompt": SOME_TEXT}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.builds(ChatMessage, role=st.sampled_from(["system", "user", "assistant"]), content=TEXT), min_size=1
            )
        }
    ),
    st.fixed_dictionaries({"input_tokens": st.lists(INT32, min_size=1)}),
)
METADATA = st.dictionaries(SOME_TEXT, TEXT, max_size=16)


@st.composite
def requests(draw):
    return InferenceRequest(
        **draw(INPUTS),
        id=draw(st.none() | IDS),
        tenant=draw(NAMES),
        model=draw(SOME_TEXT),
        max_output_tokens=draw(st.integers(1, 1_000_000)),
        sampling=draw(SAMPLING),
        output_format=draw(st.none() | FORMATS),
        routing_hint=draw(KINDS),
        fallback=draw(st.sampled_from(["any", "same_model", "none"])),
        slo_latency_ms=draw(st.none() | st.integers(1, 2**40)),
        deadline=draw(st.none() | st.datetimes(timezones=OFFSETS)),
        stream=draw(st.booleans()),
        metadata=draw(METADATA),
    )


ERRORS = st.builds(ErrorInfo, code=st.sampled_from(ErrorCode), message=TEXT, param=st.none() | TEXT)
STATUSES = st.sampled_from(["completed", "failed", "cancelled", "expired", "rejected"])
FINISHES = st.none() | st.sampled_from(["stop", "length", "abort", "error"])
ATTEMPTS = st.builds(RouteAttempt, engine=TEXT, worker=TEXT, outcome=STATUSES | st.just("retried"), error=st.none() | ERRORS)
EXPERTS = st.builds(
    ExpertFigures,
    hits=INT63,
    misses=INT63,
    stall_ms=st.floats(0, 1e9),
    resident=st.none() | INT32,
    hottest=st.lists(st.tuples(INT32, INT32, st.floats(0, 1e9)), max_size=3),
)
RESULTS = st.builds(
    InferenceResult,
    request_id=TEXT,
    status=STATUSES,
    tenant=TEXT,
    model=st.none() | TEXT,
    engine=st.none() | TEXT,
    worker=st.none() | TEXT,
    run_id=st.none() | TEXT,
    output_text=TEXT,
    output_tokens=st.lists(INT32),
    logprobs=LOGPROBS,
    finish_reason=FINISHES,
    usage=st.builds(Usage, input_tokens=INT63, output_tokens=INT63),
    timing=st.builds(Timing, queued_ms=FIGURES, ttft_ms=FIGURES, latency_ms=FIGURES, tokens_per_second=FIGURES),
    route=st.lists(ATTEMPTS, max_size=3),
    error=st.none() | ERRORS,
    metadata=METADATA,
    experts=st.none() | EXPERTS,
)
CHUNKS = st.builds(
    TokenChunk,
    request_id=TEXT,
    run_id=TEXT,
    seq=INT63,
    token_ids=st.lists(INT32),
    text=TEXT,
    finish_reason=FINISHES,
    logprobs=LOGPROBS,
)
STATUS = st.builds(
    EngineStatus,
    engine=TEXT,
    kind=TEXT,
    pool=TEXT,
    worker=TEXT,
    epoch=INT63,
    updated_at_ms=INT63,
    is_healthy=st.booleans(),
    partitions=st.lists(INT32),
    positions=st.dictionaries(INT32, INT63),
    queue_depth=INT32,
    models=st.lists(TEXT),
    max_context=st.none() | INT32,
    kv_cache_usage=FIGURES,
    gpu_mem_used_bytes=st.none() | INT63,
    experts=st.none() | EXPERTS,
)
ENVELOPES = st.builds(
    Envelope,
    id=TEXT,
    tenant=TEXT,
    service_class=st.sampled_from(["interactive", "batch"]),
    origin=st.tuples(TEXT, INT32, INT63),
    received_at_ms=INT63,
    hop=INT32,
    attempts=INT32,
    not_before_ms=INT63,
    excluded=st.dictionaries(TEXT, INT63, max_size=4),
    route=st.lists(ATTEMPTS, max_size=3),
)


@given(requests(), CONTENT_TYPES)
def test_a_request_is_read_as_it_was_written_by_every_reader(request, content_type):
    value = codecs.encode(request, content_type)
    assert codecs.decode_request(value, content_type) == request
    strict = codecs.decode_ingress(value, content_type)
    assert isinstance(strict, StrictRequest)
    assert codecs.decode_request(codecs.encode(strict, content_type), content_type) == request
    expected = {"id": request.id, "tenant": request.tenant if request.tenant != "default" else None}
    assert codecs.salvage(value, content_type) == {k: v for k, v in expected.items() if v is not None}


@given(RESULTS, CONTENT_TYPES)
def test_a_result_is_read_as_it_was_written(result, content_type):
    assert codecs.decode_result(codecs.encode(result, content_type), content_type) == result


@given(CHUNKS, CONTENT_TYPES)
def test_a_chunk_is_read_as_it_was_written(chunk, content_type):
    assert codecs.decode_chunk(codecs.encode(chunk, content_type), content_type) == chunk


@given(STATUS)
def test_a_status_is_read_as_it_was_written(status):
    assert codecs.decode_status(codecs.encode(status, headers.MSGPACK)) == status
    assert msgspec.json.decode(codecs.encode(status), type=EngineStatus) == status


@given(ENVELOPES)
def test_an_envelope_is_read_as_it_was_written(envelope):
    assert codecs.decode_envelope(codecs.encode_envelope(envelope)) == envelope


def refused_in_one_line(value, content_type):
    """Give the refusal, or None where the value is taken."""
    try:
        codecs.decode_ingress(value, content_type)
    except InvalidMessage as error:
        refusal = error
    else:
        return None
    assert refusal.message.isprintable()
    assert len(refusal.message) < 600
    assert refusal.param is None or refusal.message.startswith(f"`{refusal.param}`")
    codecs.salvage(value, content_type)
    return refusal


@given(st.binary(max_size=200), CONTENT_TYPES)
def test_bytes_of_any_kind_are_read_or_refused_and_never_raise_anything_else(value, content_type):
    refused_in_one_line(value, content_type)


@given(requests(), CONTENT_TYPES, st.data())
def test_a_damaged_request_is_read_or_refused_and_never_raises_anything_else(request, content_type, data):
    value = bytearray(codecs.encode(request, content_type))
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    refused_in_one_line(bytes(value), content_type)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from([*InferenceRequest.__struct_fields__])


@given(requests(), FIELD_NAMES, JSON_VALUES, CONTENT_TYPES)
def test_a_wrong_value_is_laid_at_its_own_fields_door(request, name, wrong, content_type):
    raw = msgspec.to_builtins(request) | {name: wrong}
    value = (msgspec.msgpack if content_type == headers.MSGPACK else msgspec.json).encode(raw)
    refusal = refused_in_one_line(value, content_type)
    if refusal is not None:
        assert refusal.param is not None
        inputs = {"prompt", "messages", "input_tokens"}
        blamed = refusal.param.replace("[", ".").split(".")[0]
        assert blamed == name or {blamed, name} <= inputs  # one input too many is named by either


@given(requests(), TEXT, st.sampled_from([(), ("sampling",)]), CONTENT_TYPES)
def test_an_unknown_field_is_refused_at_ingress_and_ignored_inside(request, name, place, content_type):
    raw = msgspec.to_builtins(request)
    table = raw.setdefault(place[0], {}) if place else raw
    known = Sampling if place else InferenceRequest
    if name in known.__struct_fields__:
        return
    table[name] = 1
    value = (msgspec.msgpack if content_type == headers.MSGPACK else msgspec.json).encode(raw)
    assert refused_in_one_line(value, content_type)
    assert codecs.decode_request(value, content_type) == request


RUNS = st.tuples(st.integers(0, RUN_HOPS_MAX), st.integers(0, RUN_HOPS_MAX))


@given(RUNS, RUNS)
def test_a_later_run_sorts_after_an_earlier_one(one, other):
    assert (run_id(*one) < run_id(*other)) == (one < other)
    assert (run_id(*one) == run_id(*other)) == (one == other)
