"""Row 10: the predictor on a simulated engine that drifts, beside the profile it started from and the noise floor.

The engine: time to the first token = (40 + 25 n + 0.4 n^2) ms x speed x noise for n thousand tokens of prompt; time per
token = (16 + 0.4 beside + 5 cache) ms x speed x noise. Prompts are lognormal (median 800 tokens, sigma 1, to 60,000),
answers too (median 150, sigma 0.8, to 2,000); load swings between 0 and 31 requests. The noise is lognormal, 8 % on the
first token and 5 % on the others; one run in 200 takes ten times as long.

The drift, over 20,000 runs: speed swings by 20 % with the heat of the GPU, over 10,000 runs; over all of them it gets
worse by 30 %; in the middle it is throttled at once by another 40 %; after three quarters another model with half the
slope comes with a new epoch.

Each run is predicted when it starts. It is learned from at its end, or, as from live workers, with a heartbeat: 50 runs at
a time. The floor knows the engine's true numbers at each moment, but not the noise; with heartbeats nobody can know more
than the numbers as of the last one, and that is the floor there. The profile is the engine's own at the start, with the
factor that covers nine in ten of the first 2,000 runs: it is as well tuned as a profile can be.
"""

import math
import random
from statistics import mean

from dispatcher.core.prediction import Predictor
from schemas.messages import Completion
from schemas.policy import ProfileConfig

RUNS, TUNING, STRETCH, PER_S = 20_000, 2_000, 1_000, 50
TTFT, TPOT = (40.0, 25.0, 0.4), (16.0, 0.4, 5.0)
TTFT_NOISE, TPOT_NOISE, OUTLIERS, OUTLIER = 0.08, 0.05, 1 / 200, 10.0
PROFILE = ProfileConfig(*TTFT, *TPOT)


class Engine:
    """Runs requests at its true speed."""

    def __init__(self, seed: int) -> None:
        self.random, self.count = random.Random(seed), 0

    @property
    def epoch(self) -> int:
        """The start of its worker."""
        return 1 + (self.count >= RUNS * 3 / 4)

    def times(self, tokens: int, beside: int, cache: float, count: int) -> tuple[float, float]:
        """Give the times to the first token and for each other that its numbers promised after so many runs."""
        at, n = count / RUNS, tokens / 1000
        speed = (1 + 0.2 * math.sin(4 * math.pi * at)) * (1 + 0.3 * at) * (1.4 if at >= 0.5 else 1.0)
        slope, step = (0.5, 0.6) if at >= 0.75 else (1.0, 1.0)
        ttft_ms = TTFT[0] + TTFT[1] * slope * n + TTFT[2] * n * n
        return ttft_ms * speed, (TPOT[0] + TPOT[1] * beside + TPOT[2] * cache) * step * speed

    def run(self) -> Completion:
        """Take a request, and make noise."""
        dice = self.random
        tokens = int(min(dice.lognormvariate(math.log(800), 1.0), 60_000))
        answer = max(2, min(int(dice.lognormvariate(math.log(150), 0.8)), 2_000))
        beside = int(15.5 + 15.5 * math.sin(40 * math.pi * self.count / RUNS) * dice.random())
        cache = min(1.0, beside / 40 + 0.1 * dice.random())
        ttft_ms, tpot_ms = self.times(tokens, beside, cache, self.count)
        slow = OUTLIER if dice.random() < OUTLIERS else 1.0
        ttft_ms *= slow * math.exp(dice.gauss(0, TTFT_NOISE))
        run_ms = ttft_ms + (answer - 1) * tpot_ms * slow * math.exp(dice.gauss(0, TPOT_NOISE))
        self.count += 1
        return Completion(0, self.count, tokens, answer, 0.0, ttft_ms, run_ms, beside, cache)


def measure(seed: int, per_beat: int) -> dict[str, float]:
    """Predict all runs, and tell of them so many at a time.

    Returns:
        Of ours, the profile and the floors the mean error, and, but for `known`, the share of runs within their 90th
        percentile and that percentile over the time that the engine's numbers promise; of ours also the least and the
        greatest share in any stretch of 1,000 runs.
    """
    engine = Engine(seed)
    profiles = {"pool": ("transformer", PROFILE)}
    ours, profile = Predictor(profiles), Predictor(profiles)
    promised: dict[str, list[float]] = {"ours": [], "profile": [], "floor": [], "known": []}
    took, ours_p90, heard, told = [], [], [], 0
    for number in range(RUNS):
        epoch, done = engine.epoch, engine.run()
        load, further = (done.input_tokens, done.beside, done.kv_cache_usage), done.output_tokens - 1
        asked = ("pool", done.input_tokens, done.output_tokens, done.beside, done.kv_cache_usage)
        found = ours.predict(*asked)
        promised["ours"].append(found.run_ms)
        promised["profile"].append(profile.predict(*asked).run_ms)
        for name, at in (("floor", number), ("known", told)):
            ttft_ms, tpot_ms = engine.times(*load, at)
            promised[name].append(ttft_ms + further * tpot_ms)
        ours_p90.append(found.run_p90_ms)
        took.append(done.run_ms)
        heard.append((done, epoch))
        if len(heard) == per_beat:
            for one, since in heard:
                ours.observe("pool", since, "model", "tenant", one, None, number * 1000 / PER_S)
            heard, told = [], number
    p90 = {"ours": ours_p90, "profile": tuned(promised["profile"], took), "floor": tuned(promised["floor"], took)}
    result = {f"{name} error": mean(abs(p - t) / t for p, t in zip(promised[name], took, strict=True)) for name in promised}
    result |= {f"{name} within": mean(t <= p for p, t in zip(p90[name], took, strict=True)) for name in p90}
    result |= {f"{name} reach": mean(p / t for p, t in zip(p90[name], promised["floor"], strict=True)) for name in p90}
    within = [t <= p for p, t in zip(ours_p90, took, strict=True)]
    stretches = [mean(within[at : at + STRETCH]) for at in range(0, RUNS, STRETCH)]
    return result | {"least": min(stretches), "greatest": max(stretches)}


def tuned(promised_ms: list[float], took_ms: list[float]) -> list[float]:
    """Give the 90th percentiles by the one factor that covers nine in ten of the first runs."""
    ratios = sorted(took / promised for promised, took in zip(promised_ms[:TUNING], took_ms[:TUNING], strict=True))
    return [promised * ratios[int(TUNING * 0.9)] for promised in promised_ms]
