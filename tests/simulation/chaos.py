"""Seeded chaos over the whole path under virtual time.

    python tests/simulation/chaos.py --seeds 1000 --from 1 [--processes 2] [--verbose]     # make chaos-sim SEEDS=1000 FROM=1

Each seed is one run: dispatchers, workers, clients, and what goes wrong with them. The last line is one JSON object:
`{"from", "seeds", "accepted", "terminal", "lost", "duplicated", "violations"}`; `violations` is 0, or a list of seeds
and what broke. A seed is told as soon as it fails, and repeats exactly; with `--verbose` its events are printed.
"""

import argparse
import asyncio
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track
from simulation.checks import Findings
from simulation.processes import run_with_processes
from simulation.scenario import scenario
from simulation.world import World

FIGURES = ("accepted", "terminal", "lost", "duplicated")
CHUNK = 20  # seeds that one process takes at a time


def say(*words: object) -> None:
    """Print one line at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Trace:
    """What happened, in order: the digest of two runs of one seed is the same."""

    def __init__(self, loop_time, *, loud: bool) -> None:
        self._time, self._loud = loop_time, loud
        self.events: list[tuple[Any, ...]] = []

    def __call__(self, *event: Any) -> None:
        self.events.append((self._time(), *event))
        if self._loud:
            say(f"{self._time():9.4f}", *event)

    def digest(self) -> str:
        return hashlib.blake2b(repr(self.events).encode(), digest_size=16).hexdigest()


class Alarms(logging.Handler):
    """Hears what our own code says must never happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        cause = f" {record.exc_info[1]!r}" if record.exc_info else ""
        if cause or record.getMessage().startswith("offset_gone"):
            self.heard.append(record.getMessage() + cause)


def run_seed(seed: int, *, loud: bool = False) -> tuple[Findings, str]:
    """Run one seed; give what was found and the digest of its events."""
    alarms = Alarms()
    logging.getLogger("forebay").addHandler(alarms)

    async def main() -> tuple[Findings, str]:
        loop = asyncio.get_running_loop()
        trace = Trace(loop.time, loud=loud)
        loop.set_exception_handler(lambda _, told: alarms.heard.append(f"{told.get('message')} {told.get('exception')!r}"))
        try:
            findings = await World(scenario(seed), trace).run()
        except Exception as error:  # noqa: BLE001 - told with its seed, and the others go on
            findings = Findings(violations=[f"the run broke: {error!r}"])
        findings.violations += alarms.heard
        return findings, trace.digest()

    try:
        return run_with_processes(main())
    finally:
        logging.getLogger("forebay").removeHandler(alarms)


def run_seeds(first: int, count: int) -> list[tuple[int, Findings]]:
    """Run so many seeds in this process."""
    gc.disable()  # a run's cycles go together, after some runs
    found = [(seed, run_seed(seed)[0]) for seed in range(first, first + count)]
    gc.collect()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="Seeded chaos under virtual time.")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--from", type=int, default=1, dest="first")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.first < 0 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1, and --from not below 0")
    logging.getLogger("forebay").setLevel(logging.ERROR)
    totals, violations = dict.fromkeys(FIGURES, 0), []
    for seed, found in track(_everything(options), "seeds", options.seeds, console=Console(stderr=True), disable=_is_plain()):
        for name in FIGURES:
            totals[name] += getattr(found, name)
        if found.violations:
            violations.append({"seed": seed, "what": found.violations})
            say("\n    ".join([f"seed {seed}:", *found.violations]))
    say(json.dumps({"from": options.first, "seeds": options.seeds, **totals, "violations": violations or 0}))
    return 1 if violations else 0


def _everything(options: argparse.Namespace) -> Iterator[tuple[int, Findings]]:
    seeds = range(options.first, options.first + options.seeds)
    if options.verbose or options.processes == 1 or len(seeds) == 1:
        if options.verbose:
            _print_logs()
        for seed in seeds:
            found, digest = run_seed(seed, loud=options.verbose)
            if options.verbose:
                say(f"seed {seed} digest {digest}")
            yield seed, found
        return
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), _end_at_ctrl_c) as pool:
        jobs = [pool.submit(run_seeds, first, min(CHUNK, seeds.stop - first)) for first in range(seeds.start, seeds.stop, CHUNK)]
        try:
            for job in jobs:
                yield from job.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _end_at_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_plain() -> bool:
    return not sys.stderr.isatty()


def _print_logs() -> None:
    class Now(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return f"{asyncio.get_running_loop().time():9.4f} log {record.getMessage()}"

    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Now())
    logging.getLogger("forebay").addHandler(handler)
    logging.getLogger("forebay").setLevel(logging.INFO)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
