"""Workers that die, engines that die and hang, and requests that take their worker down."""

import asyncio
import contextlib
from collections import Counter

import pytest
from memory_stack import TOPICS, config_of, on_stack, prompts

from engine_consumers import sim
from engine_consumers.errors import EngineError
from schemas import codecs
from schemas.errors import ErrorCode


def request(name, prompt="say", **fields):
    more = "".join(f',"{key}":{value}' for key, value in fields.items())
    return b'{"id":"%s","prompt":"%s","max_output_tokens":8%s}' % (name.encode(), prompt.encode(), more.encode())


class Supervised:
    """Keeps workers up: one that died is followed by another after a moment, as a supervisor does."""

    def __init__(self, stack, count):
        self.stack, self.count, self.started, self.deaths = stack, count, 0, []

    async def run(self):
        while True:
            for slot in range(self.count):
                if not any(name.startswith(f"w{slot}-") for name in self.stack.tasks):
                    self.start(slot)
            await asyncio.sleep(0.5)
            for name in [n for n, task in self.stack.tasks.items() if n.startswith("w") and task.done()]:
                del self.stack.tasks[name]

    def start(self, slot):
        self.started += 1
        name = f"w{slot}-{self.started}"
        self.stack.worker(name)._engine._kill = lambda: self.kill(name)

    def kill(self, name):
        if name in self.stack.tasks:  # else it is dead already, and only its tasks have not heard of it
            self.deaths.append(name)
            self.stack.kill(name)


def test_a_request_that_kills_workers_is_found_and_ends_alone():
    async def scenario(stack):
        supervised = Supervised(stack, 2)
        stack.tasks["supervisor"] = asyncio.ensure_future(supervised.run())
        stack.dispatcher("d1")
        await stack.produce([*prompts(60), request("bad", "please DIE now"), *[request(f"s{n}") for n in range(60)]])
        return await stack.results(121), supervised.deaths, await stack.read(TOPICS.dead_letters)

    results, deaths, dead = on_stack(scenario, config_of(kill_on="DIE"))
    status = {r.request_id: r.status for r in results}
    assert len(results) == len(status) == 121
    assert [name for name, s in status.items() if s != "completed"] == ["bad"]
    (bad,) = [r for r in results if r.request_id == "bad"]
    assert bad.error.code == "poison"
    assert "4 times" in bad.error.message
    assert len(deaths) == 4
    assert [d.value for d in dead] == [request("bad", "please DIE now")]


def test_workers_that_leave_in_good_order_make_nobody_a_suspect():
    async def scenario(stack):
        stack.dispatcher("d1")
        running = stack.worker("w0")
        await stack.produce([request("long", max_output_tokens=4_000)])
        for n in range(1, 6):
            await asyncio.sleep(2)
            running.stop()
            await stack.tasks.pop(f"w{n - 1}")
            running = stack.worker(f"w{n}")
        return await stack.results(1)

    (result,) = on_stack(scenario, config_of(worker={"drain_ms": 200}, kill_on="DIE", tpot_ms=5))
    assert result.status == "completed"
    assert result.run_id == "000000.000005"


def test_an_engine_that_starts_again_and_again_costs_no_request():
    async def scenario(stack):
        stack.dispatcher("d1")
        count = 0
        until = asyncio.get_running_loop().time() + 60
        await stack.produce(prompts(1_000))
        while asyncio.get_running_loop().time() < until:
            count += 1
            worker = stack.worker(f"w{count}")
            await asyncio.sleep(2)
            worker._engine.kill()
            await stack.tasks.pop(f"w{count}")
            assert worker.engine_died
        stack.worker("last")
        return await stack.results(1_000), await stack.read(TOPICS.dead_letters)

    results, dead = on_stack(scenario, config_of(tpot_ms=40))
    assert Counter(r.status for r in results) == {"completed": 1_000}
    assert len({r.request_id for r in results}) == 1_000
    assert dead == []


def test_a_run_without_progress_is_tried_again_and_then_given_up():
    async def scenario(stack):
        stack.dispatcher("d1")
        worker = stack.worker("w1")
        await stack.produce([request("stuck", "HANG here"), *prompts(20)])
        results = await stack.results(21)
        return results, worker.status().running, worker.engine_died

    results, running, died = on_stack(scenario, config_of(worker={"stall_timeout_ms": 2_000}, hang_on="HANG"))
    by_id = {r.request_id: r for r in results}
    assert Counter(r.status for r in results) == {"completed": 20, "failed": 1}
    assert by_id["stuck"].error.code == "timeout"
    assert "stall_timeout_ms" in by_id["stuck"].error.message
    assert len(by_id["stuck"].route) == 3
    assert running == 0
    assert not died


def test_a_long_run_that_makes_progress_is_not_stalled():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([request("slow", max_output_tokens=100)])
        return await stack.results(1, 400.0)

    (result,) = on_stack(scenario, config_of(worker={"stall_timeout_ms": 2_000}, tpot_ms=1_900))
    assert result.status == "completed"
    assert result.run_id == "000000.000000"


def test_an_engine_that_does_not_let_go_hands_its_requests_to_another(monkeypatch):
    is_over = False

    async def stubborn(*_):
        while not is_over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    async def scenario(stack):
        stack.dispatcher("d1")
        with monkeypatch.context() as patch:
            patch.setattr(sim.SimEngine, "_sleep", stubborn)
            hung = stack.worker("w1")
            await stack.produce(prompts(3))
            await asyncio.sleep(8)
            assert hung.engine_died
        stack.worker("w2")
        results = await stack.results(3)
        nonlocal is_over
        is_over = True
        return results

    options = {"stall_timeout_ms": 2_000, "abort_timeout_ms": 1_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine_consumers.worker.CLOSE_S", 0.1)
        results = on_stack(scenario, config_of(worker=options))
    assert Counter(r.status for r in results) == {"completed": 3}


def test_a_deadline_ends_a_run_and_what_waits():
    async def scenario(stack):
        stack.dispatcher("d1")
        worker = stack.worker("w1")
        at = stack.deadline(2.0)
        await stack.produce([request(f"r{n}", max_output_tokens=2_000, deadline=f'"{at}"') for n in range(6)])
        results = await stack.results(6)
        return results, worker.status().running, asyncio.get_running_loop().time()

    served = {"admission": {"deadline": "serve"}}  # also what is predicted to come too late
    results, running, now = on_stack(scenario, config_of(dispatcher=served))
    assert Counter(r.status for r in results) == {"expired": 6}
    assert running == 0
    assert now < 6
    shown = [r for r in results if r.output_tokens]
    assert len(shown) == 4  # what ran until then is given
    assert all(r.finish_reason == "abort" and r.usage.output_tokens == len(r.output_tokens) for r in shown)
    assert all(r.usage.input_tokens == 1 for r in shown)


@pytest.mark.parametrize("clean", [True, False])
def test_a_killed_run_streams_again_under_a_later_name(clean):
    async def scenario(stack):
        stack.dispatcher("d1")
        worker = stack.worker("w1")
        await stack.produce([b'{"id":"s","prompt":"a","stream":true,"max_output_tokens":400}'])
        await asyncio.sleep(1.5)
        if clean:
            worker.stop()
            await stack.tasks.pop("w1")
        else:
            stack.ways["w1"].kill()
            stack.tasks.pop("w1").cancel()
        stack.worker("w2")
        (result,) = await stack.results(1)
        return result, [codecs.decode_chunk(r.value) for r in await stack.read(TOPICS.streams)]

    result, chunks = on_stack(scenario, config_of(worker={"drain_ms": 100}))
    runs = sorted({c.run_id for c in chunks})
    assert runs == ["000000.000000", "000000.000001"]
    assert result.run_id == runs[1]
    text = {run: "".join(c.text for c in chunks if c.run_id == run) for run in runs}
    assert text[runs[1]] == result.output_text
    assert text[runs[1]].startswith(text[runs[0]])


def test_a_run_of_twenty_minutes_survives_three_rebalances_as_it_is():
    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([request("long", max_output_tokens=1_200)])
        for n in range(3):
            await asyncio.sleep(200)
            stack.worker(f"more{n}")
            await asyncio.sleep(100)
            if n:
                stack.ways[f"more{n}"].kill()
                stack.tasks.pop(f"more{n}").cancel()
        (result,) = await stack.results(1, 2_000)
        return result, asyncio.get_running_loop().time(), stack.cluster.group("forebay.engine.sim").generation

    result, now, generation = on_stack(scenario, config_of(tpot_ms=1_000))
    assert result.status == "completed"
    assert result.run_id == "000000.000000"
    assert result.worker == "w1"
    assert now > 1_200
    assert generation >= 4


def test_a_run_kept_over_a_pause_gives_way_to_one_that_began_elsewhere_meanwhile():
    """Else the result would name a run that readers have left for a later one."""

    async def scenario(stack):
        stack.dispatcher("d1")
        stack.worker("w1")
        await stack.produce([b'{"id":"s","prompt":"a","stream":true,"max_output_tokens":4000}'])
        await asyncio.sleep(2)
        stack.ways["w1"].freeze()
        stack.cluster.hook = stack.hold("w1")
        stack.worker("w2")
        await asyncio.sleep(12)  # its session is over, and the other has begun anew
        stack.ways["w2"].kill()
        stack.tasks.pop("w2").cancel()
        stack.release()
        stack.ways["w1"].thaw()
        (result,) = await stack.results(1)
        return result, [codecs.decode_chunk(r.value) for r in await stack.read(TOPICS.streams)]

    result, chunks = on_stack(scenario, config_of(tpot_ms=10))
    runs = sorted({c.run_id for c in chunks})
    assert len(runs) >= 2
    assert result.run_id == runs[-1]
    assert result.worker == "w1"


def test_what_a_worker_has_read_is_in_its_figures_at_every_moment_also_while_it_is_being_claimed():
    """Else the dispatcher sends it as much again."""
    seen = []

    async def scenario(stack):
        async def hook(step):
            if step.process == "w1":
                status = worker.status()
                seen.append((sum(status.positions.values()), status.running + status.queue_depth))

        worker = stack.worker("w1")
        stack.cluster.hook = hook
        stack.dispatcher("d1")
        await stack.produce([request(f"r{n}", max_output_tokens=4_000) for n in range(30)])  # none ends meanwhile
        await asyncio.sleep(3)
        return sum(log.end for log in stack.cluster.topics["forebay.engine.sim"].logs)

    on_stack(scenario)
    assert max(taken_in for taken_in, _ in seen) == 6
    assert [pair for pair in seen if pair[0] > pair[1]] == []


def test_a_run_that_the_engine_ends_unasked_is_run_again_and_its_beginning_is_no_answer():
    async def scenario(stack):
        stack.dispatcher("d1")
        worker = stack.worker("w1")
        await stack.produce([request("r", max_output_tokens=200)])
        await asyncio.sleep(5)
        ((name, _),) = worker._engine._runs.items()
        await worker._engine.abort(name)  # as one whose processes are told to stop ends its runs
        return await stack.results(1)

    (result,) = on_stack(scenario, config_of(tpot_ms=100))
    assert (result.status, result.finish_reason, len(result.output_tokens)) == ("completed", "length", 200)
    assert [one.outcome for one in result.route] == ["retried", "completed"]
    assert result.usage.input_tokens == 1


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_a_worker_whose_engine_does_not_come_up_lets_go_of_it(how):
    async def scenario(stack):
        worker = stack.worker("w1")
        closed, close = [], worker._engine.close
        fails = EngineError(ErrorCode.UNHEALTHY, "there is no device")

        async def counted_close():
            closed.append(asyncio.get_running_loop().time())
            await close()

        async def fail():
            await asyncio.sleep(1)
            raise fails

        worker._engine.close = counted_close
        if how == "failed":
            worker._engine.start = fail
        await asyncio.sleep(0.5)
        worker.stop() if how == "stopped" else None
        (ended,) = await asyncio.gather(stack.tasks.pop("w1"), return_exceptions=True)
        return closed, ended, fails

    closed, ended, fails = on_stack(scenario, config_of(start_ms=3_600_000))
    assert len(closed) == 1
    assert closed[0] < 10  # and not when the model would have been loaded
    assert ended is (fails if how == "failed" else None)
