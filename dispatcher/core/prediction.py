"""How long a run will take on each engine, learned while they run.

Time to the first token = a + b n + c n^2, for a prompt of n thousand tokens; time per token = d + e beside + f cache in use.
Each is a fit of its own (`least_squares.py`) that starts from the engine's profile. What a run may take at the worst is the
prediction times a factor. Its logarithm is so many times the usual size of the error, and that number goes by steps: up by
nine where a run took longer, down by one where not. So nine in ten are within it in the long run whatever the engine does
(adaptive conformal inference: Gibbs, Candes 2021; Angelopoulos, Candes, Tibshirani 2023).

A worker that starts anew may run another model, or just be one of many that was restarted. So a newer epoch only loosens
the fits of its pool. If runs then go on being far off to one side, the model was changed: that fit begins again from the
profile. Without a new epoch the engine itself has changed, and the fit moves to where the runs lie.

Completions come from Redis and may be garbage: what cannot be true is not learned from.
"""

from collections.abc import Mapping
from math import exp, log
from typing import Annotated

from msgspec import Meta, Struct

from dispatcher.core.least_squares import Fit, FitState, Three
from dispatcher.core.lengths import Lengths, LengthState, Texts, TextState
from dispatcher.core.profiles import Profile, profile_of
from schemas.messages import Completion, EngineKind
from schemas.policy import ProfileConfig

PROMPT_TOKENS_MAX = 10_000_000
ANSWER_TOKENS_MAX = 1_000_000
BESIDE_MAX = 100_000
RUN_MS_MAX = 86_400_000.0
LEARNED_PER_S_MAX = 250  # runs of one pool; of more that end so many are drawn, since each costs about as much as a decision
COUNTED_PER_S_MAX = 4_000  # of all, for the lengths
NEW_RUNS = 64  # after a newer epoch: far off means another model
FACTOR_MAX = 20.0

_TAIL = 0.1
_SPREAD_START, _SPREAD_MIN, _SPREAD_MAX, _SPREAD_RATE_MIN = 0.2, 0.005, 1.0, 0.02
_REACH_START, _REACH_MAX, _REACH_STEP = 1.6, 20.0, 0.1  # that of a normal distribution, in mean errors
_SURE_TOKENS = 16  # an answer of so many or more tells the time per token as well as any
_WINDOW_MS = 1_000
_DRAWN_MAX = 2**31

_Seven = tuple[float, float, float, float, float, float, float]
Span = Annotated[float, Meta(ge=0, le=1e12)]


class Prediction(Struct, frozen=True, gc=False):
    """What a run will take, from its start on the engine.

    Attributes:
        ttft_ms: Until its first token.
        tpot_ms: For each further token.
        run_ms: Until its end.
        run_p90_ms: Nine in ten take no longer than that.
    """

    ttft_ms: float
    tpot_ms: float
    run_ms: float
    run_p90_ms: float


class PoolState(Struct, frozen=True):
    """What is believed of a pool's speed; the first six are those of its profile by now.

    Attributes:
        p90_factor: Nine in ten runs take no longer than the prediction times this; it follows from the next two.
        spread: Mean size of the logarithm of (true time / predicted time).
        reach: That of the factor, in spreads.
        epoch: The newest start of a worker that was heard of.
        new_runs: Runs for which that start is still news.
        runs: How many were learned from.
        ttft: How sure the time to the first token is.
        tpot: How sure the time per token is.
    """

    ttft_ms: Span
    prefill_ms_per_1k: Span
    prefill_quadratic_ms: Span
    tpot_ms: Span
    tpot_batch_ms: Span
    tpot_kv_ms: Span
    p90_factor: Annotated[float, Meta(ge=1, le=FACTOR_MAX)]
    spread: Annotated[float, Meta(ge=_SPREAD_MIN, le=_SPREAD_MAX)]
    reach: Annotated[float, Meta(ge=-_REACH_MAX, le=_REACH_MAX)]
    epoch: int | None
    new_runs: Annotated[int, Meta(ge=0)]
    runs: Annotated[int, Meta(ge=0)]
    ttft: FitState
    tpot: FitState


class PredictorState(Struct, frozen=True):
    """All that was learned."""

    pools: dict[str, PoolState]
    answers: list[LengthState]
    texts: list[TextState]


class _Pool:
    """One pool's fits, and the factor of its 90th percentile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.ttft = Fit(profile[:3], (1.0, 1.0, 1.0), (1.0, 1.0, 1 / 32), 1.0)
        self.tpot = Fit(profile[3:], (1.0, 0.0, 0.0), (1.0, 1 / 8, 1.0), 0.1)
        self.sampler = _Sampler(LEARNED_PER_S_MAX)
        self.reset()

    def reset(self) -> None:
        self.ttft.reset(self.profile[:3])
        self.tpot.reset(self.profile[3:])
        self.spread, self.reach = _SPREAD_START, _REACH_START
        self.epoch: int | None = None
        self.new_runs = self.runs = 0

    def observe(self, epoch: int, prompt: Three, load: Three, done: Completion, ttft_ms: float) -> None:
        """Learn from a run that is known to be sound."""
        if self.epoch is None or epoch > self.epoch:
            if self.epoch is not None:
                self.ttft.loosen()
                self.tpot.loosen()
                self.new_runs = NEW_RUNS
            self.epoch = epoch
        elif self.new_runs:
            self.new_runs -= 1
        further = done.output_tokens - 1
        believed_ms = _dot(self.ttft.terms, prompt) + _dot(self.tpot.terms, load) * further
        self._follow(log(max(done.run_ms, 0.1) / max(believed_ms, 0.1)))
        self._learn(self.ttft, self.profile[:3], prompt, ttft_ms, 1.0)
        if further:
            per_token_ms = (done.run_ms - ttft_ms) / further
            self._learn(self.tpot, self.profile[3:], load, per_token_ms, min(further / _SURE_TOKENS, 1.0))
        self.runs += 1

    def coefficients(self) -> _Seven:
        return *self.ttft.terms, *self.tpot.terms, min(max(exp(self.reach * self.spread), 1.0), FACTOR_MAX)

    def state(self) -> PoolState:
        rest = self.spread, self.reach, self.epoch, self.new_runs, self.runs
        return PoolState(*self.coefficients(), *rest, self.ttft.state(), self.tpot.state())

    def restore(self, state: PoolState) -> None:
        self.ttft.restore((state.ttft_ms, state.prefill_ms_per_1k, state.prefill_quadratic_ms), state.ttft)
        self.tpot.restore((state.tpot_ms, state.tpot_batch_ms, state.tpot_kv_ms), state.tpot)
        self.spread, self.reach = state.spread, state.reach
        self.epoch, self.new_runs, self.runs = state.epoch, state.new_runs, state.runs

    def _learn(self, fit: Fit, start: Three, y: Three, time_ms: float, weight: float) -> None:
        if fit.observe(y, time_ms, weight) and self.new_runs:
            fit.reset(start)

    def _follow(self, ratio: float) -> None:
        """Move the factor towards the percentile of the ratios, given as logarithms."""
        reach = self.reach + _REACH_STEP * ((ratio > self.reach * self.spread) - _TAIL)
        self.reach = min(max(reach, -_REACH_MAX), _REACH_MAX)
        rate = max(_SPREAD_RATE_MIN, 1.0 / (self.runs + 2))
        spread = self.spread + rate * (min(abs(ratio), 4 * self.spread) - self.spread)
        self.spread = min(max(spread, _SPREAD_MIN), _SPREAD_MAX)


class _Sampler:
    """Draws from what comes, so that no more than so many a second are taken.

    It draws by a fixed sequence that looks random, so that no order in which tenants take turns hides one of them.
    """

    __slots__ = ("_drawn", "_heard", "_per_s_max", "_share", "_since_ms", "_taken")

    def __init__(self, per_s_max: int) -> None:
        self._per_s_max = per_s_max
        self._since_ms = 0.0
        self._heard = self._taken = self._drawn = 0
        self._share = _DRAWN_MAX  # of what comes, by the last window

    def takes(self, now_ms: float) -> bool:
        passed_ms = now_ms - self._since_ms
        if not 0 <= passed_ms < _WINDOW_MS:  # over, or the clock was set back
            wanted = self._per_s_max * max(1.0, passed_ms / _WINDOW_MS)  # in this order: no number counts as one window
            self._share = _DRAWN_MAX if self._heard <= wanted else int(_DRAWN_MAX * wanted / self._heard)
            self._since_ms, self._heard, self._taken = now_ms, 0, 0
        self._heard += 1
        if self._taken >= self._per_s_max:
            return False
        if self._share < _DRAWN_MAX:
            self._drawn = (self._drawn * 1_103_515_245 + 12_345) & (_DRAWN_MAX - 1)
            if self._drawn >= self._share:
                return False
        self._taken += 1
        return True


class Predictor:
    """What runs will take on the pools, how long answers will be, and how many tokens a text has.

    Args:
        profiles: Pool -> its kind, and what is configured of its speed.
    """

    def __init__(self, profiles: Mapping[str, tuple[EngineKind, ProfileConfig]]) -> None:
        self._pools = {pool: _Pool(profile_of(kind, profile)) for pool, (kind, profile) in profiles.items()}
        self._coefficients = {name: pool.coefficients() for name, pool in self._pools.items()}
        self._lengths, self._texts = Lengths(), Texts()
        self._sampler = _Sampler(COUNTED_PER_S_MAX)

    def predict(
        self, pool: str, input_tokens: float, output_tokens: float, beside: float = 0, kv_usage: float | None = None
    ) -> Prediction:
        """Tell what a run would take.

        Args:
            pool: Where.
            input_tokens: Of its prompt.
            output_tokens: Of its answer.
            beside: Requests that run beside it.
            kv_usage: Share of the cache in use; None where the engine does not tell.

        Raises:
            KeyError: There is no such pool.
        """
        a, b, c, d, e, f, factor = self._coefficients[pool]
        if not 0 <= input_tokens <= PROMPT_TOKENS_MAX:
            input_tokens = 0 if input_tokens < 0 else PROMPT_TOKENS_MAX
        n = input_tokens * 0.001
        if not 0 <= beside <= BESIDE_MAX:
            beside = 0 if beside < 0 else BESIDE_MAX
        ttft_ms, tpot_ms = a + (b + c * n) * n, d + e * beside
        if kv_usage:
            tpot_ms += f * (kv_usage if 0 <= kv_usage <= 1 else kv_usage > 1)
        run_ms = ttft_ms
        if output_tokens > 1:
            run_ms += tpot_ms * ((min(ANSWER_TOKENS_MAX, output_tokens)) - 1)
        return Prediction(ttft_ms, tpot_ms, run_ms, run_ms * factor)

    def expected_output(self, tenant: str, model: str, max_output_tokens: float) -> float:
        """Tell the mean length of a tenant's answers from a model, in tokens; at most `max_output_tokens`."""
        return self._lengths.expected(tenant, model, max_output_tokens)

    def output_p90(self, tenant: str, model: str, max_output_tokens: float) -> float:
        """Tell what nine in ten of a tenant's answers from a model do not exceed; at most `max_output_tokens`."""
        return self._lengths.p90(tenant, model, max_output_tokens)

    def input_tokens(self, model: str, size_bytes: float) -> float:
        """Estimate how many tokens a text has for a model."""
        return self._texts.tokens(model, size_bytes)

    def observe(
        self,
        pool: str,
        epoch: int,
        model: str,
        tenant: str,
        completion: Completion,
        size_bytes: int | None,
        now_ms: float,
        max_output_tokens: int | None = None,
    ) -> None:
        """Learn from a run that ended; one that failed, or that cannot be true, changes nothing.

        Args:
            pool: Where it ran; one that is not known tells only of lengths.
            epoch: Start of the worker that ran it.
            model: Which model was asked for.
            tenant: Whose it was.
            completion: What it took.
            size_bytes: Of its text; None where its tokens were given.
            now_ms: When this was heard.
            max_output_tokens: The request's own bound: an answer of that length was cut.
        """
        done = completion
        if done.code is not None or not (1 <= done.output_tokens <= ANSWER_TOKENS_MAX):
            return
        if not 0 <= done.input_tokens <= PROMPT_TOKENS_MAX or not 0 <= done.run_ms <= RUN_MS_MAX:
            return
        if self._sampler.takes(now_ms):
            is_cut = max_output_tokens is not None and done.output_tokens >= max_output_tokens
            self._lengths.observe(tenant, model, done.output_tokens, is_cut=is_cut)
            if size_bytes is not None:
                self._texts.observe(model, size_bytes, done.input_tokens)
        known, ttft_ms = self._pools.get(pool), done.ttft_ms
        if known is None or ttft_ms is None or not 0 <= ttft_ms <= done.run_ms or not 0 <= done.beside <= BESIDE_MAX:
            return
        kv_usage = done.kv_cache_usage or 0.0
        if not 0 <= kv_usage <= 1 or not known.sampler.takes(now_ms):
            return
        n = done.input_tokens / 1000
        known.observe(epoch, (1.0, n, n * n), (1.0, float(done.beside), kv_usage), done, ttft_ms)
        self._coefficients[pool] = known.coefficients()

    def reset(self, pool: str) -> None:
        """Believe only a pool's profile again.

        Raises:
            KeyError: There is no such pool.
        """
        self._pools[pool].reset()
        self._coefficients[pool] = self._pools[pool].coefficients()

    def state(self) -> PredictorState:
        """Give all that was learned, to be shown or to go on from."""
        pools = {name: pool.state() for name, pool in self._pools.items()}
        return PredictorState(pools, self._lengths.state(), self._texts.state())

    def restore(self, state: PredictorState) -> None:
        """Go on from a state; pools that are not configured any more are left out."""
        for name, learned in state.pools.items():
            if name in self._pools:
                self._pools[name].restore(learned)
                self._coefficients[name] = self._pools[name].coefficients()
        self._lengths.restore(state.answers)
        self._texts.restore(state.texts)


def _dot(terms: Three, y: Three) -> float:
    return terms[0] * y[0] + terms[1] * y[1] + terms[2] * y[2]
