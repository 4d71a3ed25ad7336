"""What the engine behind Triton decides without a server: its profiles, the check of a model, and the child it starts."""

import asyncio
import json
import sys

import pytest

from engine_consumers.core.stream import StopText
from engine_consumers.engine import Piece
from engine_consumers.errors import EngineError
from engine_consumers.mailbox import Mailbox
from engine_consumers.moe import MoeEngine
from engine_consumers.moe.experts import during, read_experts
from engine_consumers.moe.profiles import PROFILES, Asked
from engine_consumers.moe.server import Server
from engine_consumers.moe.tensors import Given, Signature, check, shape_of, signature
from engine_consumers.registry import load
from schemas.config import EngineConfig, TimeSlicesConfig
from schemas.errors import ConfigError, ErrorCode
from schemas.messages import ExpertFigures, Sampling, Usage

SERVER = {"server": ["triton"]}
RETURNS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
ALL = {name: frozenset(profile.inputs) for name, profile in PROFILES.items()}


class Letters:
    """A tokenizer whose tokens are characters; 0 ends an answer."""

    ends = frozenset({0})

    def encode(self, text):
        return [ord(c) for c in text]

    def speller(self, stops, room):
        stop, said = StopText(stops), []

        def take(token):
            said.append(token)
            if token in self.ends:
                return stop.finish(), "stop"
            text = stop.push(chr(token))
            return text, "stop" if stop.hit else "length" if len(said) >= room else None

        return take


def asked(room=8, **sampling):
    return Asked("w.1.run", [72, 105], "Hi", room, 7, 1, Sampling(**sampling))


def engine_of(tmp_path, *, model=True, **fields):
    if model:
        (tmp_path / "config.json").write_text("{}")
    return load(EngineConfig(**{"kind": "moe", "model": "m", "model_path": str(tmp_path), "options": SERVER, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {}}, "`options.url`, `options.server`: neither is set: expected the address of a Triton server"),
        ({"options": {**SERVER, "url": "a:1"}}, "`options.url`, `options.server`: both are set"),
        ({"options": {"url": "http://a:1"}}, "`options.url`: expected the host:port of a Triton server's gRPC, got 'http://a:1'"),
        ({"options": {**SERVER, "profile": "tgi"}}, "`options.profile`: .*'tgi'"),
        ({"options": {**SERVER, "message_bytes_max": 10}}, "`options.message_bytes_max`: .*>= 4096"),
        ({"options": {**SERVER, "port": 1}}, "`options.port`: unknown option: expected one of call_timeout_s, chat_template"),
        ({"model_path": None}, "`model_path`: required: the folder of the model, with its config.json and tokenizer"),
        ({"time_slices": TimeSlicesConfig("gpu0")}, "`time_slices`: the server steps by itself"),
    ],
)
def test_a_wrong_configuration_is_named(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(tmp_path, **fields)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"`model_path`: expected a folder with a model .config.json., got {tmp_path}"):
        engine_of(tmp_path, model=False)


def test_before_its_start_it_is_unwell_and_takes_nothing(tmp_path):
    engine = engine_of(tmp_path)
    assert isinstance(engine, MoeEngine)
    assert not engine.status().is_healthy
    with pytest.raises(EngineError, match="not started"):
        engine.estimate_bytes(None)


# -- the model that the server has --------------------------------------------------------------------------------------------


def of_server(profile, *, batch=False, without=(), **changed):
    """What a server would say of a model that is just what a profile wants."""
    before = (-1,) if batch else ()

    def given(tensors):
        made = {name: Given(t.datatype, (*before, *t.dims), t.is_optional) for name, t in tensors.items()}
        return {name: changed.get(name, one) for name, one in made.items() if name not in without}

    found = PROFILES[profile]
    return Signature(given(found.inputs), given(found.outputs), is_decoupled=True)


def checked(profile, found):
    check(profile, "name", found, PROFILES[profile].inputs, PROFILES[profile].outputs)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_model_that_is_what_the_profile_wants_passes(profile, batch):
    checked(profile, of_server(profile, batch=batch))
    optional = [name for name, tensor in PROFILES[profile].inputs.items() if tensor.is_optional]
    checked(profile, of_server(profile, batch=batch, without=optional))


@pytest.mark.parametrize(
    ("profile", "found", "message"),
    [
        ("forebay", of_server("forebay", without=["request"]), "it has no input `request`, only input_ids"),
        ("vllm", of_server("vllm", without=["text_output"]), "it has no output `text_output`, only finish_reason, num_"),
        (
            "tensorrt_llm",
            of_server("tensorrt_llm", input_ids=Given("INT64", (-1,))),
            r"its input `input_ids` is INT64 \[-1\]: expected INT32 \[-1\]",
        ),
        (
            "forebay",
            of_server("forebay", output_ids=Given("INT32", (-1, -1, -1))),
            r"its output `output_ids` is INT32 \[-1, -1, -1\]: expected INT32 \[-1\]",
        ),
        (
            "tensorrt_llm_bls",
            of_server("tensorrt_llm_bls", max_tokens=Given("INT32", (4, 1))),
            r"its input `max_tokens` is INT32 \[4, 1\]: expected INT32 \[1\]",
        ),
        (
            "vllm",
            of_server("vllm")._replace(inputs={**of_server("vllm").inputs, "image": Given("BYTES", (-1,))}),
            "it wants an input `image`, which this profile does not give",
        ),
        ("vllm", of_server("vllm")._replace(is_decoupled=False), "it is not decoupled"),
    ],
)
def test_a_model_that_is_another_is_told_in_one_line(profile, found, message):
    with pytest.raises(ConfigError, match=f"^`options.profile`: the model 'name' is not one for '{profile}': {message}") as told:
        checked(profile, found)
    assert "\n" not in str(told.value)


def test_triton_tells_of_a_model_in_two_answers():
    metadata = {
        "inputs": [{"name": "a", "datatype": "INT32", "shape": ["-1", "2"]}],
        "outputs": [{"name": "b", "datatype": "BYTES", "shape": ["1"]}],
    }
    config = {"input": [{"name": "a", "optional": True}], "model_transaction_policy": {"decoupled": True}}
    assert signature(metadata, config) == Signature(
        {"a": Given("INT32", (-1, 2), is_optional=True)}, {"b": Given("BYTES", (1,))}, is_decoupled=True
    )
    assert not signature(metadata, {}).is_decoupled


@pytest.mark.parametrize(
    ("count", "dims", "given", "shape"),
    [(5, (-1,), (-1,), [5]), (5, (-1,), (-1, -1), [1, 5]), (1, (1,), (1,), [1]), (1, (1,), (-1, 1), [1, 1])],
)
def test_a_tensor_gets_a_batch_of_one_where_the_model_is_batched(count, dims, given, shape):
    assert shape_of(count, dims, given) == shape


# -- what is asked ------------------------------------------------------------------------------------------------------------


def ask(profile, question, given=None):
    return PROFILES[profile].ask(question, given if given is not None else ALL[profile], Letters())


def test_our_model_is_asked_with_everything():
    values = ask("forebay", asked(temperature=0.5, stop=["x"], min_p=0.1))
    assert values["input_ids"] == [72, 105]
    assert json.loads(values["request"][0]) == {
        "op": "generate",
        "run": "w.1.run",
        "max_output_tokens": 8,
        "seed": 7,
        "priority": 1,
        "sampling": {"temperature": 0.5, "stop": ["x"], "min_p": 0.1},
    }
    assert json.loads(PROFILES["forebay"].operation("cancel", run="r")["request"][0]) == {"op": "cancel", "run": "r"}


def test_the_vllm_backend_is_asked_in_vllms_words():
    values = ask("vllm", asked(top_k=3, stop=["x", "y"], presence_penalty=0.5))
    told = json.loads(values.pop("sampling_parameters")[0])
    assert told == {
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
        "stop": ["x", "y"],
        "seed": 7,
    }
    flags = {name: [True] for name in ("exclude_input_in_output", "stream", *RETURNS)}
    assert values == {"text_input": [b"Hi"], **flags}
    assert json.loads(ask("vllm", asked())["sampling_parameters"][0])["top_k"] == -1
    older = ask("vllm", asked(), frozenset({"text_input", "stream", "sampling_parameters"}))
    assert set(older) == {"text_input", "stream", "sampling_parameters"}


def test_tensorrt_is_asked_for_tokens_and_told_all_of_how_to_draw():
    assert ask("tensorrt_llm", asked(temperature=0.5, top_p=0.9, top_k=4)) == {
        "input_ids": [72, 105],
        "input_lengths": [2],
        "request_output_len": [8],
        "streaming": [True],
        "end_id": [0],
        "runtime_top_k": [4],
        "runtime_top_p": [0.9],
        "temperature": [0.5],
        "presence_penalty": [0.0],
        "frequency_penalty": [0.0],
        "min_p": [0.0],
        "random_seed": [7],
    }
    greedy = ask("tensorrt_llm", asked(temperature=0.0, top_p=0.5))
    assert (greedy["temperature"], greedy["runtime_top_k"], greedy["runtime_top_p"]) == ([1.0], [1], [1.0])


def test_tensorrts_outer_model_is_asked_for_text_and_told_the_stop_strings():
    values = ask("tensorrt_llm_bls", asked(stop=["x", "yz"]))
    wanted = {"text_input": [b"Hi"], "max_tokens": [8], "stream": [True], "stop_words": [b"x", b"yz"], "top_k": [0]}
    assert {name: values[name] for name in wanted} == wanted
    assert "stop_words" not in ask("tensorrt_llm_bls", asked())


@pytest.mark.parametrize(
    ("sampling", "field"),
    [({"min_p": 0.1}, "min_p"), ({"top_p": 0.5}, "top_p"), ({"temperature": 0.7}, "temperature"), ({}, "top_k")],
)
def test_what_the_model_has_no_input_for_is_refused(sampling, field):
    given = ALL["tensorrt_llm"] - {field, f"runtime_{field}"}
    with pytest.raises(EngineError, match=f"`sampling.{field}`: the model has no input `(runtime_)?{field}`") as told:
        ask("tensorrt_llm", asked(**sampling), given)
    assert (told.value.code, told.value.param) == (ErrorCode.UNSUPPORTED_FEATURE, f"sampling.{field}")


def test_features_follow_the_inputs_of_the_model():
    core = PROFILES["tensorrt_llm"]
    assert core.features(ALL["tensorrt_llm"]) == ("chat", "input_tokens", "penalties", "seed", "stop")
    assert core.features(frozenset()) == ("chat", "input_tokens", "stop")
    assert "input_tokens" not in PROFILES["vllm"].features(ALL["vllm"])


# -- what is answered ---------------------------------------------------------------------------------------------------------


def answers(profile, question, *responses):
    """What a run's responses say: the last is marked as final."""
    reader = PROFILES[profile].reader(question, Letters())
    return [reader.read(values, is_final=n == len(responses) - 1) for n, values in enumerate(responses)]


def ours(tokens, text, finish="", error="", statistics=""):
    told = {"text": text, "finish_reason": finish, "error": error, "statistics": statistics}
    return {"output_ids": tokens, **{name: [value.encode()] for name, value in told.items()}}


def test_our_model_answers_with_everything():
    first, last = answers("forebay", asked(), ours([1], "a"), ours([2], "b", "stop", statistics='{"running":1}'))
    assert (first.token_ids, first.text, first.finish) == ([1], "a", None)
    assert (last.token_ids, last.text, last.finish, last.statistics) == ([2], "b", "stop", {"running": 1})


@pytest.mark.parametrize(
    ("response", "code", "message"),
    [
        (ours([], "", error='{"code":"context_overflow","message":"too long"}'), ErrorCode.CONTEXT_OVERFLOW, "too long"),
        (ours([], "", error="boom"), ErrorCode.INTERNAL, "the model failed: boom"),
        (ours([], "", "weary"), ErrorCode.INTERNAL, "ended the run with 'weary'"),
        ({}, ErrorCode.INTERNAL, "ended the run with ''"),
    ],
)
def test_a_failure_of_our_model_keeps_its_code(response, code, message):
    with pytest.raises(EngineError, match=message) as told:
        answers("forebay", asked(), response)
    assert told.value.code is code


def test_vllms_own_counts_and_reason_are_taken():
    def response(text, reason, count):
        return {"text_output": [text], "finish_reason": [reason], "num_output_tokens": [count], "num_input_tokens": [5]}

    first, last = answers("vllm", asked(), response(b"ab", b"None", 3), response(b"c", b"length", 1))
    assert (first.token_ids, first.text, first.finish, first.counted) == ([97, 98], "ab", None, None)
    assert (last.text, last.finish, last.counted) == ("c", "length", (5, 4))


@pytest.mark.parametrize("profile", ["vllm", "tensorrt_llm_bls"])
def test_text_is_cut_at_a_stop_string_whatever_the_model_gives_of_it(profile):
    first, last = answers(profile, asked(stop=["END"]), {"text_output": [b"abE"]}, {"text_output": [b"NDx"]})
    assert (first.text, last.text, last.finish) == ("ab", "", "stop")
    held, last = answers(profile, asked(stop=["END"]), {"text_output": [b"abE"]}, {})
    assert (held.text, last.text, last.finish, last.counted) == ("ab", "E", "stop", (2, 3))


def test_a_text_as_long_as_allowed_has_reached_its_length():
    assert answers("tensorrt_llm_bls", asked(room=3), {"text_output": [b"abc"]})[-1].finish == "length"


def test_tensorrts_tokens_are_spelled_and_end_at_the_end_token_the_stop_string_or_the_limit():
    def response(*tokens):
        return {"output_ids": [*tokens, 0, 0], "sequence_length": [len(tokens)]}

    first, last = answers("tensorrt_llm", asked(), response(97), response(98, 0))
    assert (first.token_ids, first.text, first.finish) == ([97], "a", None)
    assert (last.token_ids, last.text, last.finish) == ([98, 0], "b", "stop")
    cut = answers("tensorrt_llm", asked(stop=["b"]), response(97, 98, 99))[-1]
    assert (cut.token_ids, cut.text, cut.finish) == ([97, 98], "a", "stop")
    assert answers("tensorrt_llm", asked(room=2), response(97, 98))[-1].finish == "length"
    assert answers("tensorrt_llm", asked(), response(97), {})[-1].finish == "stop"


def test_experts_are_told_of_since_the_start_and_of_each_run_alone():
    told = {"hits": 9, "misses": 3, "hit_rate": 0.75, "stall_ms": 4.5, "resident": 4, "hottest": [[0, 1, 2.5]]}
    before = ExpertFigures(5, 3, 1.25)
    after = read_experts({"running": 1, "experts": told})
    assert after == ExpertFigures(9, 3, 4.5, 4, hottest=[(0, 1, 2.5)])
    assert during(before, after) == ExpertFigures(4, 0, 3.25, 4)
    assert during(None, after) is None
    assert during(after, before) is None, "a server that was started anew counts from nothing"
    assert (read_experts({}), read_experts({"experts": "many"})) == (None, None)


def test_what_a_model_counted_is_its_usage():
    async def scenario():
        mail = Mailbox()
        mail.begin(3)
        mail.counted(5, 4)
        mail.put([1, 2], "ab", "stop")
        return await mail.take()

    assert asyncio.run(scenario()) == Piece([1, 2], "ab", "stop", Usage(5, 4))


# -- the child ----------------------------------------------------------------------------------------------------------------

TALKER = "import sys; print('I got', sys.argv[1:]); print('error: no such model'); print('bye'); sys.exit(3)"
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"


def test_a_child_that_ends_is_told_of_with_its_last_error(capfd):
    async def scenario():
        server = Server([sys.executable, "-c", TALKER])
        address = await server.start()
        return address, await server.ended()

    address, reason = asyncio.run(scenario())
    assert reason == "the Triton server ended with code 3: error: no such model"
    port = address.removeprefix("127.0.0.1:")
    assert f"I got ['--grpc-port', '{port}']" in capfd.readouterr().err


def test_a_command_that_cannot_be_run_is_named():
    with pytest.raises(ConfigError, match=r"`options.server`: /no/such/triton cannot be started: No such file"):
        asyncio.run(Server(["/no/such/triton"]).start())


def test_a_child_that_does_not_want_to_end_is_killed(monkeypatch):
    monkeypatch.setattr("engine_consumers.moe.server.STOP_S", 0.2)

    async def scenario():
        server = Server([sys.executable, "-c", SLEEPER])
        await server.start()
        while not server._tail:  # noqa: ASYNC110 - until it ignores what it is told
            await asyncio.sleep(0)
        await server.stop()
        return await server.ended()

    assert asyncio.run(scenario()) == "the Triton server was killed by SIGKILL: up"
