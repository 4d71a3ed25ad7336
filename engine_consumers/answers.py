"""What a worker says of the requests that it has in hand."""

from collections.abc import Sequence

from engine_consumers.core.outcome import Runner
from engine_consumers.job import NEVER_MS, Job
from schemas.questions import Answer, Question, Stage, Where, WhereIs, Why

FOUND_MAX = 100  # of one id: tenants may share it, and a client may use it again and again


def answer(question: Question, runner: Runner, jobs: Sequence[Job]) -> Answer:
    """Answer a question that was asked of this process.

    Args:
        question: What is asked.
        runner: Who this is.
        jobs: All that is in hand.
    """
    name = f"{runner.pool}/{runner.worker}"
    if not isinstance(question, WhereIs):
        return Answer(name, "worker")
    asked = [job for job in jobs if job.envelope.id == question.id and question.tenant in {None, job.envelope.tenant}]
    return Answer(name, "worker", [_where(job, runner, jobs) for job in asked[:FOUND_MAX]])


def _where(job: Job, runner: Runner, jobs: Sequence[Job]) -> Where:
    envelope, generation, is_running = job.envelope, job.generation, job.task is not None
    waiting = [other for other in jobs if other.task is None and (other.order, other.ticket) < (job.order, job.ticket)]
    return Where(
        id=envelope.id,
        stage=Stage.RUNNING if is_running else Stage.RUNWAY,
        tenant=envelope.tenant,
        service_class=envelope.service_class,
        received_at_ms=envelope.received_at_ms,
        since_ms=generation.started_ms if generation else None,
        deadline_ms=job.order.deadline_ms if job.order.deadline_ms < NEVER_MS else None,
        ahead=None if is_running else len(waiting),
        why=None if is_running else Why.ALONE if job.alone else Why.SLOT,
        record=(job.record.topic, job.record.partition, job.record.offset),
        pool=runner.pool,
        worker=runner.worker,
        attempts=envelope.attempts,
        hop=envelope.hop,
        output_tokens=len(generation.token_ids) if generation else None,
    )
