"""Where a request is, in words."""

from schemas.questions import Stage, Where, Why

_STAGES = {
    Stage.UNREAD: "on the topic that it was sent to; no dispatcher has it in hand",
    Stage.WAITING: "waiting in the dispatcher",
    Stage.DELAYED: "waiting in the dispatcher, to be tried again later",
    Stage.LANE: "in a lane of its tenant, which had enough in the dispatcher's hands",
    Stage.RETRY: "on the retries' topic; no dispatcher has it in hand",
    Stage.SENT: "sent to the engine; no worker has it in hand yet",
    Stage.RUNWAY: "at a worker, before it runs",
    Stage.RUNNING: "running",
}
_WHYS = {
    Why.TURN: "it is not its turn yet",
    Why.TENANT_PAUSED: "its tenant is paused (`forebay tenants set {tenant} --resume`)",
    Why.TENANT_RATE: "its tenant's rate lets nothing more pass",
    Why.ENGINES_FULL: "every engine that may serve it is full",
    Why.ENGINES_PAUSED: "every engine that may serve it is paused (`forebay engines show`)",
    Why.ENGINES_RATE: "the rates of the engines that may serve it let nothing more pass",
    Why.ENGINES_BROKEN: "the engines that may serve it have failed too often, and are left alone for a while",
    Why.NO_ENGINE: "no engine that may serve it is there",
    Why.RETRY: "an attempt failed, and the next one has its time",
    Why.SLOT: "all slots of the worker are taken",
    Why.ALONE: "it was there when an engine died, and is to run with nothing beside it",
}


def describe(where: Where, now_ms: int) -> list[str]:
    """Say it in a few lines.

    Args:
        where: Where the request is.
        now_ms: Unix time.
    """
    facts: list[str] = [where.service_class] if where.service_class else []
    facts += [f"received {span(now_ms - where.received_at_ms)} ago"] if where.received_at_ms is not None else []
    title = f"request {where.id} of tenant {where.tenant}"
    lines = [f"{title} ({', '.join(facts)})" if facts else title, f"  {_stage(where, now_ms)}"]
    if where.ahead is not None:
        lines.append(f"  {where.ahead} expected to go before it" if where.ahead else "  next in line")
    if where.why is not None:
        until = "" if where.until_ms is None else f", for {span(where.until_ms - now_ms)}"
        lines.append(f"  why: {_WHYS[where.why].format(tenant=where.tenant)}{until}")
    lines += [f"    {pool}: {reason}" for pool, reason in sorted(where.engines.items())]
    if where.deadline_ms is not None:
        left_ms = where.deadline_ms - now_ms
        lines.append(f"  its deadline is in {span(left_ms)}" if left_ms >= 0 else f"  its deadline passed {span(-left_ms)} ago")
    if where.attempts or where.hop:
        lines.append(f"  sent to an engine {where.hop} times before, of which {where.attempts} were failures of its own")
    if where.record is not None:
        lines.append("  record {}/{} at offset {}".format(*where.record))
    return lines


def span(time_ms: float) -> str:
    """A time span for people: 800 ms, 12.5 s, 3 min 20 s, 2 h 5 min."""
    time_ms = max(time_ms, 0)
    if time_ms < 1_000:
        return f"{time_ms:.0f} ms"
    if time_ms < 60_000:
        return f"{time_ms / 1000:.1f} s"
    whole_s = int(time_ms // 1000)
    if whole_s < 3_600:
        return f"{whole_s // 60} min {whole_s % 60} s"
    return f"{whole_s // 3_600} h {whole_s % 3_600 // 60} min"


def _stage(where: Where, now_ms: int) -> str:
    on = f" on {where.pool}/{where.worker}" if where.pool and where.worker else f" on {where.pool}" if where.pool else ""
    since_ms = None if where.since_ms is None else now_ms - where.since_ms
    if where.stage is Stage.ENDED:
        ago = "" if since_ms is None else f" {span(since_ms)} ago"
        return f"ended{ago}: {where.status}{on}; `forebay results --request {where.id}` prints it"
    if where.stage is Stage.RUNNING:
        tokens = "" if where.output_tokens is None else f", {where.output_tokens} tokens so far"
        return f"running{on}{'' if since_ms is None else f' for {span(since_ms)}'}{tokens}"
    return f"{_STAGES[where.stage]}{on}"
