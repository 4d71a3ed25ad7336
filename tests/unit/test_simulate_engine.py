"""The modelled engine against closed forms, and against a model that takes one step at a time."""

import random

import pytest
from msgspec.structs import replace

from deploy.simulate.engine import Engine, Speed
from deploy.simulate.job import NEVER_MS, Ask, Job

ASK = Ask(0, "llama", "default", "interactive", "auto", "auto", "any", None, None)
SPEED = Speed(slots=4, prefill_chunk=512, ttft_ms=18, prefill_ms_per_1k=60, prefill_quadratic_ms=2, tpot_ms=18, tpot_batch_ms=0.5)


def job(number=0, input_tokens=1_000, output_tokens=11, at_ms=0.0):
    return Job(number, at_ms, ASK, input_tokens, output_tokens, output_tokens)


def drive(engine, jobs=(), until_ms=NEVER_MS):
    """Start each request at its time, and let the engine run; gives the ends in order."""
    ended, waiting = [], sorted(jobs, key=lambda one: one.at_ms)
    while True:
        if waiting and waiting[0].at_ms <= engine.next_ms:
            one = waiting.pop(0)
            engine.start(one, one.at_ms)
        elif engine.next_ms < until_ms:
            ended += engine.advance()
        else:
            return ended


def stepwise(speed, jobs):
    """The same engine as its module describes it, one step after the other; gives first token and end by number."""
    waiting, decoding, reading, now, seen = sorted(jobs, key=lambda one: one.at_ms), [], [], 0.0, {}
    left = {one.number: one.input_tokens for one in jobs}
    made = dict.fromkeys(left, 0)
    while waiting or decoding or reading:
        while waiting and waiting[0].at_ms <= now and len(decoding) + len(reading) < speed.slots:
            reading.append(waiting.pop(0))
        if not decoding and not reading:
            now = waiting[0].at_ms
            continue
        used = sum(one.input_tokens + made[one.number] for one in [*decoding, *reading])
        step = speed.decode_ms(len(decoding), used / speed.kv_tokens if speed.kv_tokens else 0) if decoding else 0.0
        budget, read = speed.prefill_chunk, []
        for one in reading:
            tokens, done = min(budget, left[one.number]), one.input_tokens - left[one.number]
            step += speed.prefill_ms(done + tokens) - speed.prefill_ms(done) + (0 if done else speed.ttft_ms)
            left[one.number] -= tokens
            read.append(one)
            budget -= tokens
            if not budget:
                break
        now += step
        for one in list(decoding):
            made[one.number] += 1
            if made[one.number] == one.output_tokens:
                decoding.remove(one)
                seen[one.number] = (*seen[one.number], now)
        for one in read:
            if not left[one.number]:
                reading.remove(one)
                made[one.number] = 1
                seen[one.number] = (now,)
                if one.output_tokens == 1:
                    seen[one.number] = (now, now)
                else:
                    decoding.append(one)
    return seen


def test_a_request_alone_takes_what_its_profile_says():
    for tokens in (1, 511, 512, 513, 1_000, 5_000, 100_000):
        one = job(input_tokens=tokens, output_tokens=101)
        assert drive(Engine(SPEED), [one]) == [one]
        thousands = tokens / 1000
        assert one.first_ms == pytest.approx(18 + 60 * thousands + 2 * thousands**2)
        assert one.tpot_ms == pytest.approx(18)


def test_one_token_is_the_first_and_the_last():
    one = job(output_tokens=1)
    drive(Engine(SPEED), [one])
    assert one.first_ms == one.end_ms
    assert one.tpot_ms == 0


def test_a_full_batch_takes_the_time_of_its_batch():
    jobs = [job(n, input_tokens=1, output_tokens=1_001) for n in range(4)]
    drive(Engine(replace(SPEED, ttft_ms=0, prefill_ms_per_1k=0, prefill_quadratic_ms=0)), jobs)
    # The first is read while nobody decodes and takes one step alone, in which the others are read; they take one more.
    full_ms = 999 * (18 + 3 * 0.5)
    assert [one.end_ms for one in jobs] == pytest.approx([18 + full_ms, *[18 + full_ms + 18 + 2 * 0.5] * 3])


def test_who_finds_no_slot_waits_for_the_first_that_ends():
    jobs = [job(n, input_tokens=1, output_tokens=10 * (n + 1)) for n in range(4)]
    late = job(4, input_tokens=1, output_tokens=1)
    speed = replace(SPEED, ttft_ms=0, prefill_ms_per_1k=0, prefill_quadratic_ms=0)
    engine = Engine(speed)
    drive(engine, [*jobs, late])
    assert late.end_ms == pytest.approx(jobs[0].end_ms + 18 + 2 * 0.5)  # its prompt is read in the next step of the others
    assert len(engine) == 0


def test_a_prompt_slows_those_that_decode_by_one_chunk_a_step():
    speed = replace(SPEED, ttft_ms=0, prefill_quadratic_ms=0)
    first, second = job(0, input_tokens=1, output_tokens=101), job(1, input_tokens=2_048, output_tokens=1)
    second.at_ms = 500.0
    drive(Engine(speed), [first, second])
    chunk_ms = 512 * 60 / 1000
    assert first.end_ms == pytest.approx(0.06 + 100 * 18 + 4 * chunk_ms)
    steps = (500 - 0.06) // 18 + 1  # it enters with the end of the step under way
    assert second.end_ms == pytest.approx(0.06 + steps * 18 + 4 * (18 + chunk_ms))


def test_a_fuller_cache_slows_every_step():
    speed = Speed(slots=1, kv_tokens=10_000, tpot_ms=10, tpot_kv_ms=100)
    one = job(input_tokens=2_000, output_tokens=1_001)
    drive(Engine(speed), [one])
    expected = sum(10 + 100 * (2_001 + n) / 10_000 for n in range(1_000))
    assert one.end_ms == pytest.approx(expected)


def test_the_cache_lets_in_what_fits_and_no_more():
    speed = Speed(slots=8, kv_tokens=3_000, tpot_ms=10)
    jobs = [job(n, input_tokens=1_000, output_tokens=100) for n in range(4)]
    engine = Engine(speed)
    most = 0
    for one in jobs:
        engine.start(one, 0.0)
    while engine.next_ms < NEVER_MS:
        most = max(most, engine.running)
        engine.advance()
        assert engine.kv_used <= 3_000
    assert most == 2  # the third prompt would fit, and not the tokens to come
    assert engine.kv_used == 0
    assert all(one.made == 100 for one in jobs)


def test_a_cache_that_overflows_puts_the_youngest_back_and_reads_it_again():
    speed = Speed(slots=8, kv_tokens=1_000, tpot_ms=10, prefill_ms_per_1k=100)
    old, young = job(0, input_tokens=200, output_tokens=500), job(1, input_tokens=200, output_tokens=500)
    engine = Engine(speed)
    ended = drive(engine, [old, young])
    assert ended == [old, young]
    assert old.end_ms - old.first_ms < 500 * 10 + 100  # nobody stopped it
    assert young.end_ms > old.end_ms + 199 * 10  # it waited until the other ended
    assert young.first_ms < old.end_ms  # what it had said was said
    assert engine.kv_used == 0


def test_heat_slows_from_the_next_step_on():
    one = job(input_tokens=1, output_tokens=101)
    engine = Engine(Speed(slots=1, tpot_ms=10))
    engine.start(one, 0.0)
    while not engine.running or engine.next_ms <= 0:
        engine.advance()
    engine.set_pace(2.0, 255.0)
    while engine.next_ms < NEVER_MS:
        engine.advance()
    assert one.end_ms == pytest.approx(260 + 74 * 20)


def test_a_dead_engine_gives_back_what_it_had_the_oldest_first():
    jobs = [job(n, output_tokens=100) for n in range(6)]
    engine = Engine(SPEED)
    for one in jobs:
        engine.start(one, 0.0)
    engine.advance()
    assert [one.number for one in engine.clear(50.0)] == [0, 1, 2, 3, 4, 5]
    assert engine.next_ms == NEVER_MS
    assert len(engine) == 0


@pytest.mark.parametrize("seed", range(20))
def test_leaps_come_to_what_single_steps_come_to(seed):
    dice = random.Random(seed)
    speed = Speed(
        slots=dice.choice([1, 4, 16]),
        prefill_chunk=dice.choice([64, 512]),
        kv_tokens=dice.choice([None, 10**6]),
        ttft_ms=dice.choice([0, 20]),
        prefill_ms_per_1k=60,
        prefill_quadratic_ms=dice.choice([0, 3]),
        tpot_ms=18,
        tpot_batch_ms=0.5,
        tpot_kv_ms=2_000,
    )
    at = [dice.uniform(0, 20_000) for _ in range(60)]
    jobs = [job(n, dice.choice([1, 60, 500, 3_000]), dice.choice([1, 2, 30, 200]), ms) for n, ms in enumerate(at)]
    expected = stepwise(speed, jobs)
    drive(Engine(speed), jobs)
    for one in jobs:
        first, end = expected[one.number]
        assert one.first_ms == pytest.approx(first), one.number
        assert one.end_ms == pytest.approx(end), one.number


def test_the_work_of_a_request_is_its_part_of_a_full_batch():
    speed = Speed(slots=10, ttft_ms=5, prefill_ms_per_1k=100, tpot_ms=11, tpot_batch_ms=1)
    assert speed.full_cost_ms(1_000, 101) == pytest.approx(105 + 100 * 20 / 10)
    crowded = replace(speed, kv_tokens=20_000, tpot_kv_ms=40)
    assert crowded.full_cost_ms(950, 100) == pytest.approx(5 + 95 + 99 * (20 + 40 * 0.5) / 10)
