"""What the SSM engine does with many requests: the same as with one, without stopping, and without growing.

Run inside the engine's environment by `ssm_checks.py`.
"""

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from conformance.engine_runs import Output, fresh_name, open_run, refusal, rest, run, same
from safetensors.torch import load_file
from ssm_numbers import KINDS

from engine_consumers.ssm import SsmEngine
from engine_consumers.stepping.loop import News, Sequence
from schemas.config import EngineConfig
from schemas.errors import ErrorCode
from schemas.messages import InferenceRequest, Sampling

SLOTS = 16
LENGTHS = (5, 3000, 7, 64, 2047, 16, 31, 1024, 100, 255, 256, 777, 257, 300, 511, 1000)
OUTPUT = 24
LONG = 20_000
SHORT_REQUESTS, WARM_UP, GROWTH_MB = 2_000, 500, 8.0
PAGE_MB = resource.getpagesize() / 1e6
OPTIONS = {"device": "cpu", "dtype": "float32", "max_context": 32_768, "threads": 1}


@contextlib.asynccontextmanager
async def engine_of(folder: Path, slots: int = SLOTS, **options: Any) -> AsyncIterator[SsmEngine]:
    engine = SsmEngine(
        EngineConfig(kind="ssm", model=folder.name, model_path=str(folder), slots=slots, options=OPTIONS | options)
    )
    await engine.start()
    # answers of random weights end anywhere: here each is as long as it may be
    engine._loaded = engine._loaded._replace(ends=frozenset())
    try:
        yield engine
    finally:
        await engine.close()


def prompt(length: int, seed: int = 1) -> list[int]:
    dice = Random(f"{length} {seed}")
    return [dice.randrange(3, 259) for _ in range(length)]


def of_length(length: int, tokens: int = OUTPUT, seed: int = 1, **sampling: Any) -> InferenceRequest:
    values = Sampling(**{"temperature": 0.0, **sampling})
    return InferenceRequest(input_tokens=prompt(length, seed), max_output_tokens=tokens, sampling=values)


def all_is_free(engine: SsmEngine) -> None:
    """Every place is there again, once."""
    loop, states = engine._loop, engine._loaded.model.states
    schedule = loop._schedule
    same((len(schedule.decoding), len(schedule.reading), schedule.waiting), (0, 0, 0), "decoding, reading, waiting")
    same(sorted(loop._rows), [states.slots + n for n in range(states.readers)], "free rows of readers")
    same((len(engine._of), len(engine._runs)), (0, 0), "open runs")


async def case_greedy_tokens_are_those_of_transformers(home: Path) -> None:
    for kind in KINDS:
        wanted = load_file(home / kind / "reference.safetensors")
        said = wanted["said"].tolist()
        asked = wanted["ids"].tolist()[: int(wanted["asked"])]
        request = InferenceRequest(input_tokens=asked, max_output_tokens=len(said), sampling=Sampling(temperature=0.0))
        for chunk in (1, 7, 256):
            async with engine_of(home / kind, prefill_chunk=chunk) as engine:
                same((await run(engine, request)).tokens, said, f"tokens of {kind} after pieces of {chunk}")


async def case_company_changes_nothing(home: Path) -> None:
    """16 requests of 5 to 3,000 tokens, greedy and drawn, say what each says alone; so do they from a crowded queue."""
    for kind, slots in ((KINDS[0], SLOTS), (KINDS[1], SLOTS), (KINDS[1], 3)):
        async with engine_of(home / kind, slots) as engine:
            requests = [of_length(length, temperature=float(n % 3 == 2), top_p=0.9) for n, length in enumerate(LENGTHS)]
            alone = [await run(engine, request, seed=n) for n, request in enumerate(requests)]
            together = await asyncio.gather(*(run(engine, request, seed=n) for n, request in enumerate(requests)))
            for n, (one, other) in enumerate(zip(alone, together, strict=True)):
                same(len(one.tokens), OUTPUT, f"tokens of the one of {LENGTHS[n]}")
                same(other.tokens, one.tokens, f"{kind}, {slots} slots: tokens in company after {LENGTHS[n]} of prompt")
                same((other.text, other.usage), (one.text, one.usage), f"text and usage of the one of {LENGTHS[n]}")
            all_is_free(engine)


class Watch:
    """Notes what each step of an engine's loop gave, and how long it took."""

    def __init__(self, engine: SsmEngine) -> None:
        self.loop = engine._loop
        self.seconds: list[float] = []
        self.steps: dict[Sequence, list[int]] = {}  # in which steps one was given a token
        self.is_reading: list[bool] = []
        self._step, self.loop._step = self.loop._step, self.step

    def step(self) -> list[News]:
        self.is_reading.append(bool(self.loop._schedule.reading))
        began = time.perf_counter()
        news = self._step()
        self.seconds.append(time.perf_counter() - began)
        for one in news:
            self.steps.setdefault(one.sequence, []).append(len(self.seconds))
        return news

    def gaps(self, sequence: Sequence) -> list[int]:
        steps = self.steps[sequence]
        return [later - earlier for earlier, later in pairwise(steps)]


async def case_a_long_prompt_stops_nobody(home: Path) -> dict[str, Any]:
    """While 20,000 tokens are read, each step gives a token to all that decode, and new short ones come through."""
    figures: dict[str, Any] = {}
    for kind in KINDS[:2]:
        async with engine_of(home / kind) as engine:
            watch = Watch(engine)
            decoding = [await open_run(engine, of_length(20 + n, 400, n), 2) for n in range(3)]
            long = asyncio.create_task(run(engine, of_length(LONG, 2), name="long"))
            come: list[Output] = []
            while not long.done():
                come.append(await run(engine, of_length(10 + len(come) % 30, 5, len(come))))
            same(len((await long).tokens), 2, "tokens of the long one")
            for generator, _, output in decoding:
                same(len((await rest(generator, output)).tokens), 400, "tokens of a short one")
            reads = sum(watch.is_reading)
            assert reads >= LONG / 256, f"{reads} steps read"
            assert len(come) >= 10, f"{len(come)} short ones came through while the long one was read"
            shorts = [one for one in watch.steps if len(one.prompt) < LONG]
            same({gap for one in shorts for gap in watch.gaps(one)}, {1}, "steps between two tokens of a short one")
            plain = median(s for s, reading in zip(watch.seconds, watch.is_reading, strict=True) if not reading)
            busy = [s for s, reading in zip(watch.seconds, watch.is_reading, strict=True) if reading]
            figures[kind] = {
                "worst gap, in plain steps": round(max(busy) / plain, 1),
                "usual gap, in plain steps": round(median(busy) / plain, 1),
                "plain step ms": round(plain * 1000, 2),
                "short ones that came through": len(come),
            }
            all_is_free(engine)
    return figures


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MB


async def case_memory_does_not_grow(home: Path) -> dict[str, Any]:
    """Over 2,000 short requests, a tenth of them abandoned; nor with their length."""
    async with engine_of(home / KINDS[1]) as engine:
        states = engine._loaded.model.states
        places = [tensor.data_ptr() for pair in states.rows(0, 1) for tensor in pair]
        held = states.bytes
        estimates = {engine.estimate_bytes(of_length(length, tokens)) for length, tokens in ((1, 1), (3000, 16), (30_000, 2_000))}
        same(estimates, {states.bytes_per_request}, "bytes of short and long requests")
        limit = asyncio.Semaphore(2 * SLOTS)

        async def one(n: int) -> None:
            async with limit:
                request = of_length(1 + n % 40, 1 + n % 5, n)
                if n % 10:
                    same(len((await run(engine, request)).tokens), 1 + n % 5, "tokens")
                else:
                    generator, _, _ = await open_run(engine, of_length(30, 9, n), 1)
                    await generator.aclose()

        await asyncio.gather(*(one(n) for n in range(WARM_UP)))
        before = rss_mb()
        await asyncio.gather(*(one(n) for n in range(SHORT_REQUESTS)))
        grown = rss_mb() - before
        assert grown <= GROWTH_MB, f"{grown:.1f} MB more after {SHORT_REQUESTS} requests, expected at most {GROWTH_MB:g}"
        same(states.bytes, held, "bytes of states")
        same([tensor.data_ptr() for pair in states.rows(0, 1) for tensor in pair], places, "places of states")
        all_is_free(engine)
        return {"RSS MB": round(before, 1), "grown MB": round(grown, 1), "bytes per request": states.bytes_per_request}


async def case_a_spoilt_state_ends_its_own_request_only(home: Path) -> None:
    async with engine_of(home / KINDS[1], 4) as engine:
        model, requests = engine._loaded.model, [of_length(30, 40, n) for n in range(4)]
        alone = [await run(engine, request) for request in requests]
        step, steps = model.step, 0

        def spoil(token_ids: list[int]) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == 20:
                for _, ssm in model.states.rows(1, 1):
                    ssm.fill_(torch.nan)
            return step(token_ids)

        model.step = spoil
        found = await asyncio.gather(*(run(engine, request) for request in requests), return_exceptions=True)
        failed = [one for one in found if isinstance(one, Exception)]
        same([getattr(one, "code", one) for one in failed], [ErrorCode.INTERNAL], "errors")
        assert "not finite" in str(failed[0]), failed
        for n, one in enumerate(found):
            if one not in failed:
                same(one.tokens, alone[n].tokens, f"tokens of neighbour {n}")
        all_is_free(engine)
        again = await asyncio.gather(*(run(engine, request) for request in requests))
        same([one.tokens for one in again], [one.tokens for one in alone], "tokens in the rows that were spoilt")


async def case_leaving_at_any_moment_frees_the_place(home: Path) -> None:
    """Aborted, abandoned or cancelled while waiting, being read, decoding or ending; those who stay say the same."""
    async with engine_of(home / KINDS[1], 4, prefill_chunk=32) as engine:
        kept = [of_length(length, 12) for length in (1, 33, 64, 300)]
        alone = [await run(engine, request) for request in kept]
        dice, watch = Random(5), Watch(engine)

        async def leaver(n: int) -> None:
            name, aborts = fresh_name(), dice.randrange(4)
            task = asyncio.create_task(run(engine, of_length(dice.choice((1, 20, 200, 900)), 3, n), name=name, priority=n % 2))
            leaves = len(watch.seconds) + dice.randrange(20)
            while len(watch.seconds) < leaves and not task.done():  # noqa: ASYNC110 - another thread makes the steps
                await asyncio.sleep(0)
            if aborts:
                await asyncio.gather(*(engine.abort(name) for _ in range(aborts)))
                assert (await task).finish_reason in {"abort", "length"}
            else:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        for turn in range(25):
            both = [run(engine, request) for request in kept] + [leaver(n) for n in range(8)]
            found = await asyncio.gather(*both)
            same([one.tokens for one in found[:4]], [one.tokens for one in alone], f"tokens of those who stayed, turn {turn}")
            all_is_free(engine)


async def case_leaving_while_the_prompt_is_rendered(home: Path) -> None:
    """Nothing is known of the prompt by then, not even that it is too long: it was aborted, and that is told."""
    async with engine_of(home / KINDS[1], 2) as engine:
        for length in (10, 40_000):
            name = fresh_name()
            first = asyncio.create_task(run(engine, InferenceRequest(prompt="x" * length), name=name))
            await asyncio.sleep(0)
            await engine.abort(name)
            same(((await first).finish_reason, (await first).tokens), ("abort", []), f"reason and tokens after {length}")
        all_is_free(engine)


async def case_closing_while_a_prompt_is_read(home: Path) -> None:
    async with engine_of(home / KINDS[0]) as engine:
        reading = asyncio.create_task(run(engine, of_length(30_000, 5)))
        generator, _, output = await open_run(engine, of_length(10, 3000), 2)
        loop = engine._loop
        while not loop._schedule.reading:
            output.pieces.append(await anext(generator))
        await engine.close()
        assert not loop._thread.is_alive(), "the loop outlived its engine"
        same((await rest(generator, output)).finish_reason, "abort", "reason of what decoded")
        same((await reading).finish_reason, "abort", "reason of what was read")
        same((await refusal(engine, of_length(5))).code, ErrorCode.UNHEALTHY, "code after closing")


async def case_what_is_read_shows_that_it_moves(home: Path) -> None:
    """A prompt may take longer to be read than a run may be still; whoever waits behind it does not hang either."""
    async with engine_of(home / KINDS[1], 2, readers=2, prefill_chunk=64) as engine:
        read, waited = await asyncio.gather(*(run(engine, of_length(length, 3)) for length in (64 * 20, 64 * 30)))
        for output, pieces in ((read, 20), (waited, 50)):
            still = [n for n, piece in enumerate(output.pieces) if not piece.token_ids]
            assert len(still) >= pieces // 2, f"{len(still)} signs while {pieces} pieces were read"
            same(still, list(range(len(still))), "pieces without tokens, all of them first")
            same(len(output.tokens), 3, "tokens")
        all_is_free(engine)


async def case_draws_at_the_edge(home: Path) -> None:
    """What is next to nothing in float32 keeps the likeliest token, and ends nobody."""
    async with engine_of(home / KINDS[1], 2) as engine:
        greedy = await run(engine, of_length(20, 6))
        for more in ({"top_p": 1e-46}, {"top_p": 1e-46, "temperature": 2.0}, {"min_p": 1.0}, {"top_k": 1}):
            same((await run(engine, of_length(20, 6, **{"temperature": 1.0, **more}))).tokens, greedy.tokens, f"tokens of {more}")


async def case_the_shortest_requests(home: Path) -> None:
    for kind in KINDS[:2]:
        async with engine_of(home / kind, 2) as engine:
            for prompt_tokens, output_tokens in ((1, 1), (1, 6), (256, 1), (257, 1), (4, 2)):
                output = await run(engine, of_length(prompt_tokens, output_tokens))
                same((len(output.tokens), output.finish_reason), (output_tokens, "length"), "tokens and reason")
                same(output.usage.input_tokens, prompt_tokens, "tokens of the prompt")
            for empty in (InferenceRequest(input_tokens=[]), InferenceRequest(prompt="")):
                same((await refusal(engine, empty)).code, ErrorCode.INVALID_REQUEST, "code of an empty prompt")
            whole = await run(engine, of_length(32_767, 50))
            same((len(whole.tokens), whole.finish_reason), (1, "length"), "tokens and reason at the end of the context")
            all_is_free(engine)


async def case_half_precision_serves(home: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        for kind in KINDS:
            async with engine_of(home / kind, 2, dtype=dtype) as engine:
                found = await asyncio.gather(*(run(engine, of_length(length, 8)) for length in (5, 600)))
                same([len(one.tokens) for one in found], [8, 8], f"tokens of {kind} in {dtype}")
