"""What is believed of an engine's speed before it has run anything.

The figures are those of the article for an A100, one request at a time: 78 ms to the first token of a prompt of 1,024
tokens and 18 ms for each further one (transformer), 42 and 14 (ssm), 65 and 16 (moe). They are optimistic; whoever knows
better says so in the engine's `profile`. How they are split is ours: reading a prompt takes at least one step, and the
rest goes with its length; attention costs as much as everything else at about 100,000 tokens, and a state-space model has
none; each request beside it slows a step by 2 %, and a full cache by a quarter.
"""

from collections.abc import Mapping
from typing import NamedTuple

from schemas.messages import EngineKind
from schemas.policy import ProfileConfig

_ARTICLE: Mapping[str, tuple[float, float]] = {"transformer": (78.0, 18.0), "ssm": (42.0, 14.0), "moe": (65.0, 16.0)}
_ARTICLE_PROMPT = 1.024  # in thousands of tokens
_OTHERS = "transformer"  # what a kind is taken for that has no figures of its own
_WITHOUT_ATTENTION = frozenset({"ssm"})
_QUADRATIC_SHARE, _BATCH_SHARE, _KV_SHARE = 0.01, 0.02, 0.25


class Profile(NamedTuple):
    """The six numbers of an engine's speed; see `ProfileConfig`, whose fields these are."""

    ttft_ms: float
    prefill_ms_per_1k: float
    prefill_quadratic_ms: float
    tpot_ms: float
    tpot_batch_ms: float
    tpot_kv_ms: float


def profile_of(kind: EngineKind, config: ProfileConfig) -> Profile:
    """Complete a configured profile with the figures of its kind.

    Args:
        kind: The kind of engine.
        config: What is configured; a part that is left out goes with those that are given.
    """
    first_ms, token_ms = _ARTICLE.get(kind, _ARTICLE[_OTHERS])
    quadratic_share, kv_share = (0.0, 0.0) if kind in _WITHOUT_ATTENTION else (_QUADRATIC_SHARE, _KV_SHARE)
    slope_ms = (first_ms - token_ms) / (_ARTICLE_PROMPT * (1.0 + quadratic_share * _ARTICLE_PROMPT))
    tpot_ms = _given(config.tpot_ms, token_ms)
    prefill_ms = _given(config.prefill_ms_per_1k, slope_ms)
    return Profile(
        _given(config.ttft_ms, token_ms),
        prefill_ms,
        _given(config.prefill_quadratic_ms, quadratic_share * prefill_ms),
        tpot_ms,
        _given(config.tpot_batch_ms, _BATCH_SHARE * tpot_ms),
        _given(config.tpot_kv_ms, kv_share * tpot_ms),
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)
