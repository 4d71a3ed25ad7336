"""Real chaos: Apache Kafka, Valkey, two dispatchers, three workers of the `sim` engine, and faults drawn from a seed.

    python tests/chaos/run.py --seed 7 [--requests 5000] [--faults 30]

Processes are killed, stopped and restarted, the broker and Redis too, while requests come in at a steady rate; what
dies is started again a second later. Then all is made whole, and once everything is answered or the patience is over,
the raw read_committed records are counted against the producer's acknowledgements, without our client. The last line
is one JSON object; `count.py` says what its figures mean. Exit code 0 only when every accepted request is completed
and none is answered twice; 1 otherwise, and then the folder with the logs is named; 2 where it could not run.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

import click
from cells import Cell, until
from count import Outcome, count, recoveries, table
from faults import Actors, Faults
from load import Load
from plan import DISPATCHERS, WORKERS, plan
from raw import Watch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.local.errors import LocalStackError
from deploy.local.services import Services, services

UP_S = 90.0
PATIENCE_S = 180.0  # from the last fault healed until everything must be answered
LOOK_S = 0.2
NAMED_MAX = 10
CELL: dict[str, Any] = {
    "topics": {"request_partitions": 4, "engine_partitions": 6, "retry_partitions": 2, "lane_partitions": 2},
    "engines": {"sim": {"kind": "sim", "slots": 16, "options": {"ttft_ms": 50, "tpot_ms": 15}}},
}


class Show:
    """Where the run stands: a bar on a terminal, a line for each fault elsewhere."""

    def __init__(self, wanted: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks = {name: self._bars.add_task(name, total=wanted) for name in ("accepted", "answered")}

    def say(self, text: str) -> None:
        self._bars.console.print(text)

    def update(self, **done: int) -> None:
        for name, number in done.items():
            self._bars.update(self._tasks[name], completed=number)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


class Run:
    """One run, from the first start to the last record read."""

    def __init__(self, given: argparse.Namespace, cell: Cell, parts: Services, show: Show) -> None:
        self._given, self._cell, self._show = given, cell, show
        topics = cell.topics
        requests = {"interactive": topics.requests("interactive"), "batch": topics.requests("batch")}
        self.load = Load(parts.kafka, requests, given.requests, given.seconds, given.seed)
        self.watch = Watch(parts.kafka, topics.results)
        self.handed = Watch(parts.kafka, topics.engine("sim"))
        self._actors = Actors(cell, bare=given.bare)
        self.faults = Faults(plan(given.seed, given.faults, given.seconds), cell, self._actors, parts, show.say)

    async def run(self) -> Outcome:
        """Start everything, let the faults come, wait for the answers, stop everything in good order, and count."""
        parts = (self._actors.run(), self.watch.run(), self.handed.run(), self._update())
        background = [asyncio.ensure_future(part) for part in parts]
        try:
            await self._until_up()
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                group.create_task(self.load.run())
                group.create_task(self.faults.run(began))
            self._show.say(f"all is whole again; waiting for {len(self._missing())} answers")
            with contextlib.suppress(TimeoutError):
                await until(lambda: not self._missing() or any(task.done() for task in background), PATIENCE_S)
            for task in background:
                if task.done():
                    task.result()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        await asyncio.to_thread(self._cell.stop)  # what was still on its way is in Kafka now
        results = await asyncio.to_thread(self._cell.results)
        dead = await asyncio.to_thread(self._cell.dead_letters)
        return count(self.load.accepted, self.load.uncertain, results, len(dead))

    async def _until_up(self) -> None:
        """Wait until a dispatcher and every worker serve."""
        log_of = self._cell.log_of

        def is_up() -> bool:
            working = all("taken_over" in log_of(f"worker-{n}") for n in range(WORKERS))
            return working and any("taken_over" in log_of(f"dispatcher-{n}") for n in range(DISPATCHERS))

        await until(is_up, UP_S)

    async def _update(self) -> None:
        while True:
            self._show.update(accepted=len(self.load.accepted), answered=len(self.watch.seen))
            await asyncio.sleep(LOOK_S)

    def _missing(self) -> set[str]:
        return self.load.accepted.keys() - self.watch.seen.keys()


def report(run: Run, outcome: Outcome, seed: int) -> dict[str, Any]:
    """Print the table; give the last line."""
    console = Console(width=120, highlight=False)
    struck = run.faults.struck
    recovered = recoveries(struck, run.handed.seen, run.watch.seen)
    console.print(table(struck, recovered))
    counts = {
        "accepted": outcome.accepted,
        "completed": outcome.completed,
        "lost": len(outcome.lost),
        "duplicated": len(outcome.duplicated),
        "dead letters": outcome.dead_lettered,
        "never acknowledged": outcome.uncertain,
        "strangers": len(outcome.strangers),
    }
    console.print(", ".join(f"{name} {number}" for name, number in counts.items()))
    for name, idents in (("lost", outcome.lost), ("duplicated", outcome.duplicated), ("stranger", outcome.strangers)):
        for ident in idents[:NAMED_MAX]:
            console.print(f"{name}: {ident}")
    for ident, why in list(outcome.not_completed.items())[:NAMED_MAX]:
        console.print(f"not completed: {ident} {why}", markup=False)
    times = [whole for _, whole, _ in recovered]
    return {
        "seed": seed,
        "accepted": outcome.accepted,
        "completed": outcome.completed,
        "lost": len(outcome.lost),
        "duplicated": len(outcome.duplicated),
        "dead_lettered": outcome.dead_lettered,
        "runs": outcome.runs,
        "kills": run.faults.kills,
        "recovery_s_p50": round(median(times), 2) if times else None,
        "recovery_s_max": round(max(times), 2) if times else None,
    }


def main() -> int:
    """Run one seed; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="what the faults and the requests are drawn from [1]")
    parser.add_argument("--requests", type=int, default=5_000, help="how many must be acknowledged [5000]")
    parser.add_argument("--faults", type=int, default=30, help="how many strike [30]")
    parser.add_argument("--seconds", type=float, default=150.0, help="time that both are spread over [150]")
    parser.add_argument("--bare", action="store_true", help="five bare loops that consume, produce and commit, instead of ours")
    parser.add_argument("--keep", action="store_true", help="keep logs and data also where all went well")
    given = parser.parse_args()
    if given.requests < 1 or given.faults < 0 or given.seconds <= 0:
        parser.error("--requests and --seconds must be above 0, and --faults not below")
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # that the broker is away is no news here
    home = Path(tempfile.mkdtemp(prefix="forebay-chaos-"))
    is_good = False
    try:
        with Show(given.requests) as show, services(home / "services", "kafka") as parts:
            raw = {"kafka": {"bootstrap": parts.kafka}, "redis": {"url": parts.redis}, **CELL}
            with Cell(home / "cell", raw) as cell:
                run = Run(given, cell, parts, show)
                outcome = asyncio.run(run.run())
        last = report(run, outcome, given.seed)
        is_good = outcome.is_good
    except (LocalStackError, TimeoutError) as error:
        click.echo(f"chaos could not run: {error or 'it was not up in time'}", err=True)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if is_good and not given.keep:
            shutil.rmtree(home, ignore_errors=True)
        else:  # also where it was interrupted
            click.echo(f"logs: {home}/cell/logs and {home}/services/logs")
    click.echo(json.dumps(last))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
