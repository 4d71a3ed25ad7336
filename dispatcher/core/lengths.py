"""How many tokens a text has, and how many an answer will have, learned from the runs that ended.

An answer that was cut by its request's own limit tells only that it would have been longer. It is taken to go on as long
again as answers do on average, so the mean is that of life tests: all tokens over those that ended by themselves
(Epstein, Sobel 1953). A tenant's first answers are counted together with a few that are as long as the model's. The 90th
percentile is the mean times a factor that goes by steps: up by nine where an answer was longer, down by one where it was
not (Robbins, Monro 1951).
"""

from math import exp
from typing import Annotated

from msgspec import Meta, Struct

BYTES_PER_TOKEN, BYTES_PER_TOKEN_MIN, BYTES_PER_TOKEN_MAX = 4.0, 1.0, 16.0
TENANTS_MAX, MODELS_MAX = 10_000, 1_000
ANSWER_TOKENS_MAX = 1_000_000

_DECAY = 0.98  # an answer is half forgotten after 34 others
_PRIOR = 4.0  # answers
_TAIL = 0.1  # share of the answers above the percentile
_STEP_MIN = 0.05
_REACH_START, _REACH_MAX = 2.3, 100.0  # at the start, as where answers end at any moment alike
_TEXT_DECAY = 0.99
_TEXT_START_BYTES = 4_096.0  # what is believed at the start counts like a text of that size
_TEXT_WEIGHT_MAX = 16_384.0  # no single text counts for more

NotNegative = Annotated[float, Meta(ge=0)]


class LengthState(Struct, frozen=True, omit_defaults=True):
    """The answers of one model, or of one tenant from it.

    Attributes:
        output_tokens: Their mean; None where every answer was cut.
        reach: Their 90th percentile over their mean.
        tenant: Whose they are; None: of all.
        tokens: Counted, with decay.
        ended: Answers that ended by themselves, with decay.
        answers: All of them.
    """

    model: str
    output_tokens: float | None
    reach: Annotated[float, Meta(ge=1, le=_REACH_MAX)]
    tokens: NotNegative
    ended: NotNegative
    answers: Annotated[int, Meta(ge=1)]
    tenant: str | None = None


class TextState(Struct, frozen=True):
    """The texts of one model's prompts.

    Attributes:
        bytes_per_token: What their tokens are estimated by.
        size_bytes: Counted, with decay.
        tokens: That they had.
    """

    model: str
    bytes_per_token: float
    size_bytes: Annotated[float, Meta(gt=0)]
    tokens: NotNegative


class _Answers:
    """The answers of one source."""

    __slots__ = ("answers", "ended", "reach", "tokens")

    def __init__(self, reach: float) -> None:
        self.tokens = self.ended = 0.0
        self.answers = 0
        self.reach = reach

    def observe(self, tokens: int, mean: float, *, is_cut: bool) -> None:
        p90 = self.reach * mean
        is_above = tokens > p90
        above = exp((tokens - p90) / mean) if is_cut and not is_above else float(is_above)  # how likely it would be
        step = max(_STEP_MIN, 1.0 / (self.answers + 2))
        self.reach = min(max(self.reach * exp(step * (above - _TAIL)), 1.0), _REACH_MAX)
        self.tokens = self.tokens * _DECAY + tokens
        self.ended = self.ended * _DECAY + (not is_cut)
        self.answers += 1

    def mean(self) -> float:
        """Give tokens over answers that ended; unbounded where none did."""
        return self.tokens / self.ended if self.ended * ANSWER_TOKENS_MAX > self.tokens else float(ANSWER_TOKENS_MAX)

    def state(self, tenant: str | None, model: str) -> LengthState:
        mean = self.mean()
        shown = mean if mean < ANSWER_TOKENS_MAX else None
        return LengthState(model, shown, self.reach, self.tokens, self.ended, self.answers, tenant)


class Lengths:
    """Expected lengths of answers, per tenant and model."""

    def __init__(self) -> None:
        self._models: dict[str, _Answers] = {}
        self._tenants: dict[tuple[str, str], _Answers] = {}  # those whose answer is oldest stand first, as in `_models`

    def expected(self, tenant: str, model: str, max_output_tokens: float) -> float:
        """Give the mean, at most `max_output_tokens`; just that where nothing is known."""
        return min(self._mean(tenant, model), max_output_tokens)

    def p90(self, tenant: str, model: str, max_output_tokens: float) -> float:
        """Give the 90th percentile, at least the mean and at most `max_output_tokens`; just that where nothing is known."""
        known = self._tenants.get((tenant, model)) or self._models.get(model)
        return max_output_tokens if known is None else min(known.reach * self._mean(tenant, model), max_output_tokens)

    def observe(self, tenant: str, model: str, output_tokens: int, *, is_cut: bool) -> None:
        """Learn from an answer.

        Args:
            tenant: Whose it is.
            model: Which model gave it.
            output_tokens: Its length; one that no answer has changes nothing.
            is_cut: Whether the request's own limit ended it.
        """
        if not 1 <= output_tokens <= ANSWER_TOKENS_MAX:
            return
        expected = self._mean(tenant, model)
        of_model = self._models.pop(model, None) or _Answers(_REACH_START)
        of_tenant = self._tenants.pop((tenant, model), None) or _Answers(of_model.reach)
        of_tenant.observe(output_tokens, expected, is_cut=is_cut)
        of_model.observe(output_tokens, of_model.mean(), is_cut=is_cut)
        self._models[model], self._tenants[tenant, model] = of_model, of_tenant
        if len(self._models) > MODELS_MAX:
            del self._models[next(iter(self._models))]
        if len(self._tenants) > TENANTS_MAX:
            del self._tenants[next(iter(self._tenants))]

    def state(self) -> list[LengthState]:
        """Give all that is known, the oldest first."""
        found = [answers.state(None, model) for model, answers in self._models.items()]
        return found + [answers.state(tenant, model) for (tenant, model), answers in self._tenants.items()]

    def restore(self, states: list[LengthState]) -> None:
        """Go on from what `state` told."""
        self._models.clear()
        self._tenants.clear()
        for state in states:
            answers = _Answers(state.reach)
            answers.tokens, answers.ended, answers.answers = state.tokens, state.ended, state.answers
            if state.tenant is None:
                self._models[state.model] = answers
            else:
                self._tenants[state.tenant, state.model] = answers

    def _mean(self, tenant: str, model: str) -> float:
        """Give the mean, unbounded where every answer was cut or none is known."""
        of_model, of_tenant = self._models.get(model), self._tenants.get((tenant, model))
        if of_tenant is None:
            return float(ANSWER_TOKENS_MAX) if of_model is None else of_model.mean()
        usual = ANSWER_TOKENS_MAX if of_model is None else of_model.mean()
        if usual >= ANSWER_TOKENS_MAX:
            return of_tenant.mean()
        return (_PRIOR * usual + of_tenant.tokens) / (_PRIOR + of_tenant.ended)


class Texts:
    """Bytes per token of each model's prompts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}  # model -> bytes and tokens counted

    def tokens(self, model: str, size_bytes: float) -> float:
        """Estimate how many tokens a text of that size has."""
        known = self._known.get(model)
        return size_bytes / BYTES_PER_TOKEN if known is None else size_bytes * known[1] / known[0]

    def observe(self, model: str, size_bytes: int, tokens: int) -> None:
        """Learn from a text; one that is empty, or whose tokens are none, changes nothing."""
        if size_bytes <= 0 or tokens <= 0:
            return
        counted_bytes, counted = self._known.pop(model, (_TEXT_START_BYTES, _TEXT_START_BYTES / BYTES_PER_TOKEN))
        weight = min(float(size_bytes), _TEXT_WEIGHT_MAX)
        ratio = min(max(size_bytes / tokens, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)
        self._known[model] = counted_bytes * _TEXT_DECAY + weight, counted * _TEXT_DECAY + weight / ratio
        if len(self._known) > MODELS_MAX:
            del self._known[next(iter(self._known))]

    def state(self) -> list[TextState]:
        """Give all that is known, the oldest first."""
        return [TextState(model, size / tokens, size, tokens) for model, (size, tokens) in self._known.items()]

    def restore(self, states: list[TextState]) -> None:
        """Go on from what `state` told."""
        self._known = {state.model: (state.size_bytes, state.tokens) for state in states}
