"""The `sim` engine's profile and faults; what it shares with the others is in the conformance suite."""

import asyncio

import pytest
from virtual_loop import run_virtual

from engine_consumers.errors import EngineError
from engine_consumers.sim import SimEngine
from schemas.config import EngineConfig
from schemas.errors import ConfigError, ErrorCode
from schemas.messages import ChatMessage, InferenceRequest, Sampling

QUIET = {"ttft_ms": 0, "tpot_ms": 0, "prefill_tokens_per_s": 0}


def engine_of(slots=4, **options):
    return SimEngine(EngineConfig(kind="sim", slots=slots, options=options))


async def timed(engine, request, run="r", seed=1):
    """Give each piece with the moment it came."""
    clock = asyncio.get_running_loop().time
    return [(clock(), piece) async for piece in engine.generate(request, run, seed)]


def run(engine, *requests):
    async def main():
        await engine.start()
        calls = (timed(engine, request, f"r{n}", n) for n, request in enumerate(requests, 1))
        return await asyncio.gather(*calls, return_exceptions=True)

    return run_virtual(main())


def test_the_profile_is_kept():
    engine = engine_of(ttft_ms=50, tpot_ms=10, prefill_tokens_per_s=1000, interference=0, start_ms=2000)
    (pieces,) = run(engine, InferenceRequest(prompt="x" * 400, max_output_tokens=5))
    moments = [moment for moment, _ in pieces]
    assert moments == pytest.approx([2.15, 2.16, 2.17, 2.18, 2.19])
    assert all(len(piece.token_ids) == 1 for _, piece in pieces)


def test_company_slows_each_one_down():
    request = InferenceRequest(prompt="abcd", max_output_tokens=101)
    profile = {"ttft_ms": 0, "tpot_ms": 10, "prefill_tokens_per_s": 0, "interference": 0.5}
    (alone,) = run(engine_of(**profile), request)
    together = run(engine_of(**profile), request, request, request)
    assert alone[-1][0] == pytest.approx(1.0)
    assert [pieces[-1][0] for pieces in together] == pytest.approx([2.0, 2.0, 2.0], rel=0.02)


def test_a_request_waits_for_a_slot():
    request = InferenceRequest(prompt="abcd", max_output_tokens=2)
    pieces = run(engine_of(slots=1, ttft_ms=100, tpot_ms=100, prefill_tokens_per_s=0), request, request, request)
    assert [p[-1][0] for p in pieces] == pytest.approx([0.2, 0.4, 0.6])


def test_without_latency_many_tokens_come_in_one_piece_and_no_time_passes():
    (pieces,) = run(engine_of(**QUIET), InferenceRequest(prompt="x", max_output_tokens=600))
    assert [len(piece.token_ids) for _, piece in pieces] == [256, 256, 88]
    assert [moment for moment, _ in pieces] == pytest.approx([0.0, 0.0, 0.0])


def test_a_step_finer_than_a_millisecond_gives_several_tokens():
    (pieces,) = run(
        engine_of(ttft_ms=0, tpot_ms=0.1, prefill_tokens_per_s=0), InferenceRequest(prompt="x", max_output_tokens=101)
    )
    assert len(pieces) == 11
    assert pieces[-1][0] == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (InferenceRequest(prompt="abcd"), 1),
        (InferenceRequest(prompt="abcde"), 2),
        (InferenceRequest(prompt="é" * 4), 2),
        (InferenceRequest(input_tokens=[1, 2, 3]), 3),
        (InferenceRequest(messages=[ChatMessage("user", "hello")]), 3),  # "user: hello\n" has 12 bytes
    ],
)
def test_a_token_is_four_bytes_rounded_up(request_, tokens):
    assert run_virtual(engine_of().count_tokens(request_)) == tokens


def test_every_nth_request_fails_in_the_middle():
    request = InferenceRequest(prompt="x", max_output_tokens=8)
    found = run(engine_of(fail_every=3, tpot_ms=5), *[request] * 6)
    assert [isinstance(pieces, EngineError) for pieces in found] == [False, False, True] * 2
    assert found[2].code is ErrorCode.INTERNAL

    async def main():
        engine = engine_of(fail_every=1, tpot_ms=5)
        await engine.start()
        generator = engine.generate(request, "r", 1)
        assert (await anext(generator)).token_ids
        with pytest.raises(EngineError, match="told to fail"):
            await anext(generator)
        assert engine.status().running == 0

    run_virtual(main())


def test_a_failing_request_never_completes_even_where_it_has_no_middle():
    (found,) = run(engine_of(fail_every=1, **QUIET), InferenceRequest(prompt="x", max_output_tokens=8))
    assert isinstance(found, EngineError)


def test_it_dies_at_the_request_it_was_told_to():
    engine = engine_of(die_after_requests=2)
    request = InferenceRequest(prompt="x", max_output_tokens=3)
    found = run(engine, *[request] * 4)
    assert [getattr(error, "code", None) for error in found] == [ErrorCode.UNHEALTHY] * 4
    assert "request 2" in run_virtual(engine.died())


def test_the_answer_depends_on_prompt_and_seed_and_greedy_on_the_prompt_alone():
    def say(prompt, seed, temperature):
        async def main():
            engine = engine_of(**QUIET)
            await engine.start()
            request = InferenceRequest(prompt=prompt, max_output_tokens=20, sampling=Sampling(temperature=temperature))
            return (await timed(engine, request, seed=seed))[-1][1].token_ids

        return run_virtual(main())

    assert say("a", 1, 1.0) == say("a", 1, 1.0)
    assert say("a", 1, 1.0) != say("a", 2, 1.0)
    assert say("a", 1, 1.0) != say("b", 1, 1.0)
    assert say("a", 1, 0.0) == say("a", 2, 0.0) != say("b", 1, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttft": 3}, r"`options\.ttft`: unknown option: expected one of answer_tokens, .*tpot_ms"),
        ({"ttft_ms": -1}, r"`options\.ttft_ms`: .*>= 0"),
        ({"tpot_ms": "fast"}, r"`options\.tpot_ms`: .*float"),
        ({"max_context": 1}, r"`options\.max_context`"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        engine_of(**options)


def test_cache_usage_grows_with_the_context_and_is_bounded():
    async def main():
        engine = engine_of(kv_tokens=100, tpot_ms=10)
        await engine.start()
        generator = engine.generate(InferenceRequest(input_tokens=[1] * 30, max_output_tokens=500), "r", 1)
        await anext(generator)
        assert engine.status().kv_cache_usage == pytest.approx(0.31)
        for _ in range(200):
            await anext(generator)
        assert engine.status().kv_cache_usage == 1.0
        await generator.aclose()
        assert engine.status().kv_cache_usage == 0.0

    run_virtual(main())


def test_closing_ends_what_is_open_with_an_abort():
    async def main():
        engine = engine_of(slots=1, tpot_ms=10)
        await engine.start()
        calls = [asyncio.create_task(timed(engine, InferenceRequest(prompt="x"), f"r{n}")) for n in range(3)]
        await asyncio.sleep(0.2)
        await engine.close()
        assert [pieces[-1][1].finish_reason for pieces in await asyncio.gather(*calls)] == ["abort"] * 3

    run_virtual(main())
