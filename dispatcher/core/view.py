"""How a dispatcher sees things at one moment, written down, and a router made again of that.

A state that was saved explains a request long after: it holds everything that `Router.explain` looks at. What was learned
comes along; levels of token buckets do not, only when each lets something pass again.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import structs

from broker.transport.protocol import Record
from dispatcher.core.admission import Refused, admit
from dispatcher.core.fleet import Fleet, Worker
from dispatcher.core.item import Item
from dispatcher.core.prediction import Predictor, PredictorState
from dispatcher.core.routing import Router
from dispatcher.core.shaping import PoolRates, Shaper
from schemas import faults
from schemas.config import Config
from schemas.messages import ServiceClass
from schemas.policy import PoolSettings, TenantConfig
from schemas.questions import DispatcherState, QueueSeen, WorkerSeen, public, without_completions
from schemas.topics import Topics

QUEUES_MAX = 1_000  # the longest


def look(
    config: Config,
    tenants: Mapping[str, TenantConfig],
    pools: Mapping[str, PoolSettings],
    router: Router,
    predictor: Predictor,
    shaper: Shaper,
    rates: PoolRates,
    in_hand: Iterable[Item],
    tenant: str | None,
    now_ms: int,
) -> DispatcherState:
    """Write down how things stand.

    Args:
        config: The configuration.
        tenants: All tenants' settings as they hold.
        pools: All pools' settings as they hold.
        router: Who routes, with its fleet.
        predictor: What it has learned.
        shaper: When tenants may be served.
        rates: When pools may be sent something.
        in_hand: What waits.
        tenant: Only this one's answers are wanted of what was learned; None: everybody's.
        now_ms: Unix time.
    """
    configured = config.pool_settings
    fleet, learned = router.fleet, predictor.state()
    if tenant is not None:
        answers = [one for one in learned.answers if one.tenant in {None, tenant}]
        learned = structs.replace(learned, answers=answers)
    ready_ms = {pool: rates.ready_ms(pool, now_ms) for pool in configured}
    run_ms = {pool: fleet.pool(pool).mean_run_ms for pool in configured}
    return DispatcherState(
        at_ms=now_ms,
        config=public(config),
        tenants={name: given for name, given in tenants.items() if given != config.tenants.get(name)},
        pools={name: given for name, given in pools.items() if given != configured.get(name)},
        workers=[_seen(worker) for pool in configured for worker in fleet.workers(pool)],
        queues=_queues(in_hand, shaper, now_ms),
        breakers=router.breakers.seen(),
        pools_ready_ms={pool: at_ms for pool, at_ms in ready_ms.items() if now_ms < at_ms < math.inf},
        pools_run_ms={pool: mean_ms for pool, mean_ms in run_ms.items() if mean_ms},
        predictor=msgspec.to_builtins(learned),
    )


class Mind:
    """A router made of a state.

    Args:
        state: How things stood.

    Raises:
        InvalidMessage: What was learned cannot be read.
        ConfigError: A plugin that the configuration names is not registered here.
    """

    def __init__(self, state: DispatcherState) -> None:
        config = state.config
        self._state, self._predictor = state, Predictor(config.profiles)
        if state.predictor is not None:
            self._predictor.restore(_learned(state))
        fleet = Fleet(config.dispatcher.runway_factor, config.dispatcher.status_stale_ms)
        self.router = Router(config, fleet, self._predictor, _Rates(state))
        self.router.steer(state.pools)
        for seen in state.workers:
            _restore(fleet, seen)
        for pool, run_ms in state.pools_run_ms.items():
            fleet.believe(fleet.pool(pool), run_ms)
        self.router.breakers.restore(state.breakers)

    def item(self, value: bytes, service_class: ServiceClass) -> Item | Refused:
        """Take in a request as it would be taken in from its topic.

        Args:
            value: As JSON.
            service_class: Interactive or batch.
        """
        topic = Topics(self._state.config.kafka.topic_prefix).requests(service_class)
        record = Record(topic, 0, 0, None, value, (), self._state.at_ms)
        item = admit(record, service_class, self._state.config.value_bytes_max)
        if isinstance(item, Item):
            if item.size_bytes is not None:
                item.input_tokens = self._predictor.input_tokens(item.demand.model, item.size_bytes)
            item.demand = self.router.demand(item)
            item.output_tokens = self._predictor.expected_output(item.tenant, item.demand.model, item.max_output_tokens)
        return item


class _Rates:
    """Pools' rates as they stood."""

    def __init__(self, state: DispatcherState) -> None:
        self._ready_ms = state.pools_ready_ms

    def allows(self, pool: str, now_ms: float) -> bool:
        return self.ready_ms(pool, now_ms) <= now_ms

    def ready_ms(self, pool: str, now_ms: float) -> float:
        return max(self._ready_ms.get(pool, now_ms), now_ms)


def _seen(worker: Worker) -> WorkerSeen:
    status = without_completions(worker.status)
    return WorkerSeen(status, worker.heard_ms, worker.load, worker.batch_load, worker.start)


def _queues(in_hand: Iterable[Item], shaper: Shaper, now_ms: int) -> list[QueueSeen]:
    counts: dict[tuple[ServiceClass, str], int] = {}
    for item in in_hand:
        key = item.service_class, item.tenant
        counts[key] = counts.get(key, 0) + 1
    longest = sorted(counts, key=lambda key: (-counts[key], key))[:QUEUES_MAX]
    ready_ms = {tenant: shaper.ready_ms(tenant, now_ms) for _, tenant in longest}
    return [
        QueueSeen(of_class, tenant, counts[of_class, tenant], at_ms if now_ms < (at_ms := ready_ms[tenant]) < math.inf else None)
        for of_class, tenant in sorted(longest)
    ]


def _learned(state: DispatcherState) -> PredictorState:
    try:
        return msgspec.convert(state.predictor, PredictorState)
    except msgspec.ValidationError as error:
        raise faults.invalid(error, value=lambda: state.predictor, kind=PredictorState) from None


def _restore(fleet: Fleet, seen: WorkerSeen) -> None:
    status = seen.status
    fleet.seen(status, seen.heard_ms)
    worker = fleet.pool(status.pool).workers[status.worker]
    if worker.partition is not None:  # what was on its way to it
        batch = max(seen.batch_load - worker.batch_load, 0)
        for number in range(max(seen.load - worker.load, 0)):
            fleet.sending(status.pool, worker.partition, "batch" if number < batch else "interactive")
    fleet.start_slowly(worker, seen.start)
