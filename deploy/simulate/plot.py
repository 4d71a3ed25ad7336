"""A picture of the runs: utilisation and queue over time, how long requests took, and what each tenant got."""

from collections.abc import Mapping
from pathlib import Path

from deploy.simulate.errors import SimulationError
from deploy.simulate.report import merged
from deploy.simulate.world import SAMPLE_MS, Ran

SUFFIXES = (".png", ".svg")
CURVE = (*tuple(n / 200 for n in range(1, 200)), 0.999)


def check_plot(path: Path) -> None:
    """Make sure that a picture can be made, before anything is run.

    Raises:
        SimulationError: Its format is not known, its folder is missing, or matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        message = f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}"
        raise SimulationError(message)
    if not path.absolute().parent.is_dir():
        message = f"--plot {path}: no such folder: {path.absolute().parent}"
        raise SimulationError(message)
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 - an extra, and slow to import
    except ImportError:
        message = "--plot needs matplotlib, which is not installed: pip install 'forebay[plot]'"
        raise SimulationError(message) from None


def draw(path: Path, title: str, rans: Mapping[str, Ran]) -> None:
    """Write the picture.

    Args:
        path: Where to; see `check_plot`.
        title: Above it.
        rans: Policy -> its run.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - without pyplot: no window, no state

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    (useful, queue), (latency, shares) = figure.subplots(2, 2)
    for name, ran in rans.items():
        series = ran.measures.series
        seconds, work_ms = series.points("useful_ms")
        useful.plot(seconds, [100 * value / (SAMPLE_MS * ran.workers) for value in work_ms], label=name, linewidth=1)
        seconds, waiting = series.points("queue")
        queue.plot(seconds, waiting, label=name, linewidth=1)
        values, reached = zip(*merged(ran, "latency").curve(CURVE), strict=True)
        latency.plot([value / 1000 for value in values], [100 * share for share in reached], label=name, linewidth=1)
    useful.set(title="useful GPU utilisation (work of requests inside their objective)", xlabel="s", ylabel="%")
    queue.set(title="requests that no worker has", xlabel="s")
    latency.set(title="latency", xlabel="s", ylabel="% of requests", xscale="log")
    tenants = sorted({name for ran in rans.values() for name in ran.measures.tenants})
    base = [0.0] * len(rans)
    for tenant in tenants:
        parts = [100 * _share_of(ran, tenant) for ran in rans.values()]
        shares.bar(list(rans), parts, bottom=base, label=tenant)
        base = [below + part for below, part in zip(base, parts, strict=True)]
    shares.set(title="share of the work, by tenant", ylabel="%")
    for part in (useful, queue, latency, shares):
        part.grid(alpha=0.3)
        part.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _share_of(ran: Ran, tenant: str) -> float:
    total = sum(found.work_ms for found in ran.measures.tenants.values())
    known = ran.measures.tenants.get(tenant)
    return known.work_ms / total if known is not None and total else 0.0
