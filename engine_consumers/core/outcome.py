"""What becomes of a request whose run failed: another try, or a terminal result. Pure, like all of core.

Only the request's own failures count as attempts; an engine that is down, full or too small is not the request's
fault: it goes back to the dispatcher, which asks that worker again only once it has started anew, or nobody else is there.
"""

import hashlib

from msgspec import Struct, structs

from schemas.config import DispatcherConfig
from schemas.errors import ErrorCode
from schemas.messages import Envelope, ErrorInfo, RouteAttempt, Status

HAND_BACK = frozenset(
    {
        ErrorCode.UNHEALTHY,
        ErrorCode.CAPACITY_EXCEEDED,
        ErrorCode.PREEMPTED,
        ErrorCode.CONTEXT_OVERFLOW,
        ErrorCode.UNSUPPORTED_FEATURE,
    }
)
ROUTE_MAX = 16  # attempts that are remembered
JITTER_STEPS = 1 << 16


class Runner(Struct, frozen=True):
    """Who ran it."""

    engine: str
    pool: str
    worker: str
    epoch: int


class Retry(Struct, frozen=True):
    """Hand it back to the dispatcher with this envelope."""

    envelope: Envelope


class Terminal(Struct, frozen=True):
    """End it; a failure also leaves a dead letter."""

    status: Status
    error: ErrorInfo
    route: list[RouteAttempt]
    dead_letter: bool


def after_failure(
    envelope: Envelope, error: ErrorInfo, runner: Runner, config: DispatcherConfig, now_ms: int
) -> Retry | Terminal:
    """Decide what follows a failed run.

    Args:
        envelope: As the request came to this worker.
        error: What the run ended with.
        runner: Engine and worker that ran it.
        config: Bounds of attempts, and the backoff.
        now_ms: Unix time.
    """

    def route(outcome: str) -> list[RouteAttempt]:
        attempt = RouteAttempt(runner.pool, runner.worker, outcome, error, envelope.placement)  # type: ignore[arg-type]
        return [*envelope.route, attempt][-ROUTE_MAX:]

    code = error.code
    if code in HAND_BACK:
        excluded = {**envelope.excluded, runner.pool: runner.epoch}
        back = structs.replace(envelope, hop=envelope.hop + 1, route=route("retried"), excluded=excluded, placement=None)
        return Retry(structs.replace(back, not_before_ms=now_ms + _backoff_ms(envelope, envelope.hop, config)))
    if code.retryable:
        attempts = envelope.attempts + 1
        if attempts < config.max_attempts:
            again = structs.replace(envelope, hop=envelope.hop + 1, attempts=attempts, route=route("retried"), placement=None)
            return Retry(structs.replace(again, not_before_ms=now_ms + _backoff_ms(envelope, attempts, config)))
        last = ErrorInfo(code, f"{error.message} (attempt {attempts} of {config.max_attempts})", error.param)
        return Terminal("failed", last, route("failed"), dead_letter=True)
    status: Status = "rejected" if code.is_client_fault else "cancelled" if code is ErrorCode.CANCELLED else "failed"
    if code is ErrorCode.EXPIRED:
        status = "expired"
    return Terminal(status, error, route(status), dead_letter=status == "failed")


def _backoff_ms(envelope: Envelope, times: int, config: DispatcherConfig) -> int:
    """Exponential backoff with half of it jitter, drawn from the id so that a run repeats."""
    if not times and envelope.route == []:
        return 0  # the first hand-back need not wait: another engine may be free
    whole = min(config.retry_backoff_ms << min(times, 16), config.retry_backoff_ms_max)
    digest = hashlib.blake2b(f"{envelope.id}/{times}".encode(), digest_size=2).digest()
    return whole // 2 + whole * int.from_bytes(digest, "big") // (2 * JITTER_STEPS)
