"""Forms, log probabilities and adapters on the whole path in memory: the wish reaches the engine, its answer the client."""

import memory_stack
from memory_stack import TOPICS, config_of, on_stack
from msgspec import structs

from engine_consumers.sim import SimEngine
from schemas import Sampling, codecs, parse_config
from schemas.errors import ErrorCode
from schemas.formats import Alternative, OutputFormat, TokenLogprob

FIRST = b'{"id":"r1","prompt":"say","model":"sql","max_output_tokens":6,"stream":true,"sampling":{"logprobs":1},'
FORMED = FIRST + b'"output_format":{"json_schema":{"type":"object"}}}'
PLAIN = b'{"id":"r2","prompt":"say","max_output_tokens":6}'


class Telling(SimEngine):
    """Claims all features, takes adapters, and says what it was asked."""

    asked: list = []  # noqa: RUF012 - emptied by the test

    def __init__(self, config):
        super().__init__(structs.replace(config, options={"ttft_ms": 20, "tpot_ms": 5}))

    def status(self):
        figures = super().status()
        return structs.replace(figures, features=(*figures.features, "json_schema", "logprobs"))

    async def generate(self, request, run, seed, priority=0):
        self.asked.append(request)
        plain = structs.replace(request, sampling=Sampling(), output_format=None)
        async for piece in super().generate(plain, run, seed, priority):
            told = [likely(token) for token in piece.token_ids] if request.sampling.logprobs else []
            yield structs.replace(piece, logprobs=told)


def likely(token):
    return TokenLogprob(token, "x", -0.5, [Alternative(token, "x", -0.5)])


def test_what_was_asked_for_reaches_the_engine_and_its_answer_the_client(monkeypatch):
    monkeypatch.setattr(memory_stack, "load", Telling)
    monkeypatch.setattr(Telling, "asked", [])
    engine = {"kind": "transformer", "model": "base", "slots": 4, "options": {"loras": {"sql": "/adapters/sql"}}}
    other = {"kind": "ssm", "model": "other"}
    topics = {"request_partitions": 1, "engine_partitions": 1, "result_partitions": 1, "retry_partitions": 1}

    async def scenario(stack):
        stack.dispatcher()
        stack.worker("w1", "llm")
        stack.worker("w2", "other")
        await stack.produce([FORMED, PLAIN.replace(b'"say"', b'"say","model":"base"')])
        return await stack.results(2), [codecs.decode_chunk(record.value) for record in await stack.read(TOPICS.streams)]

    results, chunks = on_stack(scenario, parse_config({"engines": {"llm": engine, "other": other}, "topics": topics}))
    formed, plain = sorted(results, key=lambda result: result.request_id)
    assert (formed.engine, formed.model, formed.status) == ("llm", "sql", "completed")
    assert formed.logprobs == [likely(token) for token in formed.output_tokens]
    assert len(formed.logprobs) == 6
    assert [one for chunk in chunks for one in chunk.logprobs] == formed.logprobs
    assert (plain.model, plain.logprobs) == ("base", [])
    asked = {request.id: request for request in Telling.asked}
    assert (asked["r1"].model, asked["r1"].output_format) == ("sql", OutputFormat(json_schema={"type": "object"}))
    assert (asked["r2"].model, asked["r2"].output_format) == ("base", None)


def test_where_no_engine_has_it_the_refusal_names_it():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce([FORMED.replace(b'"model":"sql",', b""), PLAIN])
        return await stack.results(2)

    refused, served = sorted(on_stack(scenario, config_of()), key=lambda result: result.request_id)
    assert served.status == "completed"
    assert (refused.status, refused.error.code) == ("rejected", ErrorCode.UNSUPPORTED_FEATURE)
    assert refused.error.param == "output_format.json_schema"
    assert "`output_format.json_schema`: the engine has no json_schema" in refused.error.message
