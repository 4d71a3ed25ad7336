"""Row 8, the simulator's own check: one scenario live with simulated models and in the simulator, shares compared."""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from aiokafka import AIOKafkaProducer
from live_cell import QUICK, LiveCell, Run
from msgspec.structs import replace
from raw import request

from deploy.local.services import Services, services
from deploy.simulate.arrivals import Arrivals
from deploy.simulate.job import Job
from deploy.simulate.runs import Runs
from deploy.simulate.scenario import Scenario, load_scenario, to_config

Line = Callable[..., dict[str, Any]]
Spread = Callable[..., dict[str, float]]
Shares = dict[str, float]  # tenant: of the tokens; engine: of the answers
SCENARIO = Path(__file__).with_name("agreement.toml")
GOAL = 0.05
MS_PER_S = 1000.0


def agreement(line: Line, spread: Spread, rounds: int) -> list[dict[str, Any]]:
    """The greatest difference of any tenant's or engine's share, over the simulated one."""
    differences, shown = [], {}
    with tempfile.TemporaryDirectory() as home, services(Path(home) / "services", "kafka") as running:
        for seed in range(1, rounds + 1):
            scenario = replace(load_scenario(SCENARIO), seed=seed)
            simulated, live = in_simulator(scenario), on_stack(scenario, running, Path(home) / f"cell{seed}")
            differences.append(max(abs(live.get(name, 0.0) - part) / part for name, part in simulated.items()))
            shown = {name: f"{live.get(name, 0.0):.3f}/{part:.3f}" for name, part in simulated.items()}
    metric = f"live and simulated shares, greatest difference; the last: {', '.join(f'{n} {v}' for n, v in shown.items())}"
    return [line(8, metric, spread(differences, 3), None, "0", None, f"<= {GOAL:.0%}", median(differences) <= GOAL)]


def in_simulator(scenario: Scenario) -> Shares:
    """Shares in the window, as the simulator has them."""
    measures = Runs(scenario, SCENARIO.parent).run("forebay").measures
    tokens = {name: figures.tokens for name, figures in measures.tenants.items()}
    return _parts(tokens) | _parts(measures.engines)


def on_stack(scenario: Scenario, running: Services, home: Path) -> Shares:
    """The same as the live stack has them: what ended between the warm-up and the last arrival."""
    with LiveCell(home, _tables(scenario, running, f"agree{time.time_ns() // 1_000_000}")) as cell:
        cell.start_all()
        jobs = list(Arrivals(scenario, None, 1.0, SCENARIO.parent))
        began_ms = asyncio.run(_produce(cell, jobs))
        cell.stop()
        runs = cell.runs()
    return _shares(runs, began_ms + scenario.warmup_s * MS_PER_S, began_ms + jobs[-1].at_ms)


def _shares(runs: Iterable[Run], from_ms: float, to_ms: float) -> Shares:
    tokens: Counter[str] = Counter()
    engines: Counter[str] = Counter()
    for run in runs:
        if from_ms <= run.ended_ms <= to_ms and run.result["status"] == "completed":
            tokens[run.tenant] += sum(run.result["usage"].values())
            engines[run.pool] += 1
    return _parts(tokens) | _parts(engines)


def _parts(counts: dict[str, int]) -> Shares:
    return {name: count / sum(counts.values()) for name, count in sorted(counts.items())}


def _tables(scenario: Scenario, running: Services, prefix: str) -> dict[str, Any]:
    """The scenario's configuration, and engines that behave as its profiles say."""
    raw: dict[str, Any] = _without_none(msgspec.to_builtins(to_config(scenario)))
    for name, engine in raw["engines"].items():
        tpot_ms = scenario.engines[name].profile.tpot_ms
        options = {"ttft_ms": tpot_ms, "prefill_tokens_per_s": 0, "tpot_ms": tpot_ms, "interference": 0}
        engine |= {"backend": "sim", "options": options}
    raw["kafka"] = {"bootstrap": running.kafka, "topic_prefix": prefix, **QUICK}
    raw["redis"] = {"url": running.redis}
    return raw


def _without_none(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {name: _without_none(value) for name, value in raw.items() if value is not None}
    return raw


async def _produce(cell: LiveCell, jobs: Iterable[Job]) -> float:
    """Write each request when it is due; gives when the first second began, in Unix milliseconds."""
    producer = AIOKafkaProducer(bootstrap_servers=cell.bootstrap, acks="all", enable_idempotence=True)
    await producer.start()
    began_s, began_ms = time.monotonic(), time.time() * MS_PER_S
    sent = []
    try:
        for job in jobs:
            await asyncio.sleep(max(0.0, began_s + job.at_ms / MS_PER_S - time.monotonic()))
            topic = cell.topics.requests(job.ask.service_class)
            sent.append(await producer.send(topic, json.dumps(_request(job)).encode()))
        await asyncio.gather(*sent)
    finally:
        await producer.stop()
    return began_ms


def _request(job: Job) -> dict[str, Any]:
    ask = job.ask
    named = {"tenant": ask.tenant, "model": ask.model, "routing_hint": ask.hint, "fallback": ask.fallback}
    prompt = "word" * job.input_tokens
    return request(f"r{job.number}", prompt=prompt, **named, max_output_tokens=job.output_tokens)
