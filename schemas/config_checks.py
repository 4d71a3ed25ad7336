"""What no single field of the configuration can say: that the parts of it agree. Each finding is one line with its path."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schemas.addresses import check_bootstrap, check_redis_url
from schemas.errors import InvalidMessage
from schemas.messages import AUTO

if TYPE_CHECKING:
    from schemas.config import Config, EngineConfig

Finding = tuple[str, str]  # the path, and what is wrong there

_GUARANTEES = ("requests_per_s", "tokens_per_s")
_OF_A_POOL = ("requests_per_s_max", "tokens_per_s_max", "burst_s", "paused")


def check(config: "Config") -> None:
    """See that the parts of a configuration agree.

    Raises:
        InvalidMessage: With the first that does not, its path and what was expected.
    """
    for found in (_cluster, _addresses, _topics, _rates, _policy, _engines, _names):
        for path, wrong in found(config):
            message = f"`{path}`: {wrong}"
            raise InvalidMessage(message, path)


def _cluster(config: "Config") -> Iterator[Finding]:
    kafka = config.kafka
    if kafka.request_timeout_ms <= kafka.rebalance_timeout_ms:
        yield "kafka.request_timeout_ms", f"expected more than `kafka.rebalance_timeout_ms` ({kafka.rebalance_timeout_ms})"
    if kafka.heartbeat_ms >= kafka.session_timeout_ms:
        yield "kafka.heartbeat_ms", f"expected less than `kafka.session_timeout_ms` ({kafka.session_timeout_ms})"


def _addresses(config: "Config") -> Iterator[Finding]:
    given = (
        ("kafka.bootstrap", check_bootstrap, config.kafka.bootstrap),
        ("redis.url", check_redis_url, config.redis.url),
    )
    for path, check_address, address in given:
        try:
            check_address(address)
        except ValueError as error:
            yield path, str(error)


def _topics(config: "Config") -> Iterator[Finding]:
    if config.value_bytes_max <= 0:
        around = config.kafka.record_bytes_max - config.value_bytes_max
        yield "kafka.record_bytes_max", f"expected more than {around}, what stands around a request"
    if config.topics.min_insync > config.topics.replication:
        yield "topics.min_insync", f"expected at most `topics.replication` ({config.topics.replication})"


def _rates(config: "Config") -> Iterator[Finding]:
    """What is guaranteed is within what is allowed, of each tenant and of all."""
    cell = config.dispatcher.cell
    for name in _GUARANTEES:
        total = 0.0
        for tenant, given in config.tenants.items():
            guaranteed, limit = getattr(given, name), getattr(given, f"{name}_max")
            if guaranteed is None:
                continue
            if limit is not None and guaranteed > limit:
                yield f"tenants.{tenant}.{name}", f"expected at most its `{name}_max` ({limit:g}), got {guaranteed:g}"
            total += guaranteed
        limit = getattr(cell, f"{name}_max")
        if limit is not None and total > limit:
            path = f"dispatcher.cell.{name}_max"
            yield path, f"expected at least the {total:g} that all tenants together are guaranteed, got {limit:g}"


def _policy(config: "Config") -> Iterator[Finding]:
    routing, dispatcher = config.routing, config.dispatcher
    if routing.temperature_from_c > routing.temperature_full_c:
        yield "routing.temperature_from_c", f"expected at most `routing.temperature_full_c` ({routing.temperature_full_c:g})"
    for name in ("filters", "preferences", "degradation"):
        if (twice := _twice(getattr(routing, name))) is not None:
            yield f"routing.{name}", f"{twice!r} stands there twice"
    if dispatcher.breaker.open_ms > dispatcher.breaker.open_ms_max:
        yield (
            "dispatcher.breaker.open_ms",
            f"expected at most `dispatcher.breaker.open_ms_max` ({dispatcher.breaker.open_ms_max})",
        )


def _engines(config: "Config") -> Iterator[Finding]:
    pools: dict[str, str] = {}
    for name, engine in config.engines.items():
        path = f"engines.{name}"
        if engine.reserved_slots >= engine.slots:
            yield f"{path}.interactive_slots", f"expected less than its `slots` ({engine.slots}), so that some are left for batch"
        if AUTO in engine.names:
            yield f"{path}.{'model' if engine.model == AUTO else 'aliases'}", f"{AUTO!r} is what requests say that take any model"
        for lora in sorted(engine.loras & {AUTO, *engine.names}):
            taken = "what requests say that take any model" if lora == AUTO else "a name of the engine's model"
            yield f"{path}.options.loras.{lora}", f"it is {taken}: give the adapter another name"
        if (slices := engine.time_slices) is not None:
            if engine.is_simulated:
                yield f"{path}.time_slices", "the engine runs no model, and uses no device"
            if slices.patience_ms <= slices.slice_ms:
                yield f"{path}.time_slices.patience_ms", f"expected more than its `slice_ms` ({slices.slice_ms:g})"
        first = pools.setdefault(config.pool(name), name)
        if first != name:
            yield from _unlike(path, engine, first, config.engines[first])


def _unlike(path: str, engine: "EngineConfig", name: str, first: "EngineConfig") -> Iterator[Finding]:
    """A pool's workers are taken for one another, and its rates are one."""
    for field in ("kind", "backend", "model", *_OF_A_POOL):
        mine, its = getattr(engine, field), getattr(first, field)
        if field == "backend":
            mine, its = mine or engine.kind, its or first.kind
        if mine != its:
            yield f"{path}.{field}", f"expected {its!r} as in `engines.{name}`, which is of the same pool, got {mine!r}"
    if engine.loras != first.loras:
        its = ", ".join(sorted(first.loras)) or "none"
        yield f"{path}.options.loras", f"expected the adapters of `engines.{name}`, which is of the same pool: {its}"


def _names(config: "Config") -> Iterator[Finding]:
    models = {name for engine in config.engines.values() for name in engine.names | engine.loras}
    for name, members in config.equivalents.items():
        path = f"equivalents.{name}"
        if name in models or name == AUTO:
            yield path, f"the name is taken by {'what takes any model' if name == AUTO else 'a model or an alias of an engine'}"
        if not members:
            yield path, "expected at least one model"
        for place, member in enumerate(members):
            if member not in models:
                yield f"{path}[{place}]", _unknown("model", member, models)
    known = models | config.equivalents.keys()
    for name, target in config.aliases.items():
        path = f"aliases.{name}"
        if name in known or name == AUTO:
            yield (
                path,
                f"it hides {'what takes any model' if name == AUTO else f'what is called {name!r} already'}: take another name",
            )
        elif target not in known and target not in config.aliases:
            yield path, _unknown("model, alias or class of equivalents", target, known | config.aliases.keys())
        elif (way := _circle(name, config)) is not None:
            yield path, f"the aliases go round in a circle: {' -> '.join(way)}"


def _circle(name: str, config: "Config") -> list[str] | None:
    way = [name]
    while (target := config.aliases.get(way[-1])) is not None:
        way.append(target)
        if target == name:
            return way
        if target in way[:-1]:
            return None  # it leads into a circle: that is told of those who form it
    return None


def _unknown(what: str, name: str, known: set[str]) -> str:
    said = f"known are {', '.join(sorted(known))}" if known else "no engine is configured"
    return f"no {what} {name!r}: {said}"


def _twice(names: list[str]) -> str | None:
    return next((name for place, name in enumerate(names) if name in names[:place]), None)
