"""Where a request is, asked at every stage of its way, under virtual time."""

import asyncio

import msgspec
from memory_stack import INTERACTIVE, TOPICS, config_of, on_stack

from broker import whereabouts
from deploy.cli.status import look
from deploy.cli.whereabouts import describe
from schemas.control import TenantSettings, change_of, encode_control
from schemas.questions import Stage, StateOf, Why

SLOW = {"ttft_ms": 1_000, "tpot_ms": 1_000}


def request(name, tenant="a", **more):
    return msgspec.json.encode({"id": name, "tenant": tenant, "prompt": "say", "max_output_tokens": 8, **more})


async def found(stack, name="r", tenant=None):
    """Everything that is found, with what is said about it."""
    said = await look(stack.config, stack.way("cli"), stack.asking, name, tenant)
    assert all(describe(one, stack.clock()) for one in said.found)
    return said


async def only(stack, name="r", tenant=None):
    """The one place where it is."""
    said = await found(stack, name, tenant)
    (one,) = said.found
    assert (one.id, one.tenant) == (name, tenant or "a")
    return one


def test_before_anybody_has_read_it():
    async def scenario(stack):
        await stack.produce([request("other"), request("r")])
        said = await found(stack)
        (one,) = said.found
        assert (one.stage, one.tenant, one.record[0]) == (Stage.UNREAD, "a", INTERACTIVE)
        assert said.notes == ["no active dispatcher has answered"]

    on_stack(scenario)


def test_while_it_waits_it_says_why_and_how_many_go_before_it():
    async def scenario(stack):
        stack.dispatcher()
        await stack.produce([request(f"before{n}") for n in range(5)])
        await asyncio.sleep(0.5)
        await stack.produce([request("r", deadline=stack.deadline(600)), request("x", "other")])
        await asyncio.sleep(1)
        one = await only(stack)
        assert (one.stage, one.why, one.engines) == (Stage.WAITING, Why.NO_ENGINE, {"sim": "has no worker"})
        assert one.received_at_ms <= stack.clock() - 1000
        assert one.deadline_ms > stack.clock() + 500_000
        assert one.ahead <= 1, "its deadline lets it go first of its tenant"
        assert (await only(stack, "before4")).ahead in {5, 6}
        assert (await only(stack, "x", "other")).ahead <= 1, "tenants take turns"

    on_stack(scenario)


def test_a_paused_tenants_request_says_so():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce([encode_control(change_of(TenantSettings, tenant="a", paused=True))], TOPICS.control)
        await asyncio.sleep(1)
        await stack.produce([request("r")])
        await asyncio.sleep(1)
        one = await only(stack)
        assert (one.stage, one.why, one.until_ms) == (Stage.WAITING, Why.TENANT_PAUSED, None)
        assert "forebay tenants set a --resume" in "\n".join(describe(one, stack.clock()))

    on_stack(scenario)


def test_on_a_worker_it_is_on_the_runway_or_runs_and_in_front_of_a_full_one_it_waits():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker("w1")
        await asyncio.sleep(1)
        await stack.produce([request("r0")])
        await asyncio.sleep(1)
        await stack.produce([request(f"r{n}") for n in range(1, 9)])
        await asyncio.sleep(3)
        stages = {f"r{n}": await only(stack, f"r{n}") for n in range(9)}
        running = stages["r0"]
        assert (running.stage, running.pool, running.worker) == (Stage.RUNNING, "sim", "w1")
        assert running.output_tokens > 0
        assert running.since_ms <= stack.clock() - 3000
        by_stage = {}
        for one in stages.values():
            by_stage.setdefault(one.stage, []).append(one)
        assert {stage: len(ones) for stage, ones in by_stage.items()} == {Stage.RUNNING: 2, Stage.RUNWAY: 1, Stage.WAITING: 6}
        (runway,) = by_stage[Stage.RUNWAY]
        assert (runway.why, runway.ahead) == (Why.SLOT, 0)
        assert {(one.why, one.engines["sim"]) for one in by_stage[Stage.WAITING]} == {(Why.ENGINES_FULL, "full")}
        assert sorted(one.ahead for one in by_stage[Stage.WAITING]) == list(range(6))

    on_stack(scenario, config_of(slots=2, **SLOW))


def test_between_the_dispatcher_and_the_worker_kafka_tells():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker("w1")
        await asyncio.sleep(2)
        stack.kill("w1")
        await stack.produce([request("r")])
        await asyncio.sleep(1)
        one = await only(stack)
        assert (one.stage, one.pool, one.tenant, one.ahead) == (Stage.SENT, "sim", "a", 0)

    on_stack(scenario)


def test_once_it_has_ended_its_result_tells_wherever_that_lies():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await stack.produce([request("r")])
        await stack.produce([request("r", "b")], headers=[("forebay-result-partition", (2).to_bytes(4, "big"))])
        await stack.results(2)
        one = await only(stack, "r", "b")
        assert (one.stage, one.status, one.pool, one.output_tokens) == (Stage.ENDED, "completed", "sim", 8)
        assert one.record[:2] == (TOPICS.results, 2)
        assert {one.tenant for one in (await found(stack)).found} == {"a", "b"}

    on_stack(scenario)


def test_a_look_that_ends_before_all_was_seen_says_so(monkeypatch):
    async def scenario(stack):
        monkeypatch.setattr(whereabouts, "RESULTS_MAX", 3)
        monkeypatch.setattr(whereabouts, "CHUNK", 2)
        stack.dispatcher()
        stack.worker()
        await stack.produce([request(f"o{n}") for n in range(20)])
        await stack.results(20)
        said = await found(stack)
        assert said.found == []
        assert any("results older than offset" in note for note in said.notes)
        stack.kill("w")
        monkeypatch.setattr(whereabouts, "UNFINISHED_MAX", 2)
        monkeypatch.setattr(whereabouts, "RESULTS_MAX", 1000)
        await stack.produce([request(f"p{n}") for n in range(20)])
        stack.kill("d")
        await asyncio.sleep(10)
        said = await found(stack, "gone")
        assert any("records from offset" in note for note in said.notes)

    on_stack(scenario)


def test_what_nobody_knows_is_not_found():
    async def scenario(stack):
        stack.dispatcher()
        stack.worker()
        await asyncio.sleep(2)
        said = await found(stack)
        assert (said.found, said.notes) == ([], [])

    on_stack(scenario)


def test_a_request_without_an_id_is_found_by_the_one_that_it_is_given():
    async def scenario(stack):
        await stack.produce([b'{"prompt":"a","tenant":"t"}'])
        stack.dispatcher()
        stack.worker()
        (result,) = await stack.results(1)
        assert (await only(stack, result.request_id, "t")).stage is Stage.ENDED
        for name in ("d", "w"):
            stack.kill(name)
        await stack.produce([b'{"prompt":"b","tenant":"t"}'])
        (record,) = [r for r in await stack.read(INTERACTIVE) if b'"b"' in r.value]
        name = whereabouts.ids.derived_id(*record[:3], record.timestamp_ms)
        assert (await only(stack, name, "t")).stage is Stage.UNREAD

    on_stack(scenario)


def test_the_active_dispatcher_alone_gives_its_state():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker()
        await asyncio.sleep(2)
        stack.dispatcher("d2")
        await asyncio.sleep(10)
        await stack.produce([request("r")])
        answers = await stack.asking.ask(StateOf(), 1.0)
        assert sorted((answer.name, answer.role) for answer in answers) == [
            ("d1", "dispatcher"),
            ("d2", "standby"),
            ("sim/w", "worker"),
        ]
        (state,) = [answer.state for answer in answers if answer.state]
        assert [worker.status.worker for worker in state.workers] == ["w"]
        assert list(state.config.engines) == ["sim"]

    on_stack(scenario)
