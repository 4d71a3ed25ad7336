"""What a worker writes when a request in its hands ends: a result, or the request back to the dispatcher."""

from collections.abc import Callable

from msgspec import structs

from broker.transport.outputs import Outputs
from broker.transport.protocol import Outgoing
from broker.transport.suspicion import after_crash
from engine_consumers.core.outcome import Retry, Runner, Terminal, after_failure
from engine_consumers.generation import Generation
from engine_consumers.job import Job
from schemas.config import Config
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo, InferenceResult, RouteAttempt, Timing, Usage

CANCELLED = ErrorInfo(ErrorCode.CANCELLED, "cancelled")
EXPIRED = ErrorInfo(ErrorCode.EXPIRED, "the deadline passed", "deadline")
SHOWN = frozenset({"cancelled", "expired"})  # ended from outside: what there is of the output is given


class Endings:
    """Makes the records that end requests.

    Args:
        config: The configuration.
        name: The engine's name in it.
        runner: Who runs them.
        outputs: Makes records.
        clock: Unix time in milliseconds.
    """

    def __init__(self, config: Config, name: str, runner: Runner, outputs: Outputs, clock: Callable[[], int]) -> None:
        self._config, self._name, self._runner, self._outputs, self._clock = config, name, runner, outputs, clock

    def completion(self, job: Job, generation: Generation) -> InferenceResult:
        """The result of a run that came to its end."""
        attempt = RouteAttempt(self._runner.pool, self._runner.worker, "completed", placement=job.envelope.placement)
        return self._result(
            job,
            status="completed",
            output_text=generation.text,
            output_tokens=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason=generation.finish_reason,
            usage=generation.usage,
            timing=generation.timing(),
            route=[*job.envelope.route, attempt],
            experts=generation.experts,
        )

    def fit(self, outputs: list[Outgoing]) -> bool:
        """Whether the broker will take them all."""
        return all(self._outputs.fits(output) for output in outputs)

    def oversized(self) -> ErrorInfo:
        """The result is larger than a record may be, and there is no store."""
        message = (
            f"the result is larger than a record may be ({self._config.kafka.record_bytes_max} bytes), "
            "and there is no `blobs.store` to put it"
        )
        return ErrorInfo(ErrorCode.INVALID_REQUEST, message, "max_output_tokens")

    def failed(self, job: Job, error: ErrorInfo, *, crashed: bool = False) -> list[Outgoing]:
        """The run failed, or never began.

        Args:
            job: The request.
            error: Why.
            crashed: The engine died while it ran.
        """
        envelope, record = job.envelope, job.record
        if crashed:
            envelope = structs.replace(envelope, crashes=after_crash(envelope.crashes, alone=job.alone))
        if envelope.crashes >= self._config.worker.poison_crashes:
            error = poison(envelope.crashes)
        verdict = after_failure(envelope, error, self._runner, self._config.dispatcher, self._clock())
        if isinstance(verdict, Retry):
            return [self._outputs.retry(verdict.envelope, record.value or b"", record.headers)]
        result = self._terminal(job, verdict, job.generation)
        outputs = self._outputs.result(result, record.headers)
        if not self.fit(outputs):
            outputs = self._outputs.result(self._terminal(job, verdict, None), record.headers)
        dead = [self._outputs.dead_letter(record, verdict.error)] if verdict.dead_letter else []
        return [*outputs, *dead]

    def _terminal(self, job: Job, verdict: Terminal, generation: Generation | None) -> InferenceResult:
        result = self._result(
            job,
            status=verdict.status,
            timing=generation.timing() if generation else Timing(),
            route=verdict.route,
            error=verdict.error,
        )
        if generation is None or verdict.status not in SHOWN or not generation.token_ids:
            return result
        return structs.replace(
            result,
            output_text=generation.text,
            output_tokens=generation.token_ids,
            logprobs=generation.logprobs,
            finish_reason="abort",
            usage=Usage(generation.usage.input_tokens, len(generation.token_ids)),
        )

    def _result(self, job: Job, **fields: object) -> InferenceResult:
        known = {
            "request_id": job.envelope.id,
            "tenant": job.envelope.tenant,
            "model": self._config.answering(self._name, job.request.model),
            "engine": self._name,
            "worker": self._runner.worker,
            "run_id": job.run,
            "metadata": job.request.metadata,
        }
        return InferenceResult(**known, **fields)  # type: ignore[arg-type]


def poison(crashes: int) -> ErrorInfo:
    """Why a request is not run again that kills whoever runs it."""
    message = f"its worker or engine died {crashes} times while it was in hand, at last while it ran alone"
    return ErrorInfo(ErrorCode.POISON, message)
