"""Delivery on Apache Kafka when processes stop: real workers and dispatchers, counted from raw records.

One group timing is used throughout, much shorter than the default, so that a round of failure takes seconds.
"""

import asyncio
import contextlib
import itertools
import re
import signal
import sys
import threading
import time

import pytest
from cells import Cell, until
from raw import UNCOMMITTED, Watch, request, tally

from broker.transport.errors import TransportError
from broker.transport.kafka import KafkaTransport
from deploy.local import ready
from dispatcher.service import DispatcherService
from engine_consumers.registry import load
from engine_consumers.worker import Worker
from memory_coordinator import StatusBoard
from tests.integration.stops_in_transaction import STOPS

STOPPING = (sys.executable, "-m", "tests.integration.stops_in_transaction")
QUICK = {"session_timeout_ms": 1_500, "heartbeat_ms": 300, "rebalance_timeout_ms": 1_000, "transaction_timeout_ms": 2_000}
PATIENT = {**QUICK, "session_timeout_ms": 10_000, "heartbeat_ms": 1_000}
CHECK_S = 1.0  # how often the broker looks for transactions that are over their time
UP_S, ANSWER_S = 60.0, 60.0
ROUNDS, EACH = 20, 16  # more than one worker takes in
_numbers = itertools.count()


@pytest.fixture
def make_cell(kafka, tmp_path):
    """Make a cell of its own on the shared broker, with two partitions for each worker to come."""
    with contextlib.ExitStack() as stack:
        yield lambda timing, options, **more: stack.enter_context(cell_on(kafka, tmp_path, timing, options, **more))


def cell_on(services, home, timing, options, slots=8, results=2):
    name = f"delivery-{next(_numbers)}-{time.time_ns() // 1_000_000}"
    return Cell(
        home / name,
        {
            "kafka": {"bootstrap": services.kafka, "topic_prefix": name, **timing},
            "redis": {"url": services.redis},
            "topics": {
                "request_partitions": 2,
                "engine_partitions": 4,
                "retry_partitions": 1,
                "lane_partitions": 1,
                "result_partitions": results,
            },
            "engines": {"sim": {"kind": "sim", "slots": slots, "options": options}},
        },
    )


@pytest.fixture(scope="module")
def long_run(kafka, tmp_path_factory):
    """A request of 90 s, begun before the module's other tests and asked for by its last; a member joins and leaves meanwhile."""
    cell = cell_on(
        kafka,
        tmp_path_factory.mktemp("long"),
        {"session_timeout_ms": 10_000, "max_poll_interval_ms": 20_000},
        {"ttft_ms": 0, "tpot_ms": 1_000},
    )
    with cell:
        cell.dispatcher("d")
        cell.worker("w0")
        ready.until(
            lambda: (found := cell.status("w0")) is not None and len(found.partitions) == 4, UP_S, "w0 to have all partitions"
        )
        cell.produce([request("long", max_output_tokens=91, stream=True)])
        timers = [threading.Timer(20, cell.worker, ["w1"]), threading.Timer(55, lambda: cell.stop("w1"))]
        for timer in timers:
            timer.start()
        yield cell
        for timer in timers:
            timer.cancel()
            timer.join()


def generations(log):
    """The assignments that a worker logged: generation and number of partitions."""
    found = re.findall(r"partitions_assigned group=\S+ generation=(\d+) partitions=(\S+)", log)
    return [(int(generation), 0 if named == "none" else named.count(",") + 1) for generation, named in found]


def are_all_once(results, idents, status="completed"):
    """Whether exactly these requests have exactly one result each, of that status; the difference otherwise."""
    assert tally(results) == dict.fromkeys(idents, 1)
    assert [one for one in results if one["status"] != status] == []
    return True


@pytest.mark.usefixtures("long_run")
def test_a_stopped_worker_wakes_when_its_partitions_have_moved_and_repeats_nothing(make_cell):
    cell = make_cell(QUICK, {"ttft_ms": 600, "tpot_ms": 30})
    cell.dispatcher("d")
    workers = ["w0", "w1"]
    for name in workers:
        cell.worker(name)

    def are_shared():
        """Half each, as the group says and as the workers have told the dispatcher."""
        owned, told = cell.members(), [cell.status(name) for name in workers]
        return all(len(owned.get(name, ())) == 2 for name in workers) and all(one and len(one.partitions) == 2 for one in told)

    ready.until(are_shared, UP_S, "both workers to have their share")
    idents = []
    for turn in range(ROUNDS):
        victim, other = workers[turn % 2], workers[(turn + 1) % 2]
        fresh = [f"z{turn:02d}-{n:02d}" for n in range(EACH)]
        cell.produce([request(ident, max_output_tokens=10 + n) for n, ident in enumerate(fresh)])
        idents += fresh
        ready.until(lambda who=victim: cell.running(who) > 0, ANSWER_S, f"{victim} to have work")
        cell.signal(victim, signal.SIGSTOP)
        ready.until(lambda who=other: len(cell.members().get(who, ())) == 4, UP_S, f"{victim}'s partitions to move")
        if turn % 4 >= 2:  # in half of the rounds it finds its work done by the other, else still open
            cell.answered(len(idents), ANSWER_S)
        cell.signal(victim, signal.SIGCONT)
        ready.until(are_shared, UP_S, f"{victim} to come back")
    cell.answered(len(idents), ANSWER_S)
    cell.stop()
    results = cell.results()
    assert are_all_once(results, idents)
    rerun = {one["request_id"][:3] for one in results if one["run_id"] != "000000.000000"}
    assert len(rerun) >= ROUNDS // 3, "the victims had no work: nothing was shown"
    assert all(cell.log_of(name).count("Fenced") >= ROUNDS // 4 for name in workers)


def test_a_sole_worker_that_wakes_fenced_goes_on(make_cell):
    """Its transaction timed out while it was stopped, and nobody took its partitions: that is no reason to give them up."""
    cell = make_cell(PATIENT, {"ttft_ms": 20, "tpot_ms": 5})
    idents = [f"f{n:02d}" for n in range(60)]
    cell.dispatcher("d")
    cell.worker("w", entry=(*STOPPING, cell.topics.results))
    cell.produce([request(ident) for ident in idents])
    ready.until(lambda: STOPS in cell.log_of("w"), UP_S, "the worker to stop")
    before = generations(cell.log_of("w"))
    hidden = {one["request_id"] for one in cell.results(UNCOMMITTED)}
    assert hidden
    aborted = cell.results()  # readable to its end only once the broker has ended the transaction
    assert hidden - {one["request_id"] for one in aborted}
    cell.signal("w", signal.SIGCONT)
    cell.answered(len(idents), ANSWER_S)
    cell.stop()
    assert are_all_once(cell.results(), idents)
    assert "Fenced" in cell.log_of("w")
    assert generations(cell.log_of("w")) == before


def test_a_dispatcher_stopped_in_mid_transaction_hides_results_only_until_the_transaction_times_out(make_cell):
    timing = {**PATIENT, "transaction_timeout_ms": 4_000}
    cell = make_cell(timing, {"ttft_ms": 0, "tpot_ms": 100}, slots=24, results=1)
    steady = [request(f"h{n:02d}", max_output_tokens=5 * n) for n in range(2, 26)]  # one ends every half second
    idents = [one["id"] for one in steady]
    cell.dispatcher("d", entry=(*STOPPING, cell.topics.results))
    cell.worker("w")
    cell.produce(steady)
    handed = cell.topics.engine("sim")  # all of it, before the dispatcher stops
    ready.until(lambda: len(cell.read(handed)) == len(idents), UP_S, "the worker to have all its work")
    refused = request("refused", model="nobody")  # the dispatcher itself answers it, in the results' one partition

    async def scenario():
        written, readable = Watch(cell.bootstrap, cell.topics.results, UNCOMMITTED), Watch(cell.bootstrap, cell.topics.results)
        watching = [asyncio.ensure_future(watch.run()) for watch in (written, readable)]
        try:
            await asyncio.to_thread(cell.produce, [refused])
            await until(lambda: STOPS in cell.log_of("d"), ANSWER_S)
            await until(lambda: readable.seen.keys() >= set(idents), ANSWER_S)
            return max(readable.seen[ident] - written.seen[ident] for ident in idents)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    hidden_s = asyncio.run(scenario())
    cell.signal("d", signal.SIGCONT)
    cell.answered(len(idents) + 1, ANSWER_S)
    cell.stop()
    results = cell.results()
    assert hidden_s > 1, "the stopped dispatcher hid nothing: nothing was shown"
    assert hidden_s < timing["transaction_timeout_ms"] / 1000 + CHECK_S + 3  # the broker's defaults make it up to 70 s
    assert tally(results) == dict.fromkeys([*idents, "refused"], 1)
    assert [one["request_id"] for one in results if one["status"] == "rejected"] == ["refused"]


class Lossy(KafkaTransport):
    """Every third commit fails: in turn before anything was sent, and after it was done."""

    def __init__(self, config):
        super().__init__(config)
        self.commits = 0
        self.failed = {"before": 0, "after": 0}

    def outbox(self, group, source, consumer):
        return LossyOutbox(super().outbox(group, source, consumer), self)


class LossyOutbox:
    """An outbox whose answers are lost."""

    def __init__(self, inner, transport):
        self._inner, self._transport = inner, transport

    async def open(self):
        await self._inner.open()

    async def commit(self, records, position):
        transport = self._transport
        transport.commits += 1
        turn = transport.commits % 6
        if turn == 3:
            self._fail("before")
        places = await self._inner.commit(records, position)
        if turn == 0:
            self._fail("after")
        return places

    async def close(self):
        await self._inner.close()

    def _fail(self, when):
        self._transport.failed[when] += 1
        message = f"the answer was lost {when} the commit"
        raise TransportError(message)


def test_a_commit_whose_answer_was_lost_is_neither_repeated_nor_dropped(make_cell):
    cell = make_cell(PATIENT, {"ttft_ms": 20, "tpot_ms": 5}, slots=16)
    config, idents = cell.config, [f"l{n:03d}" for n in range(300)]

    async def scenario():
        transport, board = Lossy(config.kafka), StatusBoard(config.redis, config.kafka.topic_prefix)
        services = [
            DispatcherService(config, transport, board, "d"),
            Worker(config, "sim", load(config.engines["sim"]), transport, board, "w"),
        ]
        tasks = [asyncio.ensure_future(service.run()) for service in services]
        watch = Watch(cell.bootstrap, cell.topics.results)
        watching = asyncio.ensure_future(watch.run())
        try:
            await asyncio.to_thread(cell.produce, [request(ident) for ident in idents])
            await until(lambda: len(watch.seen) == len(idents) or any(task.done() for task in tasks), ANSWER_S)
        finally:
            for service in services:
                service.stop()
            await asyncio.gather(*tasks)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await board.close()
            await transport.close()
        return transport.failed

    failed = asyncio.run(scenario())
    assert min(failed.values()) >= 5
    assert are_all_once(cell.results(), idents)


def test_a_request_of_ninety_seconds_runs_once_while_a_member_comes_and_goes(long_run):
    (result,) = long_run.answered(1, 150)
    assert (result["status"], result["run_id"], result["worker"]) == ("completed", "000000.000000", "w0")
    assert result["usage"]["output_tokens"] == 91
    assert result["timing"]["latency_ms"] - result["timing"]["ttft_ms"] > 85_000
    chunks = long_run.read(long_run.topics.streams, UNCOMMITTED)
    assert {dict(chunk.headers)["forebay-run-id"] for chunk in chunks} == {b"000000.000000"}
    shares = [number for _, number in generations(long_run.log_of("w0"))]
    assert shares[0] == 4
    assert 2 in shares, "nobody joined"
    assert shares[-1] == 4, "the other did not leave"
    assert len(generations(long_run.log_of("w1"))) >= 1
