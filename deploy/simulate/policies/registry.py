"""The policies by name."""

from collections.abc import Callable

from deploy.simulate.errors import SimulationError
from deploy.simulate.policies.central import Edf, Isolated, PooledFifo
from deploy.simulate.policies.forebay import Forebay
from deploy.simulate.policies.push import FreshJsq, LeastLoaded, PowerOfTwo
from deploy.simulate.world import Policy, World

POLICIES: dict[str, tuple[Callable[[World], Policy], str]] = {
    "isolated": (Isolated, "each kind of request on its own engines, a FIFO each"),
    "pooled_fifo": (PooledFifo, "one FIFO over all engines that may serve a request"),
    "forebay": (Forebay, "Forebay's own core"),
    "edf": (Edf, "earliest deadline first, knowing all lengths and every worker's true state"),
    "least_loaded": (LeastLoaded, "at once to the least loaded worker of the last snapshots"),
    "power_of_two": (PowerOfTwo, "at once to the less loaded of two workers at random, by the last snapshots"),
    "fresh_jsq": (FreshJsq, "at once to the shortest queue, which it knows"),
}


def find_policy(name: str) -> Callable[[World], Policy]:
    """Give what makes a policy.

    Raises:
        SimulationError: There is none of that name.
    """
    if name not in POLICIES:
        message = f"no policy {name!r}: there are {', '.join(POLICIES)}"
        raise SimulationError(message)
    return POLICIES[name][0]
