"""What came of a chaos run: raw records against acknowledgements, and the table of it.

*Recovery* of a fault on a dispatcher, a worker or the broker is the time from the fault until both are so: every request
that was with an engine at that moment (on its topic or running) can be read as answered, and so can one that came to an
engine only afterwards. It holds the runs themselves and whatever else struck meanwhile; it leaves out the wait of the
backlog behind, which tells of capacity. *Flow* is the time from the fault until any result can be read again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from msgspec import Struct
from plan import Fault
from rich.table import Table

COUNTED = ("dispatcher", "worker", "broker")  # Redis is advice: nothing has to recover from its loss


class Outcome(Struct):
    """The counts of a run.

    Attributes:
        completed: Accepted requests that have a completed result.
        lost: Accepted requests without any terminal result.
        duplicated: Terminal results beyond the first of their request.
        dead_lettered: Records in the topic of dead letters.
        runs: How often an engine was handed one of the answered requests: hops and takeovers as the winning run's id
            tells them, and the winning run itself. What was taken over before it had a slot counts too.
        uncertain: Requests whose acknowledgement never came, though they may have arrived.
        strangers: Results of requests that were never produced.
    """

    accepted: int
    completed: int
    lost: list[str]
    duplicated: list[str]
    not_completed: dict[str, str]
    dead_lettered: int
    runs: int
    uncertain: int
    strangers: list[str]

    @property
    def is_good(self) -> bool:
        """Whether every accepted request is completed, and nothing was answered twice."""
        whole = self.completed == self.accepted and not self.lost and not self.not_completed
        return whole and not self.duplicated and not self.strangers


def count(accepted: Iterable[str], uncertain: set[str], results: list[dict[str, Any]], dead_lettered: int) -> Outcome:
    """Compare what was acknowledged with what lies in the results."""
    known = set(accepted)
    by_id: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_id[result["request_id"]].append(result)
    first = {ident: found[0] for ident, found in by_id.items()}
    not_completed = {i: _why(first[i]) for i in sorted(known & set(first)) if first[i]["status"] != "completed"}
    answered = known & set(first)
    return Outcome(
        accepted=len(known),
        completed=len(answered) - len(not_completed),
        lost=sorted(known - set(first)),
        duplicated=sorted(ident for ident, found in by_id.items() for _ in found[1:]),
        not_completed=not_completed,
        dead_lettered=dead_lettered,
        runs=sum(_runs(first[ident]) for ident in answered),
        uncertain=len(uncertain),
        strangers=sorted(set(first) - known - uncertain),
    )


def recoveries(
    struck: list[tuple[float, Fault, str]], handed: Mapping[str, float], seen: Mapping[str, float]
) -> list[tuple[Fault, float, float]]:
    """Give recovery and flow in seconds of each fault after which anything was left to do; see above.

    Args:
        struck: When, the fault, the process.
        handed: Request -> when it could first be read on an engine's topic.
        seen: Request -> when its result could first be read.
    """
    found = []
    answered = [(handed[ident], at) for ident, at in seen.items() if ident in handed]
    for struck_at, fault, _ in struck:
        held = [at for since, at in answered if since <= struck_at < at]
        fresh = [at for since, at in answered if since > struck_at]
        flow = [at for at in seen.values() if at > struck_at]
        if fault.part in COUNTED and flow:
            recovered = max([*held, *([min(fresh)] if fresh else [])], default=min(flow))
            found.append((fault, recovered - struck_at, min(flow) - struck_at))
    return found


def table(struck: list[tuple[float, Fault, str]], recovered: list[tuple[Fault, float, float]]) -> Table:
    """Faults by part and kind, with what followed."""
    shown = Table("part", "fault", "times", "recovery s, p50", "max", "flow s, p50", "max", box=None)
    times = Counter((fault.part, fault.kind) for _, fault, _ in struck)
    for (part, kind), number in sorted(times.items()):
        of = [(whole, flow) for fault, whole, flow in recovered if (fault.part, fault.kind) == (part, kind)]
        cells = [f"{f(column):.1f}" for column in zip(*of, strict=True) for f in (median, max)] or ["-"] * 4
        shown.add_row(part, kind, str(number), *cells)
    return shown


def _runs(result: dict[str, Any]) -> int:
    hop, _, takeovers = (result.get("run_id") or "0.0").partition(".")
    return int(hop) + int(takeovers) + 1


def _why(result: dict[str, Any]) -> str:
    error = result.get("error") or {}
    return f"{result['status']} {error.get('code', '')}: {error.get('message', '')}"
