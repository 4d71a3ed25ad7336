"""OpenAI's bodies to requests, and results to OpenAI's bodies."""

import msgspec
import pytest

from broker import openai
from schemas.errors import ErrorCode, InvalidMessage
from schemas.formats import Alternative, TokenLogprob
from schemas.messages import DEFAULT_MAX_OUTPUT_TOKENS, InferenceResult, Usage

HELLO = [{"role": "user", "content": "hello"}]


def chat(**body):
    return openai.request_of(openai.CHAT, {"model": "m", "messages": HELLO, **body}, "r1", "t1")


def complete(**body):
    return openai.request_of(openai.COMPLETIONS, {"model": "m", "prompt": "hello", **body}, "r1", "t1")


def refused(call, **body):
    with pytest.raises(InvalidMessage) as caught:
        call(**body)
    return caught.value


def test_a_chat_becomes_a_request_with_all_that_was_asked():
    request = chat(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        stop="\n",
        seed=3,
        user="u",
        metadata={"a": "b"},
    )
    assert [(m.role, m.content) for m in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.id, request.tenant, request.model, request.max_output_tokens) == ("r1", "t1", "m", 7)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop, sampling.seed) == (0, 0.5, 0, ["\n"], 3)
    assert request.metadata == {"user": "u", "a": "b"}


def test_a_completion_takes_a_text_or_token_ids_alone_or_in_a_list_of_one():
    assert complete().prompt == "hello"
    assert complete(prompt=["one"]).prompt == "one"
    assert complete(prompt=[1, 2, 3]).input_tokens == [1, 2, 3]
    assert complete(prompt=[[4, 5]]).input_tokens == [4, 5]


def test_the_bound_of_the_output_where_the_body_has_none():
    assert complete().max_output_tokens == 16
    assert chat().max_output_tokens == DEFAULT_MAX_OUTPUT_TOKENS
    body = {"model": "m", "messages": HELLO}
    assert openai.request_of(openai.CHAT, body, "r1", "t1", max_tokens=5).max_output_tokens == 5
    assert openai.request_of(openai.CHAT, {**body, "max_tokens": 9}, "r1", "t1", max_tokens=5).max_output_tokens == 9


def test_a_model_given_beside_the_body_goes_before_the_bodys():
    assert openai.request_of(openai.CHAT, {"messages": HELLO}, "r", "t", model="auto").model == "auto"
    assert openai.request_of(openai.CHAT, {"model": "gpt-9", "messages": HELLO}, "r", "t", model="auto").model == "auto"


def test_fields_that_do_nothing_or_are_null_count_as_not_given():
    idle = {
        "n": 1,
        "stream": False,
        "logprobs": False,
        "top_logprobs": 0,
        "tools": None,
        "response_format": {"type": "text"},
        "logit_bias": {},
    }
    assert chat(**idle) == chat()
    assert complete(best_of=1, echo=False, suffix=None, stop=None, max_tokens=None) == complete()


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (chat, "n", 2),
        (chat, "n", True),  # one in Python, but no number in JSON
        (chat, "stream", True),
        (chat, "tools", [{"type": "function"}]),
        (chat, "tool_choice", "auto"),
        (chat, "functions", []),
        (chat, "logit_bias", {"1": 2}),
        (chat, "prompt", "x"),
        (chat, "best_of", 2),
        (chat, "whatever", 0),
        (complete, "echo", True),
        (complete, "best_of", 3),
        (complete, "suffix", "x"),
        (complete, "top_logprobs", 1),
        (complete, "messages", HELLO),
        (complete, "max_completion_tokens", 3),
    ],
)
def test_what_is_not_served_is_refused_by_name(call, field, value):
    error = refused(call, **{field: value})
    assert error.param == field
    assert error.message.startswith(f"`{field}`: not supported")
    assert error.code is ErrorCode.UNSUPPORTED_FEATURE


@pytest.mark.parametrize(
    ("call", "body", "param"),
    [
        (chat, {"temperature": 3}, "temperature"),
        (chat, {"temperature": "warm"}, "temperature"),
        (chat, {"max_tokens": 0}, "max_tokens"),
        (chat, {"max_completion_tokens": 1.5}, "max_completion_tokens"),
        (chat, {"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        (chat, {"model": None}, "model"),
        (chat, {"model": ""}, "model"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hi"}, "messages"),
        (chat, {"messages": ["hi"]}, "messages[0]"),
        (chat, {"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat, {"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        (chat, {"stop": [1]}, "stop[0]"),
        (chat, {"metadata": 5}, "metadata"),
        (chat, {"user": 5}, "metadata[...]"),
        (complete, {"prompt": ""}, "prompt"),
        (complete, {"prompt": []}, "prompt"),
        (complete, {"prompt": None}, "prompt"),
        (complete, {"prompt": ["a", "b"]}, "prompt"),
        (complete, {"prompt": [1, -1]}, "prompt[1]"),
    ],
)
def test_a_wrong_field_is_named_as_the_bodys_author_knows_it(call, body, param):
    error = refused(call, **body)
    assert error.param == param
    assert f"`{param}`" in error.message


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(InvalidMessage, match="expected an object"):
        openai.request_of(openai.CHAT, body, "r", "t")


def test_a_chat_asks_for_log_probabilities_by_two_fields_and_a_completion_by_one():
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert complete(logprobs=2).sampling.logprobs == 2


def test_a_response_format_becomes_a_schema():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}})
    assert asked.output_format.json_schema == schema
    assert chat(response_format={"type": "json_object"}).output_format.json_schema == {"type": "object"}
    assert chat(response_format={"type": "text"}).output_format is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    ],
)
def test_a_wish_that_is_not_understood_is_named(body, param):
    error = refused(chat, **body)
    assert (error.param, error.code) == (param, ErrorCode.INVALID_REQUEST)
    assert f"`{param}`" in error.message


def test_log_probabilities_are_given_in_the_shape_of_the_call():
    half = TokenLogprob(7, "\N{REPLACEMENT CHARACTER}", -1.5)
    told = [TokenLogprob(5, " é", -0.5, [Alternative(5, " é", -0.5), Alternative(6, "b", -2.0)]), half]
    result = InferenceResult("r1", "completed", output_text=" é", logprobs=told)
    content = openai.response_body(openai.CHAT, result, 17, "m")["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["logprob"], one["bytes"]) for one in content] == [
        (" é", -0.5, [32, 195, 169]),
        ("\N{REPLACEMENT CHARACTER}", -1.5, None),
    ]
    assert [other["token"] for other in content[0]["top_logprobs"]] == [" é", "b"]
    given = openai.response_body(openai.COMPLETIONS, result, 17, "m")["choices"][0]["logprobs"]
    assert (given["token_logprobs"], given["text_offset"]) == ([-0.5, -1.5], [0, 2])
    assert given["top_logprobs"][0] == {" é": -0.5, "b": -2.0}


def test_response_bodies_have_the_fields_that_clients_read():
    result = InferenceResult(
        "r1", "completed", model="smol", output_text="Paris.", finish_reason="stop", usage=Usage(input_tokens=5, output_tokens=2)
    )
    body = openai.response_body(openai.CHAT, result, 17, "auto")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert (body["id"], body["object"], body["created"], body["model"]) == ("chatcmpl-r1", "chat.completion", 17, "smol")
    other = openai.response_body(openai.COMPLETIONS, msgspec.structs.replace(result, model=None), 17, "auto")
    assert (other["id"], other["object"], other["model"]) == ("cmpl-r1", "text_completion", "auto")
    assert other["choices"][0]["text"] == "Paris."
