"""Row 10: the predictor on a simulated engine that drifts, beside the profile it started from and the noise floor.

The engine: time to the first token = (40 + 25 n + 0.4 n^2) ms x speed x noise for n thousand tokens of prompt; time per
token = (16 + 0.4 beside + 5 cache) ms x speed x noise. Prompts are lognormal (median 800 tokens, sigma 1, to 60,000),
answers too (median 150, sigma 0.8, to 2,000); load swings between 0 and 31 requests. The noise is lognormal, 8 % on the
first token and 5 % on the others; one run in 200 takes ten times as long.

The drift, over 20,000 runs: speed swings by 20 % with the heat of the GPU, over 10,000 runs; over all of them it gets
worse by 30 %; in the middle it is throttled at once by another 40 %; after three quarters another model with half the
slope comes with a new epoch.

The floor knows the engine's true numbers at each moment, but not the noise. The profile is the engine's own at the start,
with the factor that covers nine in ten of the first 2,000 runs: it is as well tuned as a profile can be.
"""

import math
import random
from statistics import mean

from dispatcher.core.prediction import Predictor
from schemas.messages import Completion
from schemas.policy import ProfileConfig

RUNS, TUNING, PER_S = 20_000, 2_000, 50
TTFT, TPOT = (40.0, 25.0, 0.4), (16.0, 0.4, 5.0)
TTFT_NOISE, TPOT_NOISE, OUTLIERS, OUTLIER = 0.08, 0.05, 1 / 200, 10.0
PROFILE = ProfileConfig(*TTFT, *TPOT)


class Engine:
    """Runs requests; gives each with the time that its true numbers promise."""

    def __init__(self, seed: int) -> None:
        self.random, self.count = random.Random(seed), 0

    def run(self) -> tuple[Completion, int, float]:
        """Give a run, the epoch of its worker, and the time it would take without noise."""
        dice, at = self.random, self.count / RUNS
        self.count += 1
        speed = (1 + 0.2 * math.sin(4 * math.pi * at)) * (1 + 0.3 * at) * (1.4 if at >= 0.5 else 1.0)
        is_new = at >= 0.75
        n = min(dice.lognormvariate(math.log(0.8), 1.0), 60.0)
        answer = max(2, min(int(dice.lognormvariate(math.log(150), 0.8)), 2_000))
        beside = int(15.5 + 15.5 * math.sin(40 * math.pi * at) * dice.random())
        cache = min(1.0, beside / 40 + 0.1 * dice.random())
        ttft_ms = (TTFT[0] + (TTFT[1] / 2 if is_new else TTFT[1]) * n + TTFT[2] * n * n) * speed
        tpot_ms = (TPOT[0] + TPOT[1] * beside + TPOT[2] * cache) * speed * (0.6 if is_new else 1.0)
        slow = OUTLIER if dice.random() < OUTLIERS else 1.0
        first_ms = ttft_ms * slow * math.exp(dice.gauss(0, TTFT_NOISE))
        run_ms = first_ms + (answer - 1) * tpot_ms * slow * math.exp(dice.gauss(0, TPOT_NOISE))
        done = Completion(0, self.count, round(n * 1000), answer, 0.0, first_ms, run_ms, beside, cache)
        return done, 1 + is_new, ttft_ms + (answer - 1) * tpot_ms


def measure(seed: int) -> dict[str, float]:
    """Give the share of runs within their 90th percentile and the mean error, of ours, the profile and the floor."""
    engine = Engine(seed)
    profiles = {"pool": ("transformer", PROFILE)}
    ours, profile = Predictor(profiles), Predictor(profiles)
    errors: dict[str, list[float]] = {"ours": [], "profile": [], "floor": []}
    within, ratios = 0, []
    for number in range(RUNS):
        done, epoch, true_ms = engine.run()
        asked = ("pool", done.input_tokens, done.output_tokens, done.beside, done.kv_cache_usage)
        expected, static = ours.predict(*asked), profile.predict(*asked)
        ours.observe("pool", epoch, "model", "tenant", done, None, number * 1000 / PER_S)
        within += done.run_ms <= expected.run_p90_ms
        ratios.append(done.run_ms / static.run_ms)
        for name, promised_ms in (("ours", expected.run_ms), ("profile", static.run_ms), ("floor", true_ms)):
            errors[name].append(abs(promised_ms - done.run_ms) / done.run_ms)
    factor = sorted(ratios[:TUNING])[int(TUNING * 0.9)]
    found = {f"{name} error": mean(one) for name, one in errors.items()}
    return found | {"ours within": within / RUNS, "profile within": sum(ratio <= factor for ratio in ratios) / RUNS}
