"""What every engine must do: plain coroutines over a harness, run in whatever process and loop the engine needs.

Nothing here imports pytest: an engine with an environment of its own runs the cases there (`run_engine_cases.py`).
Requests of the cases stay below 512 tokens of context and are answered by at least `SLOTS` slots.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from conformance import engine_feature_cases
from conformance.engine_harnesses import GREEDY, SLOTS, Harness
from conformance.engine_runs import STORY, asking, fresh_name, idle, open_run, refusal, rest, run, same
from in_environment import tell_cases

from engine_consumers.errors import EngineError
from schemas.errors import ErrorCode
from schemas.messages import ChatMessage, InferenceRequest, Usage

STEPS_AFTER_ABORT = 2  # the step that runs while the abort comes, and the one already on its way
AT_ONCE = 32

QUESTION = [ChatMessage("user", "What is the capital of France? Answer in one sentence.")]


async def case_pieces_make_up_the_whole(harness: Harness) -> None:
    for request in (asking("Water flows down the river and", 24), InferenceRequest(messages=QUESTION, max_output_tokens=32)):
        output = await run(harness.engine, request, seed=3)
        assert len(output.pieces) > 1, "everything came in one piece"
        same([p.finish_reason for p in output.pieces[:-1]], [None] * (len(output.pieces) - 1), "finish reasons before the last")
        prompt, given = await harness.engine.count_tokens(request), 0
        for piece in output.pieces:
            given += len(piece.token_ids)
            same(piece.usage, Usage(prompt, given), "usage so far")
        assert output.finish_reason in {"stop", "length"}, output.finish_reason
        whole = harness.decode(output.tokens)
        same(output.text, whole[: len(output.text)], "text of all pieces")
        same(whole[len(output.text) :].strip("\N{REPLACEMENT CHARACTER}"), "", "text that no piece gave")
    idle(harness)


async def case_streams_in_order(harness: Harness) -> None:
    """Runs side by side: each gives its own text from front to back, and none waits until another has ended."""
    requests = [asking(f"{word} carries water to the turbines and", 24) for word in ("The river", "A canal", "No pipe", "Rain")]
    alone = [await run(harness.engine, request) for request in requests]
    ends: list[int] = []
    begun: set[int] = set()

    async def follow(n: int) -> None:
        tokens, text = [], ""
        async for piece in harness.engine.generate(requests[n], fresh_name(), 1):
            begun.add(n)
            tokens += piece.token_ids
            text += piece.text
            same(tokens, alone[n].tokens[: len(tokens)], f"tokens so far of run {n}")
            same(text, alone[n].text[: len(text)], f"text so far of run {n}")
            whole = harness.decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")
            assert text.startswith(whole), f"run {n} holds back more than half a character: {text!r} of {whole!r}"
        same(text, alone[n].text, f"whole text of run {n}")
        ends.append(len(begun))

    await asyncio.gather(*(follow(n) for n in range(SLOTS)))
    same(ends[0], SLOTS, "runs that had begun when the first one ended")


async def case_max_output_tokens(harness: Harness) -> None:
    for limit in (1, 2, 17):
        output = await run(harness.engine, asking("The river carries water to the turbines and", limit))
        same((len(output.tokens), output.finish_reason), (limit, "length"), f"tokens and reason for a limit of {limit}")


async def case_ends_by_itself(harness: Harness) -> None:
    request = InferenceRequest(messages=QUESTION, max_output_tokens=400, sampling=GREEDY)
    output = await run(harness.engine, request)
    same(output.finish_reason, "stop", "reason")
    assert 1 <= len(output.tokens) < 400, len(output.tokens)


async def case_stop_strings(harness: Harness) -> None:
    request = asking("The river carries water to the turbines and", 32)
    plain = await run(harness.engine, request)
    borders = [len("".join(p.text for p in plain.pieces[:n])) for n in range(1, len(plain.pieces))]
    crossing = [b for b in borders if 4 <= b <= len(plain.text) - 4][2:]
    assert crossing, "the text has no border of pieces"
    stops = [plain.text[crossing[0] - 2 : crossing[0] + 2], plain.text[crossing[-1] - 3 : crossing[-1] + 3]]
    stops += [plain.text[crossing[len(crossing) // 2]], plain.text[crossing[len(crossing) // 2] - 4 :][:8]]
    for stop in stops:
        output = await run(harness.engine, asking(request.prompt or "", 32, stop=["\u0000never", stop]))
        same(output.text, plain.text[: plain.text.index(stop)], f"text before the stop string {stop!r}")
        same(output.finish_reason, "stop", "reason")
        assert len(output.tokens) <= len(plain.tokens)
        same(output.tokens, plain.tokens[: len(output.tokens)], "tokens")
    lure = plain.text[-3:] + "\u0000"  # begins as the text ends: held back to the last, then given
    same((await run(harness.engine, asking(request.prompt or "", 32, stop=[lure]))).text, plain.text, "text with a lure")


async def case_stop_strings_of_several_bytes(harness: Harness) -> None:
    """A stop string of characters that take several tokens each, beside runs with other stop strings and with none."""
    request = harness.kind.multibyte
    plain = await run(harness.engine, request)
    wide = [n for n, c in enumerate(plain.text) if len(c.encode()) > 1]
    stops = [plain.text[wide[0]], plain.text[wide[len(wide) // 2] :][:2], plain.text[wide[-1] :], ""]

    def stopped(stop: str) -> InferenceRequest:
        sampling = msgspec.structs.replace(request.sampling, stop=[stop] if stop else [])
        return msgspec.structs.replace(request, sampling=sampling)

    outputs = await asyncio.gather(*(run(harness.engine, stopped(stop)) for stop in stops))
    for stop, output in zip(stops, outputs, strict=True):
        same(output.text, plain.text[: plain.text.index(stop)] if stop else plain.text, f"text with the stop string {stop!r}")
        same(output.finish_reason, "stop" if stop else plain.finish_reason, f"reason with the stop string {stop!r}")
    idle(harness)


async def case_seeds_repeat(harness: Harness) -> None:
    request = asking("Once upon a time", 16, temperature=1.0)
    first, again, other = [await run(harness.engine, request, seed=seed) for seed in (7, 7, 8)]
    same(again.tokens, first.tokens, "tokens of the same seed")
    assert other.tokens != first.tokens, "another seed said the same"
    greedy = [await run(harness.engine, asking("Once upon a time", 8), seed=seed) for seed in (7, 8)]
    same(greedy[1].tokens, greedy[0].tokens, "greedy tokens whatever the seed")
    crowd = await asyncio.gather(*(run(harness.engine, request, seed=seed) for seed in (7, 8, 9)))
    same([o.tokens for o in crowd[:2]], [first.tokens, other.tokens], "tokens of the same seeds in company")


async def case_abort_while_running(harness: Harness) -> None:
    generator, name, output = await open_run(harness.engine, asking(STORY, 400, stop=["\u0000"]), 3)
    before = len(output.tokens)
    await harness.engine.abort(name)
    idle(harness)
    await rest(generator, output)
    same(output.finish_reason, "abort", "reason")
    assert len(output.tokens) - before <= STEPS_AFTER_ABORT, f"{len(output.tokens) - before} tokens after the abort"
    same(output.usage.output_tokens if output.usage else None, len(output.tokens), "usage")
    await harness.engine.abort(name)  # unknown by now
    same(len((await run(harness.engine, asking(STORY, 3), name=name)).tokens), 3, "tokens of a run of the same name")


async def case_abort_at_any_moment(harness: Harness) -> None:
    long = asking(STORY, 300)

    async def abandon(turns: int) -> None:
        task = asyncio.create_task(run(harness.engine, long))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for turns in (0, 1, 2, 3, 5, 8, 13, 21):
        await abandon(turns)
        idle(harness)
    generator, _, _ = await open_run(harness.engine, long, 2)
    await generator.aclose()
    idle(harness)
    early = harness.engine.generate(long, "early", 1)
    first = asyncio.create_task(anext(early))
    await asyncio.sleep(0)
    await harness.engine.abort("early")
    same((await first).finish_reason, "abort", "reason of a run that was aborted before its first token")
    idle(harness)


async def case_abort_while_waiting(harness: Harness) -> None:
    running = [await open_run(harness.engine, asking(f"Story {n}:", 300), 1) for n in range(SLOTS)]
    waiter = asyncio.create_task(run(harness.engine, asking(STORY, 5), name="waiter"))
    for generator, _, output in running:
        output.pieces.append(await anext(generator))
    await harness.engine.abort("waiter")
    same(((await waiter).tokens, (await waiter).finish_reason), ([], "abort"), "tokens and reason of the one that waited")
    for generator, _, _ in running:
        await generator.aclose()
    idle(harness)


async def case_abort_makes_room(harness: Harness) -> None:
    running = [await open_run(harness.engine, asking(f"Story {n}:", 400), 1) for n in range(SLOTS)]
    waiter = asyncio.create_task(run(harness.engine, asking(STORY, 5)))
    for generator, _, output in running:
        output.pieces.append(await anext(generator))
    await harness.engine.abort(running[2][1])
    same(len((await waiter).tokens), 5, "tokens of the one that waited")
    for n, (generator, _, output) in enumerate(running):
        if n != 2:
            output.pieces.append(await anext(generator))
            same(output.finish_reason, None, f"reason of run {n}, which nobody aborted")
        await generator.aclose()
    idle(harness)


async def case_many_at_once_say_the_same(harness: Harness) -> None:
    words = "the quick brown fox jumps over the lazy dog near a silent river under old stone bridges while rain falls".split()  # noqa: SIM905
    requests = [asking(" ".join((words * 4)[n : n + 3 + (7 * n) % 31]), 3 + (5 * n) % 17) for n in range(AT_ONCE)]
    alone = [await run(harness.engine, request) for request in requests]
    together = await asyncio.gather(*(run(harness.engine, request) for request in requests))
    for n, (one, other) in enumerate(zip(alone, together, strict=True)):
        same((other.tokens, other.text, other.usage), (one.tokens, one.text, one.usage), f"request {n} in company")
    idle(harness)


async def case_over_long_prompt(harness: Harness) -> None:
    limit = harness.engine.status().max_context
    assert limit is not None
    neighbour = asyncio.create_task(run(harness.engine, asking(STORY, 12)))
    for length in (limit, limit + 1, 5 * limit):
        error = await refusal(harness.engine, InferenceRequest(input_tokens=[9] * length, max_output_tokens=7))
        same(error.code, ErrorCode.CONTEXT_OVERFLOW, "code")
        for number in (length, 7, limit):
            assert str(number) in error.message, f"{number} is not in {error.message!r}"
    error = await refusal(harness.engine, asking("word " * 4 * limit, 7))
    same(error.code, ErrorCode.CONTEXT_OVERFLOW, "code for text")
    same(len((await neighbour).tokens), 12, "tokens of the neighbour")
    output = await run(harness.engine, InferenceRequest(input_tokens=[9] * (limit - 3), max_output_tokens=50, sampling=GREEDY))
    if output.finish_reason != "stop":  # a model may have no more to say
        same((len(output.tokens), output.finish_reason), (3, "length"), "tokens and reason where the context ends first")
    assert len(output.tokens) <= 3, "it went on beyond its context"


async def case_bad_values(harness: Harness) -> None:
    bad = {
        "temperature": (-0.1, 2.1, float("nan"), float("inf")),
        "top_p": (0.0, 1.1, float("nan")),
        "top_k": (-1,),
        "min_p": (-0.1, 1.5),
        "presence_penalty": (2.5, float("-inf")),
        "frequency_penalty": (-2.5,),
    }
    for name, values in bad.items():
        for value in values:
            error = await refusal(harness.engine, asking("x", 4, **{name: value}))
            same((error.code, error.param), (ErrorCode.INVALID_REQUEST, f"sampling.{name}"), f"{name}={value}")
            assert name in error.message, error.message
    for request, param in (
        (asking("x", 4, stop=[""]), "sampling.stop[0]"),
        (asking("x", 0), "max_output_tokens"),
        (InferenceRequest(input_tokens=[5, -1]), "input_tokens[1]"),
        (InferenceRequest(input_tokens=[5, 2**31]), "input_tokens[1]"),
    ):
        error = await refusal(harness.engine, request)
        same((error.code, error.param), (ErrorCode.INVALID_REQUEST, param), f"{request}")
    idle(harness)
    same(len((await run(harness.engine, asking(STORY, 4))).tokens), 4, "tokens after the refusals")


async def case_characters_stay_whole(harness: Harness) -> None:
    output = await run(harness.engine, harness.kind.multibyte)
    assert any(len(c.encode()) > 1 for c in output.text), f"no such character in {output.text!r}"
    for piece in output.pieces:
        assert "\N{REPLACEMENT CHARACTER}" not in piece.text, f"half a character in {piece}"
    halves = [p for p in output.pieces if "\N{REPLACEMENT CHARACTER}" in harness.decode(p.token_ids)]
    assert halves, "no character took more than one piece"


async def case_usage(harness: Harness) -> None:
    tokens = [11, 22, 33, 44, 55]
    same(await harness.engine.count_tokens(InferenceRequest(input_tokens=tokens)), 5, "tokens of the input")
    for request in (
        InferenceRequest(input_tokens=tokens, max_output_tokens=4),
        asking("How many tokens am I, naïve café?", 5),
        InferenceRequest(messages=[*QUESTION, ChatMessage("assistant", "Paris."), *QUESTION], max_output_tokens=3),
    ):
        counted = await harness.engine.count_tokens(request)
        output = await run(harness.engine, request)
        same(output.usage, Usage(counted, len(output.tokens)), "usage")
        assert harness.engine.estimate_bytes(request) > 0
    short, long = (harness.engine.estimate_bytes(asking(text, 10)) for text in ("x", "x" * 400))
    if harness.kind.memory_grows:
        assert short < long, "more text takes no more memory"
    else:
        same(long, short, "bytes of a longer text")


async def case_status_is_true(harness: Harness) -> None:
    figures = harness.engine.status()
    for name in ("max_context", "trained_context", "models"):
        assert getattr(figures, name), f"no {name} in {figures}"
    assert {"chat", "seed", "stop", "priority", "input_tokens"} <= set(figures.features), figures.features
    running = [await open_run(harness.engine, asking(f"Story {n}:", 300), 1) for n in range(SLOTS)]
    waiters = [asyncio.create_task(run(harness.engine, asking(f"Story {n}:", 2))) for n in range(3)]
    for _ in range(3):
        for generator, _, output in running:
            output.pieces.append(await anext(generator))
    figures = harness.engine.status()
    same((figures.running, figures.waiting), (SLOTS, 3), "running and waiting under load")
    assert 0 < (figures.kv_cache_usage or 0) <= 1, figures.kv_cache_usage
    for generator, _, _ in running:
        await generator.aclose()
    same([o.finish_reason for o in await asyncio.gather(*waiters)], ["length"] * 3, "reasons of those that waited")
    idle(harness)


async def case_priority(harness: Harness) -> None:
    running = [await open_run(harness.engine, asking(f"Story {n}:", 300), 1) for n in range(SLOTS)]
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        async for piece in harness.engine.generate(asking(f"I am {name}", 6), name, 1, priority):
            if name not in order and piece.token_ids:
                order.append(name)

    waiters = []
    for name, priority in (("late", 9), ("middle", 5), ("soon", 1)):
        waiters.append(asyncio.create_task(wait(name, priority)))
        for generator, _, output in running:  # the next comes after this one has been taken in
            output.pieces.append(await anext(generator))
    generator, _, _ = running[0]
    await generator.aclose()
    await asyncio.gather(*waiters)
    same(order, ["soon", "middle", "late"], "order of those that waited")
    for generator, _, _ in running:
        await generator.aclose()
    idle(harness)


async def case_same_name_twice(harness: Harness) -> None:
    generator, name, _ = await open_run(harness.engine, asking("Story:", 50), 1)
    try:
        await run(harness.engine, asking("Story:", 5), name=name)
    except EngineError as error:
        same(error.code, ErrorCode.INTERNAL, "code")
    else:
        message = "a name that is open was taken again"
        raise AssertionError(message)
    assert (await anext(generator)).finish_reason is None, "the first one was disturbed"
    await generator.aclose()


async def case_death(harness: Harness) -> None:
    """Ends the engine; the rest of the cases goes on with a fresh one, which is the recovery."""
    watching = asyncio.create_task(harness.engine.died())
    running = [await open_run(harness.engine, asking(f"Story {n}:", 300), 2) for n in range(2)]
    assert not watching.done(), "dead before its time"
    harness.kill()
    for generator, _, output in running:
        try:
            await rest(generator, output)
        except EngineError as error:
            same((error.code, error.code.retryable), (ErrorCode.UNHEALTHY, True), "code of what was open")
        else:
            message = f"a run outlived its engine: {output.finish_reason}"
            raise AssertionError(message)
    assert await asyncio.wait_for(watching, 10), "no reason given"
    same((await refusal(harness.engine, asking("x", 3))).code, ErrorCode.UNHEALTHY, "code of what comes later")
    same(harness.engine.status().running, 0, "running")
    await harness.engine.close()
    harness.engine = harness.make()
    await harness.engine.start()
    same(len((await run(harness.engine, asking(STORY, 4))).tokens), 4, "tokens of the fresh engine")


async def case_drain(harness: Harness) -> None:
    """Drains and closes the engine: comes last."""
    running = [await open_run(harness.engine, asking(f"Story {n}:", 20), 1) for n in range(2)]
    draining = asyncio.create_task(harness.engine.drain())
    await asyncio.sleep(0)
    same((await refusal(harness.engine, asking("Too late", 3))).code, ErrorCode.CAPACITY_EXCEEDED, "code while draining")
    assert not draining.done(), "drained while requests were open"
    for generator, _, output in running:
        same(len((await rest(generator, output)).tokens), 20, "tokens of what was open")
    await asyncio.wait_for(draining, 10)
    watching = asyncio.create_task(harness.engine.died())
    await harness.engine.close()
    await harness.engine.close()
    assert not watching.done(), "closing was taken for death"
    watching.cancel()
    same((await refusal(harness.engine, asking("Closed", 3))).code, ErrorCode.UNHEALTHY, "code after closing")


Case = Callable[[Harness], Awaitable[None]]
_LAST = ("death", "drain")
_found = {**globals(), **vars(engine_feature_cases)}
_all: dict[str, Case] = {name.removeprefix("case_"): value for name, value in _found.items() if name.startswith("case_")}
CASES: dict[str, Case] = {name: case for name, case in _all.items() if name not in _LAST} | {name: _all[name] for name in _LAST}


async def run_cases(harness: Harness, names: list[str], tell: Callable[[str], None] | None = None) -> None:
    """Start the engine, run the cases one after another, and tell of each; see `in_environment.tell_cases`."""
    await harness.engine.start()
    await tell_cases({name: partial(CASES[name], harness) for name in names}, tell)
    await harness.engine.close()
