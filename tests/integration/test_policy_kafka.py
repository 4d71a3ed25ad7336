"""The dispatcher's policy on Apache Kafka: three kinds of simulated engines, each a process, and what their topics tell.

A run's length is set by the engine's profile, so that everything can be told in runs, whatever else this machine does.
"""

import contextlib
import itertools
import signal
import time

import pytest
from live_cell import KINDS, LiveCell, most_at_once, share, tables, utilisation
from raw import request, tally

from deploy.local import ready

ANSWER_S = 120.0
BACKLOG, MINE = 5_000, 600
_numbers = itertools.count()


@pytest.fixture
def make_cell(kafka, tmp_path):
    """Make a cell of its own on the shared broker, everything in it running."""

    def make(run_ms, **more):
        name = f"policy-{next(_numbers)}-{time.time_ns() // 1_000_000}"
        cell = stack.enter_context(LiveCell(tmp_path / name, tables(kafka, name, run_ms, **more)))
        cell.start_all()
        return cell

    with contextlib.ExitStack() as stack:
        yield make


def many(count, tenant, **fields):
    return [request(f"{tenant}-{n:05d}", tenant=tenant, max_output_tokens=1, **fields) for n in range(count)]


def per_token(tpot_ms):
    """An engine's settings where the answer's length decides how long a run takes."""
    profile = {"ttft_ms": 0.0, "prefill_ms_per_1k": 0.0, "prefill_quadratic_ms": 0.0, "tpot_ms": float(tpot_ms)}
    return {"options": {"tpot_ms": tpot_ms}, "profile": profile}


def now_ms():
    return time.time() * 1000


@pytest.mark.parametrize(
    ("tenants", "least_share", "least_per_s"),
    [
        ({"mine": {"weight": 2.0}, "aggressor": {"weight": 1.0}}, 2 / 3, 0.0),
        ({"mine": {"requests_per_s": 45.0}}, 0.0, 45.0),
    ],
    ids=["by_weight", "by_rate"],
)
def test_a_backlog_before_it_in_the_partition_takes_nothing_of_a_tenants_share(make_cell, tenants, least_share, least_per_s):
    run_ms, slots = 1_000, 24
    cell = make_cell(run_ms, slots=slots, tenants=tenants)
    cell.produce(many(BACKLOG, "aggressor"), cell.interactive)
    cell.produce(many(MINE, "mine"), cell.interactive)
    with cell.watching() as watch:
        ready.until(lambda: sum(ident.startswith("mine") for ident in list(watch.seen)) == MINE, ANSWER_S, "the tenant's results")
    ended_ms = now_ms()
    ready.until(lambda: now_ms() > ended_ms + 8 * run_ms, ANSWER_S, "some time with the aggressor alone")
    cell.stop()
    runs = cell.runs()
    mine = [run for run in runs if run.tenant == "mine"]
    from_ms, to_ms = min(run.began_ms for run in mine) + 2 * run_ms, max(run.sent_ms for run in mine)
    assert to_ms - from_ms > 5 * run_ms, "it was over too soon: nothing was shown"
    assert share(runs, "mine", from_ms, to_ms) >= 0.99 * least_share
    assert sum(from_ms <= run.began_ms < to_ms for run in mine) >= 0.99 * least_per_s * (to_ms - from_ms) / 1000
    assert utilisation(runs, 3 * slots, from_ms, to_ms) >= 0.9
    alone_ms = ended_ms + run_ms
    assert share(runs, "aggressor", alone_ms, alone_ms + 5 * run_ms) == 1.0
    assert utilisation(runs, 3 * slots, alone_ms, alone_ms + 5 * run_ms) >= 0.95, "what was left over was not borrowed"


@pytest.mark.parametrize("service_class", ["interactive", "batch"])
def test_a_single_interactive_request_behind_a_backlog_is_answered_within_two_runs(make_cell, service_class):
    tokens, tpot_ms = 100, 20
    cell = make_cell(0, slots=8, engines=dict.fromkeys(KINDS, per_token(tpot_ms)))
    lengths = itertools.cycle(range(tokens // 2, tokens * 3 // 2))  # so that runs do not end all at once
    backlog = [{**one, "max_output_tokens": next(lengths)} for one in many(BACKLOG, "aggressor")]
    cell.produce(backlog, cell.topics.requests(service_class))
    ready.until(lambda: cell.length(cell.topics.lanes) > 0.9 * BACKLOG, ANSWER_S, "the backlog to be in a lane")
    for turn in range(3):
        result = cell.ask(cell.interactive, ANSWER_S, f"single{turn}", tenant="single", max_output_tokens=tokens)
        assert result["timing"]["latency_ms"] <= 2 * tokens * tpot_ms
    assert len(cell.results()) < BACKLOG / 2, "the backlog was over: nothing was shown"


def test_interactive_does_not_wait_for_batch_that_runs(make_cell):
    slots, tpot_ms, long_tokens = 4, 50, 100
    cell = make_cell(0, slots=slots, engines=dict.fromkeys(KINDS, per_token(tpot_ms)))
    cell.produce([{**one, "max_output_tokens": long_tokens} for one in many(100, "batch")], cell.batch)
    ready.until(lambda: all(cell.running(name) == slots - 1 for name in KINDS), ANSWER_S, "batch to have all it may have")
    status = cell.status("moe")
    assert (status.interactive_slots, status.batch_load >= slots - 1) == (1, True)
    result = cell.ask(cell.interactive, ANSWER_S, "now", tenant="single", max_output_tokens=10)
    assert result["timing"]["queued_ms"] < 0.2 * long_tokens * tpot_ms
    assert result["timing"]["latency_ms"] < 0.4 * long_tokens * tpot_ms


def test_a_dead_engines_traffic_is_on_the_others_and_comes_back_slowly(make_cell):
    run_ms, slots, stale_ms, dead = 500, 8, 1_000, "moe"
    cell = make_cell(
        run_ms,
        slots=slots,
        worker={"heartbeat_ms": 300},
        dispatcher={"status_stale_ms": stale_ms, "status_poll_ms": 200, "failover_timeout_ms": 2_000},
    )
    cell.produce(many(BACKLOG, "tenant"), cell.interactive)
    ready.until(lambda: all(cell.status(name).completed for name in KINDS), ANSWER_S, "all engines to have answered")
    cell.signal(dead, signal.SIGKILL)
    killed_ms = now_ms()
    ready.until(lambda: f"rescue_ends pool={dead}" in cell.log_of("dispatcher"), ANSWER_S, "the rescue")
    rescued_ms = now_ms()
    cell.processes[dead].stop()
    cell.worker(dead, dead)
    ready.until(lambda: cell.is_serving(dead), ANSWER_S, "it to come back")
    ready.until(lambda: cell.status(dead).completed > 5 * slots, ANSWER_S, "its answers")
    cell.stop()
    runs, sent = cell.runs(), {name: cell.sent(name) for name in KINDS}
    before = [ident for ident, at_ms in sent[dead] if at_ms < killed_ms]
    after = [at_ms for _, at_ms in sent[dead] if at_ms > rescued_ms]
    left_ms = killed_ms + stale_ms + 2_000
    assert before
    assert left_ms < rescued_ms
    assert [at_ms for _, at_ms in sent[dead] if left_ms < at_ms < rescued_ms] == []
    others = [run for run in runs if run.pool != dead]
    assert utilisation(others, 2 * slots, left_ms, rescued_ms) >= 0.9, "the others idled"
    results = tally(cell.results())
    assert [ident for ident in before if results[ident] != 1] == [], "what it had was not answered once by others"
    back = [run for run in runs if run.pool == dead and run.began_ms > rescued_ms]
    first_ms = min(run.ended_ms for run in back)
    assert sum(at_ms < first_ms for at_ms in after) <= 2, "a herd came before it had shown that it works"
    assert most_at_once(after, [run.ended_ms for run in back]) <= 1.5 * slots
    assert most_at_once(after, [run.ended_ms for run in back]) > slots / 2, "it was not given its part again"


def placement(result):
    """Where a request went, and why."""
    attempt = result["route"][-1]
    assert (result["status"], attempt["outcome"]) == ("completed", "completed")
    assert attempt["engine"] == result["engine"]
    return result["engine"], {"reason": "only", **attempt["placement"]}  # its default is not written


def test_requests_go_where_the_policy_says_and_their_results_say_why(make_cell):
    contexts = {"transformer": 32_768, "ssm": 131_072, "moe": 16_384}
    cell = make_cell(100, engines={name: {"options": {"max_context": tokens}} for name, tokens in contexts.items()})

    def ask(ident, **fields):
        return placement(cell.ask(cell.interactive, ANSWER_S, ident, max_output_tokens=4, **fields))

    for kind in KINDS:
        engine, why = ask(f"hint-{kind}", routing_hint=kind)
        assert (engine, why["reason"], why.get("wanted")) == (kind, "hint", None)
        assert why["predicted_ms"] >= why["predicted_ttft_ms"] > 0
    long = {"input_tokens": [7] * 40_000, "prompt": None}
    engine, why = ask("long", **long)
    assert engine == "ssm"
    assert why["reason"] in {"long_context", "only"}  # nobody else has the context
    engine, why = ask("longer-than-a-hint-allows", routing_hint="moe", **long)
    assert (engine, why["wanted"], why["why_not"]) == ("ssm", "moe", "context")
    engine, why = ask("quick", slo_latency_ms=50)
    assert (engine, why["reason"]) == ("moe", "low_latency")
    engine, why = ask("any")
    assert why["reason"] == "least_cost"
    engine, why = ask("named", model="transformer-model", fallback="none")
    assert (engine, why["reason"]) == ("transformer", "only")
    cell.stop("moe")
    ready.until(lambda: cell.status("moe") is None, ANSWER_S, "the engine to be gone")
    engine, why = ask("quick-elsewhere", slo_latency_ms=50)
    assert (engine != "moe", why["wanted"]) == (True, "moe")
    assert why["why_not"]
    engine, why = ask("stand-in", model="moe-model")
    assert (engine, why["stands_in"]) == ("transformer", True)
