"""Which engines may serve a request, for the policies that are compared: the rules of `fallback`, and the context."""

from deploy.simulate.job import Ask, Job
from deploy.simulate.world import World
from schemas.messages import AUTO


class Eligible:
    """The pools that may serve each kind of request.

    Args:
        world: Its engines.
    """

    def __init__(self, world: World) -> None:
        self._specs = {pool: world.scenario.engines[pool] for pool in world.pools}
        self._pools: dict[int, tuple[str, ...]] = {}
        self._context_least = min(spec.max_context for spec in self._specs.values())

    def pools(self, job: Job) -> tuple[str, ...]:
        """Name them."""
        found = self._pools.get(job.ask.number)
        if found is None:
            found = self._pools[job.ask.number] = self._of(job.ask)
        tokens = job.input_tokens + job.output_tokens
        if tokens <= self._context_least:
            return found
        return tuple(pool for pool in found if tokens <= self._specs[pool].max_context)

    def _of(self, ask: Ask) -> tuple[str, ...]:
        serving = [pool for pool, spec in self._specs.items() if ask.model in {AUTO, spec.model}]
        if ask.fallback == "any":
            return tuple(self._specs)
        if ask.fallback == "same_model":
            return tuple(serving)
        return tuple(pool for pool in serving if ask.hint in {AUTO, self._specs[pool].kind})
