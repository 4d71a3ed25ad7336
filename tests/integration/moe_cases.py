"""What the engine `moe` does with a real Triton: run in the engine's environment, it tells a line of JSON for each case.

Usage: PYTHON tests/integration/moe_cases.py MODEL_FOLDER [CASE ...]; the repository's root is in PYTHONPATH.

The profiles of vLLM's and TensorRT-LLM's backends meet stand-ins of those (`behind_triton/`): what is proved is what is sent
and how answers are read, not what the real ones make of it.
"""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from behind_triton.doubles import VLLM_IN, VLLM_OUT, Triton
from in_environment import tell_cases

from deploy.local import ready
from engine_consumers.engine import Piece
from engine_consumers.errors import EngineError
from engine_consumers.registry import load
from schemas.config import EngineConfig
from schemas.errors import ConfigError, ErrorCode
from schemas.messages import ChatMessage, InferenceRequest, Sampling, Usage

MODEL = sys.argv[1]
QUICK = {"call_timeout_s": 1.0, "start_timeout_s": 60.0}
DARK = "127.0.0.1:9"  # nobody answers there
LIMIT_S = 30.0


def engine_of(**options):
    given = {"max_context": 512, **QUICK, **options}
    given = {name: value for name, value in given.items() if value is not None}
    return load(EngineConfig(kind="moe", model="m", model_path=MODEL, slots=4, options=given))


@contextlib.asynccontextmanager
async def started(**options):
    engine = engine_of(**options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def asking(prompt, tokens=400, **sampling):
    return InferenceRequest(prompt=prompt, max_output_tokens=tokens, sampling=Sampling(**sampling))


async def run(engine, request, seed=7):
    pieces = [piece async for piece in engine.generate(request, f"run-{id(request)}", seed)]
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids], pieces[-1]


async def refusal(made, *expected):
    """What a coroutine is refused with: one line, with these words."""
    try:
        await made
    except (ConfigError, EngineError) as error:
        said = str(error)
        assert "\n" not in said, said
        for word in expected:
            assert word in said, f"{word!r} is not in {said!r}"
        return error
    message = "it was not refused"
    raise AssertionError(message)


async def start_of(engine):
    try:
        await engine.start()
    finally:
        await engine.close()


async def until(holds, what):
    await asyncio.to_thread(ready.until, holds, LIMIT_S, what)


def same(got, wanted):
    assert got == wanted, f"expected {wanted!r}, got {got!r}"


class Cases:
    """Share one server; those that kill it start it again."""

    def __init__(self, triton: Triton) -> None:
        self.triton, self.url = triton, {"url": triton.address}

    async def case_vllm(self):
        async with started(profile="vllm", **self.url) as engine:
            text, tokens, last = await run(engine, asking("Hi there", temperature=0.5, top_k=3, presence_penalty=0.25))
            told = json.loads(text)
            parameters = json.loads(told.pop("sampling_parameters")[0])
            flags = [name for name, one in VLLM_IN.items() if one.startswith("BOOL") and "logprob" not in name]
            same(told, {"text_input": ["Hi there"], **{name: [True] for name in flags}})
            same((parameters["max_tokens"], parameters["top_k"], parameters["seed"]), (400, 3, 7))
            same((parameters["temperature"], parameters["presence_penalty"], parameters["stop"]), (0.5, 0.25, []))
            same((last.finish_reason, last.usage), ("stop", Usage(2, -(-len(text) // 8))))  # as it counts, not our tokenizer
            assert tokens, "text without tokens: no time to the first one is known"
            same((await run(engine, asking("Hi there", 3)))[2].finish_reason, "length")
            same(engine.status().kv_cache_usage, None)

    async def case_vllm_chat(self):
        """The conversation is rendered here, and sent as the text of which the backend makes the same tokens."""
        async with started(profile="vllm", **self.url) as engine:
            request = InferenceRequest(messages=[ChatMessage("user", "Hello?")], max_output_tokens=400)
            text, _, _ = await run(engine, request)
            rendered = json.loads(text)["text_input"][0]
            assert "Hello?" in rendered
            same(await engine.count_tokens(InferenceRequest(prompt=rendered)), await engine.count_tokens(request))

    async def case_tensorrt_llm(self):
        async with started(profile="tensorrt_llm", **self.url) as engine:
            request = asking("Hi there", temperature=0.0, stop=["NEVER"])
            text, tokens, last = await run(engine, request)
            told = json.loads(text)
            count = await engine.count_tokens(request)
            assert len(told.pop("input_ids")) == count
            same((told.pop("input_lengths"), told.pop("request_output_len"), told.pop("streaming")), ([count], [400], [True]))
            same((told["temperature"], told["runtime_top_k"], told["runtime_top_p"]), ([1.0], [1], [1.0]))
            same((told["random_seed"], last.usage), ([7], Usage(count, len(tokens))))
            ids = InferenceRequest(input_tokens=[5, 6, 7], max_output_tokens=400)
            same(json.loads((await run(engine, ids))[0])["input_ids"], [5, 6, 7])

    async def case_tensorrt_llm_bls(self):
        async with started(profile="tensorrt_llm_bls", **self.url) as engine:
            text, _, last = await run(engine, asking("Hi there", top_p=0.5, stop=["\n\n", "é"]))
            told = json.loads(text)
            same((told["text_input"], told["max_tokens"], told["stream"]), (["Hi there"], [400], [True]))
            same((told["stop_words"], told["top_p"], told["top_k"]), (["\n\n", "é"], [0.5], [0]))
            same((last.finish_reason, told["random_seed"]), ("stop", [7]))

    async def case_stop_strings_end_the_run_there(self):
        for profile in ("vllm", "tensorrt_llm", "tensorrt_llm_bls"):
            async with started(profile=profile, **self.url) as engine:
                seen = len(self.cancelled())
                text, _, last = await run(engine, asking("sing", stop=["a la"]))
                same((text, last.finish_reason), ("l", "stop"))
                await until(lambda: len(self.cancelled()) > seen, "the end of the run in the model")  # noqa: B023 - it is awaited here

    async def case_abort_reaches_the_model(self):
        for profile in ("vllm", "tensorrt_llm", "tensorrt_llm_bls"):
            async with started(profile=profile, **self.url) as engine:
                seen = len(self.cancelled())
                pieces = engine.generate(asking("sing"), "one", 1)
                await anext(pieces)
                same((engine.status().running, engine.status().waiting), (1, 0))
                await engine.abort("one")
                same([p.finish_reason async for p in pieces], ["abort"])
                same((engine.status().running, engine.status().waiting), (0, 0))
                await until(lambda: len(self.cancelled()) > seen, "the end of the run in the model")  # noqa: B023

    async def case_what_it_cannot_do_is_refused(self):
        async with started(profile="vllm", **self.url) as engine:
            ids = InferenceRequest(input_tokens=[5], max_output_tokens=4)
            error = await refusal(run(engine, ids), "`input_tokens`: the engine has no input_tokens")
            same((error.code, error.param), (ErrorCode.UNSUPPORTED_FEATURE, "input_tokens"))
        async with started(profile="tensorrt_llm", **self.url) as engine:
            error = await refusal(run(engine, asking("x", min_p=0.5)), "`sampling.min_p`: the model has no input `min_p`")
            same(error.code, ErrorCode.UNSUPPORTED_FEATURE)

    async def case_the_models_error_is_told(self):
        async with started(profile="vllm", **self.url) as engine:
            error = await refusal(run(engine, asking("please fail")), "Error generating stream: it was asked to fail")
            same(error.code, ErrorCode.INTERNAL)
            same((await run(engine, asking("Hi", 2)))[2].finish_reason, "length")

    async def case_wrong_models_are_told_at_the_start(self):
        wrong = {
            "no_such": ("`options.triton_model`: the Triton server at", "has no model 'no_such': expected one of tensorrt_llm, "),
            "vllm_model": ("`options.profile`: the model 'vllm_model' is not one for 'forebay': it has no input `input_ids`",),
            "tensorrt_llm": ("it has no input `request`, only",),
        }
        for name, words in wrong.items():
            error = await refusal(start_of(engine_of(triton_model=name, **self.url)), *words)
            assert isinstance(error, ConfigError)

    async def case_no_server(self):
        error = await refusal(start_of(engine_of(url=DARK, start_timeout_s=0.5)), f"the Triton server at {DARK}", "within 0.5 s")
        same(error.code, ErrorCode.UNHEALTHY)

    async def case_a_child_that_does_not_come_up(self):
        argv = [sys.executable, "-m", "deploy.triton", "--model-path", "no/such/folder"]
        error = await refusal(start_of(engine_of(server=argv)), "the Triton server ended with code 2", "no/such/folder")
        same(error.code, ErrorCode.UNHEALTHY)
        await refusal(start_of(engine_of(server=["no-such-program"])), "`options.server`: no-such-program cannot be started")

    async def case_limits(self):
        async with started(profile="vllm", run_timeout_s=0.3, message_bytes_max=8192, **self.url) as engine:
            error = await refusal(run(engine, asking("sing")), "did not answer in time")
            same(error.code, ErrorCode.TIMEOUT)
        async with started(profile="vllm", max_context=10**6, message_bytes_max=8192, **self.url) as engine:
            error = await refusal(run(engine, asking("word " * 4000, 4)), "`options.message_bytes_max`")
            same(error.code, ErrorCode.INVALID_REQUEST)

    async def case_loading_and_unloading(self):
        for name in ("spare", "spare_too"):
            self.triton.write(name, "vllm", 0, VLLM_IN, VLLM_OUT)
        spare = {"profile": "vllm", "triton_model": "spare", **self.url}
        await refusal(start_of(engine_of(**spare)), "has its model 'spare' not ready: it is not loaded: load it there, or set")
        async with started(load=True, **spare) as engine:
            same((await run(engine, asking("Hi", 2)))[2].finish_reason, "length")
        await refusal(start_of(engine_of(**spare)), "has its model 'spare' not ready")
        await refusal(start_of(engine_of(load=True, **{**spare, "triton_model": "nope"})), "`options.load`:", "does not load")

    async def case_a_server_that_goes_and_returns(self):
        async with started(profile="vllm", **self.url) as engine:
            pieces = engine.generate(asking("sing"), "one", 1)
            await anext(pieces)
            self.triton.kill()
            error = await refusal(drained(pieces), "the Triton server at")
            same((error.code, error.code.retryable), (ErrorCode.UNHEALTHY, True))
            await until(lambda: not engine.status().is_healthy, "the server's absence")
            error = await refusal(run(engine, asking("Hi")), "does not answer")
            same(error.code, ErrorCode.UNHEALTHY)
            same((engine.status().running, engine.status().waiting), (0, 0))
            died = asyncio.create_task(engine.died())
            self.triton.start()
            await until(lambda: engine.status().is_healthy, "the server's return")
            same((await run(engine, asking("Hi", 2)))[2].finish_reason, "length")
            assert not died.done(), "an absence was taken for death"
            died.cancel()

    async def case_a_server_that_stands_still_is_away(self):
        async with started(profile="vllm", **self.url) as engine:
            pieces = engine.generate(asking("sing"), "one", 1)
            await anext(pieces)
            self.triton.signal(signal.SIGSTOP)
            try:
                error = await refusal(drained(pieces), "did not answer in time")
                same(error.code, ErrorCode.UNHEALTHY)
                assert not engine.status().is_healthy
            finally:
                self.triton.signal(signal.SIGCONT)
            await until(lambda: engine.status().is_healthy, "the server's return")
            same((await run(engine, asking("Hi", 2)))[2].finish_reason, "length")

    async def case_another_model_in_its_place_is_death(self):
        async with started(profile="vllm", **self.url) as engine:
            self.triton.kill()
            await until(lambda: not engine.status().is_healthy, "the server's absence")
            self.triton.write("vllm_model", "vllm", 0, {"prompt": "STRING 1"}, VLLM_OUT)
            self.triton.start()
            try:
                async with asyncio.timeout(LIMIT_S):
                    assert "it has no input `text_input`, only prompt" in await engine.died()
            finally:
                self.triton.kill()
                self.triton.write("vllm_model", "vllm", 0, VLLM_IN, VLLM_OUT)
                self.triton.start()

    async def case_our_model_tells_of_its_experts_and_its_context(self):
        argv = [sys.executable, "-m", "deploy.triton", "--model-path", MODEL, "--threads", "1", "--max-context", "300"]
        async with started(server=[*argv, "--expert-budget-bytes", "1"], max_context=None) as engine:
            same(engine.status().max_context, 300)
            before = engine.status().experts
            _, _, last = await run(engine, asking("The river", 8))
            after = engine.status().experts
            assert before is not None
            assert after is not None
            assert last.experts is not None
            assert last.experts.misses > 0, "one expert for all, and none was missed"
            same(last.experts.misses, after.misses - before.misses)
            assert after.hottest
            same(last.experts.hottest, [])

    def cancelled(self) -> list[str]:
        """What the stand-ins have said of runs that nobody wanted any more."""
        return self.triton.log.read_text().splitlines()


async def drained(pieces) -> list[Piece]:
    async with asyncio.timeout(LIMIT_S):
        return [piece async for piece in pieces]


async def main() -> None:
    triton = Triton(MODEL, "--load-model=vllm_model", "--load-model=tensorrt_llm", "--load-model=tensorrt_llm_bls")
    try:
        triton.start()
        cases = Cases(triton)
        found = {name.removeprefix("case_"): getattr(cases, name) for name in vars(Cases) if name.startswith("case_")}
        await tell_cases({name: case for name, case in found.items() if not sys.argv[2:] or name in sys.argv[2:]})
    finally:
        triton.close()


if __name__ == "__main__":
    asyncio.run(main())
