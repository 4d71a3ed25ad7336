"""What the transformer engine decides before vLLM is there; what it does with vLLM is in the conformance suite."""

import asyncio
import json
import subprocess
import sys
from typing import NamedTuple

import msgspec
import pytest

from engine_consumers.core.checks import output_room
from engine_consumers.errors import EngineError
from engine_consumers.gpu import GpuFigures, GpuProbe, first_visible
from engine_consumers.prompts import Prompts
from engine_consumers.transformer import TransformerEngine
from engine_consumers.transformer.asking import told
from engine_consumers.transformer.options import TransformerOptions, sliced
from schemas.config import EngineConfig, TimeSlicesConfig
from schemas.errors import ConfigError, ErrorCode
from schemas.formats import Alternative, TokenLogprob
from schemas.messages import ChatMessage, InferenceRequest


def engine_of(**options):
    return TransformerEngine(EngineConfig(kind="transformer", model="org/model", options=options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 3}, r"`options\.max_len`: unknown option: expected one of block_size, .*max_model_len"),
        ({"dtype": "float8"}, r"`options\.dtype`: .*'float8'"),
        ({"max_model_len": 0}, r"`options\.max_model_len`: .*>= 1"),
        ({"gpu_memory_utilization": 1.5}, r"`options\.gpu_memory_utilization`: .*<= 1"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(**options)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"`model_path`: expected a folder with a model .config.json., got {tmp_path}"):
        TransformerEngine(EngineConfig(kind="transformer", model_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "`options`: expected no `pipeline_parallel_size` beside `time_slices`"),
        ({"engine_args": {"data_parallel_size": 2}}, "`options`: expected no `data_parallel_size` beside `time_slices`"),
        ({"engine_args": {"async_scheduling": True}}, r"`options\.engine_args\.async_scheduling`: expected false beside"),
    ],
)
def test_several_steps_at_once_and_turns_exclude_each_other(options, message):
    engine_of(**options)
    config = EngineConfig(kind="transformer", model="org/model", options=options, time_slices=TimeSlicesConfig("gpu0"))
    with pytest.raises(ConfigError, match=message):
        TransformerEngine(config)


def test_turns_are_taken_by_vllms_core_beside_what_else_it_is_told():
    given = TransformerOptions(engine_args={"additional_config": {"a": 1}}).arguments("folder", slots=6)
    arguments = sliced(given, TimeSlicesConfig("gpu0", weight=2.0))
    assert arguments["async_scheduling"] is False
    assert arguments["additional_config"].pop("a") == 1
    (told,) = arguments["additional_config"].values()
    assert msgspec.convert(json.loads(json.dumps(told)), TimeSlicesConfig) == TimeSlicesConfig("gpu0", weight=2.0)
    assert sliced(given, None) is given


def test_only_what_was_set_is_passed_on():
    arguments = TransformerOptions(dtype="float32", chat_template="x{").arguments("folder", slots=6)
    assert arguments == {
        "model": "folder",
        "dtype": "float32",
        "max_num_seqs": 6,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }


def test_what_vllm_takes_besides_is_passed_on_and_goes_before_what_is_set_for_it():
    given = {"max_logprobs": 2, "structured_outputs_config": {"backend": "guidance"}}
    arguments = TransformerOptions(engine_args=given).arguments("folder", slots=6)
    assert {name: arguments[name] for name in given} == given


@pytest.mark.parametrize(
    ("name", "message"),
    [("max_num_seqs", "`slots` of the engine"), ("scheduler_cls", "`time_slices`"), ("dtype", r"`options\.dtype`")],
)
def test_what_is_said_elsewhere_does_not_come_in_with_the_rest(name, message):
    with pytest.raises(ConfigError, match=rf"`options\.engine_args\.{name}`: it does not stand here: {message}"):
        engine_of(engine_args={name: 1})


def adapter(folder, written):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(written)
    return str(folder)


def test_room_is_made_for_the_adapters_of_the_largest_rank(tmp_path):
    loras = {"sql": adapter(tmp_path / "a", '{"r": 4}'), "law": adapter(tmp_path / "b", '{"r": 33}')}
    arguments = TransformerOptions(loras=loras).arguments("folder", slots=6)
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (True, 2, 64)


@pytest.mark.parametrize(
    ("written", "message"),
    [("{}", "has no rank `r`"), ("{", "cannot be read"), ('{"r": 513}', "a rank `r` of 1 to 512, got 513"), ("[]", "no rank")],
)
def test_an_adapter_that_cannot_be_one_is_named(tmp_path, written, message):
    with pytest.raises(ConfigError, match=rf"`options\.loras\.sql`: .*{message}"):
        engine_of(loras={"sql": adapter(tmp_path / "a", written)})
    with pytest.raises(ConfigError, match=r"`options\.loras\.sql`: expected a folder with an adapter"):
        engine_of(loras={"sql": str(tmp_path / "none")})


class Told(NamedTuple):
    """As vLLM tells of a token."""

    logprob: float
    rank: int
    decoded_token: str | None


def test_what_is_told_of_a_token_is_its_own_likelihood_and_the_likeliest_ones():
    there = {5: Told(-4.0, 9, "e"), 1: Told(-0.1, 1, "a"), 2: Told(float("-inf"), 2, None)}
    assert told([5], [there], 2) == [TokenLogprob(5, "e", -4.0, [Alternative(1, "a", -0.1), Alternative(2, "", -9_999.0)])]
    assert told([5], [there], 0) == [TokenLogprob(5, "e", -4.0)]
    assert told([5], None, None) == []


def test_without_vllm_the_start_says_where_to_run():
    with pytest.raises(ConfigError, match=r"vLLM cannot be imported here: .*: run the worker in the engine's own environment"):
        asyncio.run(engine_of().start())


def test_before_the_start_nothing_is_taken_and_status_is_empty():
    engine = engine_of()

    async def main():
        with pytest.raises(EngineError, match="not started") as caught:
            await anext(engine.generate(InferenceRequest(prompt="x"), "r", 1))
        assert caught.value.code is ErrorCode.UNHEALTHY
        await engine.close()

    asyncio.run(main())
    assert engine.status().max_context is None


class Tokenizer:
    """One token per letter; a template only where one is given."""

    def encode(self, text, *, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, turns, *, chat_template, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        if turns[0]["role"] != "user":
            message = "the user speaks first"
            raise KeyError(message)
        return chat_template + turns[0]["content"]


def tokens_of(request, template=None):
    prompts = Prompts(Tokenizer(), vocabulary=124, chat_template=template)
    try:
        return asyncio.run(prompts.tokens(request))
    finally:
        prompts.close()


def test_a_plain_prompt_gets_special_tokens_and_a_conversation_those_of_its_template():
    assert tokens_of(InferenceRequest(prompt="AB")) == [0, 65, 66]
    assert tokens_of(InferenceRequest(messages=[ChatMessage("user", "A")]), "{") == [123, 65]
    assert tokens_of(InferenceRequest(input_tokens=[5, 123])) == [5, 123]


def test_a_tokenizer_that_is_not_the_models_own_is_told():
    with pytest.raises(EngineError, match="the tokenizer gives token 126 where the model knows 124") as caught:
        tokens_of(InferenceRequest(prompt="A~"))
    assert caught.value.code is ErrorCode.INTERNAL


@pytest.mark.parametrize(
    ("request_", "template", "code", "param", "words"),
    [
        (InferenceRequest(input_tokens=[124]), None, ErrorCode.INVALID_REQUEST, "input_tokens[0]", "expected 0 to 123, got 124"),
        (
            InferenceRequest(messages=[ChatMessage("user", "x")]),
            None,
            ErrorCode.UNSUPPORTED_FEATURE,
            "messages",
            "no chat template",
        ),
        (
            InferenceRequest(messages=[ChatMessage("system", "x")]),
            "{",
            ErrorCode.INVALID_REQUEST,
            "messages",
            "user speaks first",
        ),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_told_why(request_, template, code, param, words):
    with pytest.raises(EngineError, match=words) as caught:
        tokens_of(request_, template)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_template_may_be_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{")
    assert tokens_of(InferenceRequest(messages=[ChatMessage("user", "A")]), str(tmp_path / "t.jinja")) == [123, 123, 65]
    with pytest.raises(ConfigError, match=r"`options\.chat_template`"):
        tokens_of(InferenceRequest(prompt="A"), str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    ("prompt", "limit", "context", "room"), [(1, 5, 100, 5), (95, 5, 100, 5), (96, 5, 100, 4), (99, 5, 100, 1)]
)
def test_the_output_is_cut_to_what_the_context_leaves(prompt, limit, context, room):
    assert output_room(prompt, limit, context) == room


@pytest.mark.parametrize(
    ("prompt", "limit", "code"),
    [
        (100, 5, ErrorCode.CONTEXT_OVERFLOW),
        (101, 1, ErrorCode.CONTEXT_OVERFLOW),
        (0, 5, ErrorCode.INVALID_REQUEST),
        (5, 0, ErrorCode.INVALID_REQUEST),
    ],
)
def test_no_room_is_an_error(prompt, limit, code):
    with pytest.raises(EngineError) as caught:
        output_room(prompt, limit, 100)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        ({}, 0),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 3),
        ({"CUDA_VISIBLE_DEVICES": "MIG-abc"}, "MIG-abc"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_the_gpu_is_the_first_visible_one(environ, device):
    assert first_visible(environ) == device


def test_a_gpu_that_is_not_there_has_no_figures():
    assert GpuProbe("GPU-none").read() == GpuFigures()


WORKER = """
import subprocess, sys
from engine_consumers.orphans import OrphanGuard
guard = OrphanGuard()
guard.start()
core = "import signal, sys; sys.stdout.write('up\\\\n'); sys.stdout.flush(); signal.pause()"
subprocess.Popen([sys.executable, "-c", core], stdin=subprocess.DEVNULL, start_new_session=True)
sys.stdin.read()
guard.release()
sys.stdin = None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the guard finds processes by /proc")
@pytest.mark.parametrize("is_killed", [True, False])
def test_no_child_outlives_its_worker(is_killed):
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"up\n"
        if is_killed:
            worker.kill()
        worker.stdin.close()
        # The child holds the other end of this pipe and waits for ever: only its death ends the reading.
        assert worker.stdout.read() == b""


# A worker in a process group of its own, whose stand-in for vLLM starts a process as vLLM does: it handles SIGINT by ending.
INTERRUPTED = """
import asyncio, multiprocessing, os, signal, time
from engine_consumers.transformer import loading

def core(ready):
    signal.signal(signal.SIGINT, lambda *_: os._exit(9))
    ready.set()
    time.sleep(60)

def bring_up(arguments, loras):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=core, args=(ready,), daemon=True)
    process.start()
    assert ready.wait(30)
    return type("Loaded", (), {"tokenizer": None, "process": process, "loras": loras})

async def main():
    came = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, came.set)
    loading._bring_up = bring_up
    process = (await loading.load({"model": "m"}, {}, 60.0)).process
    os.killpg(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(came.wait(), 10)
    process.join(1.0)
    print("core ended with", process.exitcode)
    process.kill()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_an_interrupt_from_the_terminal_reaches_the_worker_and_not_the_engines_processes(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False, start_new_session=True
    )
    assert done.stdout == "core ended with None\n", done.stderr
