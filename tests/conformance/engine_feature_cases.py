"""What only some engines can do: those that say so do it, and all others refuse it by name."""

import asyncio
import json
import re
from itertools import pairwise
from math import exp

from conformance.engine_harnesses import GREEDY, Harness
from conformance.engine_runs import STORY, asking, idle, refusal, run, same

from schemas.errors import ErrorCode
from schemas.features import FIELDS, JSON_SCHEMA, LOGPROBS, PENALTIES, REGEX
from schemas.formats import OutputFormat
from schemas.messages import ChatMessage, InferenceRequest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["rain", "sun"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PLATE = r"[A-F]{3}-[0-9]{2,4}(rain|sun)"
BAD_SCHEMAS = ({"type": "nonsense"}, {"type": "object", "properties": 5}, {"$ref": "#/$defs/nowhere"})
BAD_REGEXES = ("(", "[z-a]", "a{3,1}", "\x00", "(?<!a)b")


def formed(tokens: int = 100, **form) -> InferenceRequest:
    asked = [ChatMessage("user", "Tell me about a person who likes rain.")]
    return InferenceRequest(messages=asked, max_output_tokens=tokens, sampling=GREEDY, output_format=OutputFormat(**form))


async def lacks(harness: Harness, feature: str, request: InferenceRequest) -> bool:
    """Whether the engine does not claim a feature; then it must refuse a request that needs it, by name."""
    if feature in harness.engine.status().features:
        return False
    error = await refusal(harness.engine, request)
    same((error.code, error.param), (ErrorCode.UNSUPPORTED_FEATURE, FIELDS[feature]), f"refusal of {feature}")
    assert feature in error.message, error.message
    idle(harness)
    return True


async def case_penalties(harness: Harness) -> None:
    """Beside runs without any, which say what they say alone; what is rewarded for coming again comes again more often."""
    text = STORY
    if await lacks(harness, PENALTIES, asking(text, 5, presence_penalty=1.0)):
        return
    plain = await run(harness.engine, asking(text, 64))
    asked = ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, {}, {"frequency_penalty": -2.0, "presence_penalty": -2.0})
    fewer, beside, more = await asyncio.gather(*(run(harness.engine, asking(text, 64, **values)) for values in asked))
    same((beside.tokens, beside.text), (plain.tokens, plain.text), "output of the one without a penalty")
    if harness.kind.has_model:
        kinds = [len(set(output.tokens)) / len(output.tokens) for output in (fewer, more)]
        assert kinds[0] > kinds[1], f"share of different tokens with a penalty and with a reward: {kinds}"
    idle(harness)


async def case_json_schema(harness: Harness) -> None:
    """Also beside a request without a form, which says what it says alone."""
    request, plain = formed(json_schema=PERSON), asking("The river carries water to the turbines and", 24)
    if await lacks(harness, JSON_SCHEMA, request):
        return
    alone = await run(harness.engine, plain)
    first, beside, again = await asyncio.gather(*(run(harness.engine, one) for one in (request, plain, request)))
    same(beside.text, alone.text, "text of the one without a form")
    for output in (first, again):
        same(output.finish_reason, "stop", f"reason after {output.text!r}")
        person = json.loads(output.text)
        same(sorted(person), ["age", "likes", "name"], "fields")
        assert isinstance(person["name"], str), person
        assert isinstance(person["age"], int), person
        assert 0 <= person["age"] <= 120, person
        assert set(person["likes"]) <= {"rain", "sun"}, person
    idle(harness)


async def case_regex(harness: Harness) -> None:
    request = formed(regex=PLATE)
    if await lacks(harness, REGEX, request):
        return
    output = await run(harness.engine, request)
    assert re.fullmatch(PLATE, output.text), output.text
    same(output.finish_reason, "stop", "reason")
    cut = await run(harness.engine, formed(2, regex=PLATE))
    same((len(cut.tokens), cut.finish_reason), (2, "length"), "tokens and reason where the limit comes first")
    assert output.text.startswith(cut.text), cut.text


async def case_bad_forms(harness: Harness) -> None:
    """What no grammar can be made of is refused in one line, and nobody else is harmed."""
    if await lacks(harness, JSON_SCHEMA, formed(json_schema={})) or await lacks(harness, REGEX, formed(regex="a")):
        return
    neighbour = asyncio.create_task(run(harness.engine, asking(STORY, 60)))
    asked = [(formed(json_schema=schema), JSON_SCHEMA) for schema in BAD_SCHEMAS]
    asked += [(formed(regex=regex), REGEX) for regex in BAD_REGEXES]
    for request, feature in asked:
        error = await refusal(harness.engine, request)
        same((error.code, error.param), (ErrorCode.INVALID_REQUEST, FIELDS[feature]), f"{request.output_format}")
        assert "\n" not in error.message, error.message
    same(len((await neighbour).tokens), 60, "tokens of the neighbour")
    assert re.fullmatch(PLATE, (await run(harness.engine, formed(regex=PLATE))).text)
    idle(harness)


async def case_logprobs(harness: Harness) -> None:
    text = "The river carries water to the turbines and"
    if await lacks(harness, LOGPROBS, asking(text, 5, logprobs=0)):
        return
    plain, own, three = [await run(harness.engine, asking(text, 12, **asked)) for asked in ({}, {"logprobs": 0}, {"logprobs": 3})]
    same(plain.logprobs, [], "log probabilities that nobody asked for")
    for output in (own, three):
        same(output.tokens, plain.tokens, "tokens")
        same([len(p.logprobs) for p in output.pieces], [len(p.token_ids) for p in output.pieces], "log probabilities by piece")
        same([one.token for one in output.logprobs], output.tokens, "tokens that they are of")
        same("".join(one.text for one in output.logprobs), output.text, "their text")
    for alone, beside in zip(own.logprobs, three.logprobs, strict=True):
        same(alone.top, [], "alternatives that nobody asked for")
        assert abs(alone.logprob - beside.logprob) < 1e-3, (alone, beside)
        same(len(beside.top), 3, "alternatives")
        same(beside.top[0].token, beside.token, "likeliest token, which greedy sampling takes")
        assert all(one.logprob >= other.logprob for one, other in pairwise(beside.top)), beside
        assert 0 < sum(exp(one.logprob) for one in beside.top) < 1 + 1e-4, beside
    stopped = await run(harness.engine, asking(text, 12, logprobs=1, stop=[plain.text[6:9]]))
    same([one.token for one in stopped.logprobs], stopped.tokens, "tokens that they are of, with a stop string")
    idle(harness)
