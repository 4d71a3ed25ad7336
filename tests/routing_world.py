"""Pools, workers and requests for the tests of routing: the numbers are small and the predictor is plain."""

from broker.transport.protocol import TopicPartition
from dispatcher.core.fleet import Fleet
from dispatcher.core.item import NEVER_MS, Demand, Item
from dispatcher.core.prediction import Prediction
from dispatcher.core.routing import Router
from schemas import EngineStatus, parse_config
from schemas.messages import Envelope

NOW = 1_000_000
STALE_MS = 3_000
ENGINES = {
    "llama": {"kind": "transformer", "model": "llama", "aliases": ["fast"]},
    "mamba": {"kind": "ssm", "model": "mamba"},
    "mixtral": {"kind": "moe", "model": "mixtral"},
}


class Plain:
    """A predictor: so many milliseconds for each token of a pool, whatever runs beside it."""

    def __init__(self, **per_token_ms):
        self.per_token_ms = per_token_ms

    def predict(self, pool, input_tokens, output_tokens, beside=0, kv_usage=None):  # noqa: ARG002
        each = self.per_token_ms.get(pool, 1.0)
        run_ms = each * (input_tokens / 100 + output_tokens)
        return Prediction(each * input_tokens / 100, each, run_ms, 1.5 * run_ms)


class Bounded:
    """Pools' rates: those that are named are used up."""

    def __init__(self):
        self.used_up = {}

    def allows(self, pool, now_ms):
        return self.ready_ms(pool, now_ms) <= now_ms

    def ready_ms(self, pool, now_ms):
        return self.used_up.get(pool, now_ms)


class World:
    """A router with all that it needs."""

    def __init__(self, *statuses, config=None, engines=None, predictor=None, factor=1.5, **sections):
        self.config = config or parse_config({"engines": engines or ENGINES, **sections})
        self.fleet, self.rates = Fleet(factor, STALE_MS), Bounded()
        self.router = Router(self.config, self.fleet, predictor or Plain(), self.rates)
        for one in statuses:
            self.see(one)

    def see(self, status, now=NOW):
        for done in self.fleet.seen(status, now):
            self.router.completed(status.pool, status.worker, status.epoch, done.code, now)

    def status(self, pool, worker="w1", **fields):
        engine = self.config.engines.get(pool)
        kind = engine.kind if engine else "transformer"
        plain = {"epoch": 1, "updated_at_ms": NOW, "partitions": [0], "slots": 2, "completed": 1}
        return EngineStatus(engine=pool, kind=kind, pool=pool, worker=worker, **{**plain, **fields})

    def all(self, **fields):
        """One worker in each pool."""
        for pool in self.config.pools:
            self.see(self.status(pool, **fields))
        return self

    def item(self, model="auto", hint="auto", fallback="any", service_class="interactive", **fields):
        demand = {name: fields.pop(name) for name in ("excluded", "features") if name in fields}
        envelope = Envelope("r", "t", service_class, ("requests", 0, 0), NOW, **fields.pop("envelope", {}))
        plain = {"input_tokens": 100.0, "max_output_tokens": 10, "deadline_ms": NEVER_MS, "value": b"", "headers": ()}
        made = Item(
            work=(TopicPartition("requests", 0), 0),
            envelope=envelope,
            demand=Demand(model, hint, fallback, **demand),
            **{**plain, **fields},
        )
        made.demand = self.router.demand(made)
        return made

    def pick(self, now=NOW, **asked):
        return self.router.pick(self.item(**asked), now)

    def where(self, now=NOW, **asked):
        choice = self.pick(now, **asked)
        return None if choice is None else choice.pool

    def send(self, choice, service_class="interactive"):
        self.fleet.sending(choice.pool, choice.worker.partition, service_class)

    def fill(self, pool, count, service_class="interactive", partition=0):
        for _ in range(count):
            self.fleet.sending(pool, partition, service_class)
