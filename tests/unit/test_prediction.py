"""What the predictor makes of single runs: its start, restarts, garbage, lengths of answers and of texts, and its bounds."""

import math

import msgspec
import pytest

from dispatcher.core.lengths import MODELS_MAX, TENANTS_MAX, Lengths, Texts
from dispatcher.core.prediction import LEARNED_PER_S_MAX, NEW_RUNS, Prediction, Predictor, PredictorState, _Sampler
from dispatcher.core.profiles import profile_of
from schemas.errors import ErrorCode
from schemas.messages import Completion
from schemas.policy import ProfileConfig

PLAIN = ProfileConfig(ttft_ms=40, prefill_ms_per_1k=20, prefill_quadratic_ms=0, tpot_ms=10, tpot_batch_ms=0.5, tpot_kv_ms=4)
GOOD = Completion(0, 0, 1_000, 11, 5.0, 60.0, 160.0, 0, 0.0)  # as the plain profile says
STEP_MS = 20


def predictor(profile=PLAIN, kind="transformer"):
    return Predictor({"pool": (kind, profile)})


class Teacher:
    """Tells a predictor of runs, one after the other."""

    def __init__(self, learner):
        self.learner, self.now_ms = learner, 0

    def tell(self, done, epoch=1, count=1, tenant="t", model="m", size_bytes=None, limit=None):
        for _ in range(count):
            self.now_ms += STEP_MS
            self.learner.observe("pool", epoch, model, tenant, done, size_bytes, self.now_ms, limit)


def run(speed=1.0, tokens=1_000, answer=11, beside=0):
    ttft_ms = (40 + tokens / 50) * speed
    return Completion(0, 0, tokens, answer, 5.0, ttft_ms, ttft_ms + (answer - 1) * (10 + beside / 2) * speed, beside, 0.0)


def run_ms(learner):
    return learner.predict("pool", 1_000, 11).run_ms


def test_it_starts_with_the_profile():
    found = predictor().predict("pool", 2_000, 101, beside=4, kv_usage=0.5)
    assert (found.ttft_ms, found.tpot_ms, found.run_ms) == (80.0, 14.0, 1_480.0)
    assert 1.2 < found.run_p90_ms / found.run_ms < 2


@pytest.mark.parametrize(
    ("kind", "ttft_ms", "tpot_ms"), [("transformer", 78, 18), ("ssm", 42, 14), ("moe", 65, 16), ("strange", 78, 18)]
)
def test_without_a_profile_a_kind_has_the_articles_figures(kind, ttft_ms, tpot_ms):
    found = predictor(ProfileConfig(), kind).predict("pool", 1_024, 1)
    assert (round(found.ttft_ms, 6), found.tpot_ms, found.run_ms) == (ttft_ms, tpot_ms, found.ttft_ms)


def test_what_a_profile_leaves_out_goes_with_what_it_says():
    profile = profile_of("transformer", ProfileConfig(prefill_ms_per_1k=200, tpot_ms=100))
    assert profile == (18.0, 200.0, 2.0, 100.0, 2.0, 25.0)
    assert profile_of("ssm", ProfileConfig()).prefill_quadratic_ms == profile_of("ssm", ProfileConfig()).tpot_kv_ms == 0


def test_a_pool_that_is_not_configured_is_an_error_to_predict_and_tells_only_of_lengths():
    learner = predictor()
    with pytest.raises(KeyError):
        learner.predict("other", 1, 1)
    learner.observe("other", 1, "m", "t", GOOD, 4_000, 0)
    assert learner.expected_output("t", "m", 256) == 11
    assert list(learner.state().pools) == ["pool"]


@pytest.mark.parametrize(
    "change",
    [
        {"run_ms": -1.0},
        {"run_ms": math.nan},
        {"run_ms": math.inf},
        {"run_ms": 1e12},
        {"ttft_ms": 161.0},
        {"ttft_ms": -1.0},
        {"ttft_ms": math.nan},
        {"ttft_ms": None},
        {"output_tokens": 0},
        {"output_tokens": -5},
        {"output_tokens": 2**40},
        {"input_tokens": -1},
        {"input_tokens": 2**60},
        {"beside": -1},
        {"beside": 2**40},
        {"kv_cache_usage": -0.1},
        {"kv_cache_usage": 1.1},
        {"kv_cache_usage": math.nan},
        {"code": ErrorCode.INTERNAL},
        {"code": ErrorCode.CANCELLED},
    ],
    ids=str,
)
def test_a_run_that_cannot_be_true_teaches_no_speed(change):
    """Each is slow besides, so that learning from it would show."""
    learner = predictor()
    slow = {"run_ms": 900.0, "ttft_ms": 500.0} | ({"run_ms": 160.0} if change == {"ttft_ms": 161.0} else {})
    Teacher(learner).tell(msgspec.structs.replace(GOOD, **slow | change), count=100)
    assert learner.state().pools == predictor().state().pools
    assert learner.predict("pool", 1_000, 11) == predictor().predict("pool", 1_000, 11)


@pytest.mark.parametrize(
    "change", [{"run_ms": math.nan}, {"output_tokens": 0}, {"input_tokens": -1}, {"code": ErrorCode.INTERNAL}]
)
def test_a_run_that_cannot_be_true_teaches_no_lengths(change):
    learner = predictor()
    Teacher(learner).tell(msgspec.structs.replace(GOOD, **change), count=10, size_bytes=1_000)
    assert (learner.state().answers, learner.state().texts) == ([], [])


def test_an_answer_of_one_token_tells_the_first_tokens_time_and_not_that_of_others():
    learner = predictor()
    Teacher(learner).tell(Completion(0, 0, 1_000, 1, 0.0, 120.0, 130.0), count=50)
    found = learner.predict("pool", 1_000, 11)
    assert (round(found.ttft_ms), found.tpot_ms) == (120, 10)


def test_a_run_that_took_no_time_at_all_is_borne():
    learner = predictor(ProfileConfig(0, 0, 0, 0, 0, 0))
    Teacher(learner).tell(Completion(0, 0, 0, 2, 0.0, 0.0, 0.0), count=50)
    assert learner.predict("pool", 0, 2).run_ms < 2
    Teacher(learner).tell(run(), count=200)
    assert run_ms(learner) == pytest.approx(160, rel=0.05)


def test_a_slow_first_run_alone_is_not_believed():
    learner = predictor()
    teacher = Teacher(learner)
    teacher.tell(run(100.0))
    assert run_ms(learner) < 160 * 11
    teacher.tell(run(), count=4)
    assert run_ms(learner) == pytest.approx(160, rel=0.01)


def test_a_clock_that_is_set_back_stops_nothing():
    learner = predictor()
    for n in range(200):
        learner.observe("pool", 1, "m", "t", run(2.0), None, 1e12 - n * 1e6)
    assert run_ms(learner) == pytest.approx(320, rel=0.02)


def test_a_changed_model_is_known_by_its_epoch_and_begins_from_the_profile():
    learner = predictor()
    teacher = Teacher(learner)
    teacher.tell(run(1.0, 4_000), count=100)
    teacher.tell(run(3.0), count=200)
    teacher.tell(run(1.0), epoch=2, count=8)
    teacher.tell(run(1.0), epoch=2, count=5)
    found = learner.predict("pool", 20_000, 11)
    assert found.ttft_ms == pytest.approx(440, rel=0.02)  # the profile's slope, not what three times as slow has left of it
    assert run_ms(learner) == pytest.approx(160, rel=0.02)


def test_a_restart_of_one_among_many_keeps_what_the_pool_has_learned():
    learner = predictor()
    teacher = Teacher(learner)
    for n in range(300):
        teacher.tell(run(3.0, 500 + 100 * (n % 40), 50, n % 20), epoch=1 + n % 9)
    before = learner.predict("pool", 20_000, 11, 8)
    for n in range(60):
        is_warming_up = n in {0, 9, 18, 27}  # the new one is slow at first, among the others
        epoch = 10 if n % 9 == 0 else 1 + n % 9
        teacher.tell(run(30.0 if is_warming_up else 3.0, 500 + 100 * (n % 40), 50, n % 20), epoch=epoch)
        found = learner.predict("pool", 20_000, 11, 8)
        assert found.run_ms == pytest.approx(before.run_ms, rel=0.25)
    assert found.run_ms == pytest.approx(before.run_ms, rel=0.03)


def test_a_start_that_was_heard_of_long_ago_does_not_make_a_slow_engine_another_model():
    learner = predictor()
    teacher = Teacher(learner)
    for n in range(200):
        teacher.tell(run(1.0, 500 + 100 * (n % 40)))
    teacher.tell(run(1.0), epoch=2, count=NEW_RUNS + 1)
    teacher.tell(run(2.5), epoch=2, count=9)
    assert learner.state().pools["pool"].ttft.first != []
    assert learner.predict("pool", 20_000, 11).ttft_ms == pytest.approx(2.5 * 440, rel=0.1)  # all of it moved together


def test_a_reset_pool_has_its_profile_again():
    learner = predictor()
    Teacher(learner).tell(run(5.0), count=100)
    learner.reset("pool")
    assert learner.state().pools == predictor().state().pools
    assert run_ms(learner) == 160


def test_runs_that_end_faster_than_they_can_be_learned_from_are_drawn():
    learner, told, taught = predictor(), 0, []
    for beat in range(10):  # a heartbeat a second tells many at once
        for n in range(8_000):
            learner.observe("pool", 1, "m", f"t{n % 100}", run(1 + n / 8_000), None, 1_000.0 * beat)
            told += 1
        taught.append(learner.state().pools["pool"].runs)
    assert taught[-1] <= LEARNED_PER_S_MAX * 10
    assert taught[-1] - taught[-2] > LEARNED_PER_S_MAX * 0.8
    assert 160 * 1.4 < run_ms(learner) < 160 * 2.0  # from all of a beat, the last of it most
    counted = {state.tenant for state in learner.state().answers}
    assert len(counted) == 101


def test_a_tenants_answers_count_beside_the_models():
    lengths = Lengths()
    assert (lengths.expected("a", "m", 256), lengths.p90("a", "m", 256)) == (256, 256)
    for _ in range(50):
        lengths.observe("a", "m", 100, is_cut=False)
    assert lengths.expected("b", "m", 256) == pytest.approx(100)
    for n in range(60):
        lengths.observe("b", "m", 9 + n % 3, is_cut=False)
        assert lengths.expected("b", "m", 256) < 100
    assert lengths.expected("b", "m", 256) == pytest.approx(16, abs=6)
    assert lengths.p90("b", "m", 256) < 30
    assert lengths.expected("a", "m", 256) > 60
    assert lengths.expected("a", "m", 7) == lengths.p90("a", "m", 7) == 7
    assert lengths.expected("a", "other", 256) == 256


def test_the_percentile_of_answers_is_that_of_nine_in_ten():
    lengths, within = Lengths(), 0
    for n in range(1, 4_001):
        tokens = int(-200 * math.log(1 - (n * 0.618033988749895) % 1)) + 1
        within += tokens <= lengths.p90("a", "m", 10_000)
        lengths.observe("a", "m", tokens, is_cut=False)
    assert 0.87 <= within / 4_000 <= 0.93
    assert lengths.expected("a", "m", 10_000) == pytest.approx(200, rel=0.3)


def test_answers_that_were_cut_count_as_longer_than_they_are():
    lengths = Lengths()
    for n in range(1, 2_001):
        tokens = int(-200 * math.log(1 - (n * 0.618033988749895) % 1)) + 1
        lengths.observe("a", "m", min(tokens, 100), is_cut=tokens >= 100)
    assert lengths.expected("a", "m", 10_000) == pytest.approx(200, rel=0.35)
    assert 300 < lengths.p90("a", "m", 10_000) < 700


def test_a_tenant_whose_every_answer_is_cut_is_expected_to_use_its_bound():
    learner = predictor()
    Teacher(learner).tell(run(answer=64), count=100, limit=64)
    assert learner.expected_output("t", "m", 256) == learner.output_p90("t", "m", 256) == 256
    assert [state.output_tokens for state in learner.state().answers] == [None, None]
    Teacher(learner).tell(run(answer=8), count=100, limit=64)
    assert learner.expected_output("t", "m", 256) < 50


def test_lengths_of_the_tenant_heard_of_longest_ago_are_forgotten_first():
    lengths = Lengths()
    for n in range(TENANTS_MAX):
        lengths.observe(f"t{n}", "m", 10, is_cut=False)
    lengths.observe("t0", "m", 10, is_cut=False)
    lengths.observe("new", "m", 10, is_cut=False)
    for n in range(MODELS_MAX + 5):
        lengths.observe("new", f"m{n}", 10, is_cut=False)
    names = {state.tenant for state in lengths.state()}
    assert len([state for state in lengths.state() if state.tenant is not None]) == TENANTS_MAX
    assert len([state for state in lengths.state() if state.tenant is None]) == MODELS_MAX
    assert "t1" not in names
    assert "t9999" in names


def test_bytes_per_token_are_learned_for_each_model_and_bounded():
    texts = Texts()
    assert texts.tokens("m", 4_000) == 1_000
    for _ in range(200):
        texts.observe("m", 3_000, 1_000)
        texts.observe("dense", 10_000, 10)
        texts.observe("sparse", 10, 10_000)
        texts.observe("m", 0, 10)
        texts.observe("m", 10, 0)
    assert texts.tokens("m", 3_000) == pytest.approx(1_000, rel=0.01)
    assert texts.tokens("dense", 1_600) == pytest.approx(100, rel=0.05)
    assert texts.tokens("dense", 16_000) >= 1_000
    assert texts.tokens("sparse", 1_600) <= 1_600
    texts.observe("m", 2**40, 1_000)
    assert texts.tokens("m", 3_000) > 800  # one text does not turn it over


def test_the_state_is_plain_json_and_one_that_cannot_be_is_refused():
    learner = predictor()
    Teacher(learner).tell(run(2.0), count=20, size_bytes=3_000)
    learned = msgspec.json.decode(msgspec.json.encode(learner.state()))
    shown = learned["pools"]["pool"]
    assert shown["ttft_ms"] + shown["prefill_ms_per_1k"] == pytest.approx(120, rel=0.01)
    assert (shown["runs"], shown["epoch"]) == (20, 1)
    assert {answers.get("tenant") for answers in learned["answers"]} == {None, "t"}
    assert learned["texts"][0]["bytes_per_token"] < 4
    shown["tpot_ms"] = -1
    with pytest.raises(msgspec.ValidationError, match=r"\$\.pools\[\.\.\.\]\.tpot_ms"):
        msgspec.convert(learned, PredictorState)


def test_a_state_may_know_other_pools_than_the_configuration():
    other = Predictor({"gone": ("ssm", ProfileConfig()), "pool": ("transformer", PLAIN)})
    Teacher(other).tell(run(2.0), count=50)
    learner = Predictor({"pool": ("transformer", PLAIN), "new": ("moe", ProfileConfig())})
    learner.restore(other.state())
    assert learner.predict("pool", 1_000, 11) == other.predict("pool", 1_000, 11)
    assert sorted(learner.state().pools) == ["new", "pool"]
    assert isinstance(learner.predict("new", 1, 1), Prediction)


def test_a_time_that_is_no_number_stops_nothing():
    sampler = _Sampler(10)
    assert sampler.takes(0.0)
    assert sampler.takes(float("nan"))
    assert sampler.takes(float("nan"))
