"""What routing is made of: filters, preferences and scorers, each known by a name that the configuration uses.

    @scorer("night_rate")
    def night_rate(request, candidate, context):
        '''Cloud engines cost more by day.'''
        return 500.0 if candidate.pool.name.startswith("cloud") and is_day(context.now_ms) else 0.0

in a module that stands in `routing.plugins`, and `night_rate = 1.0` among `routing.scorers`. That is all.

A scorer gives a cost in milliseconds, not a share of one: waits, runs and penalties are then of one unit, a weight says
how much longer a request may take rather than go there, and a cost does not change with who else is compared.

The dispatcher decides many thousand times a second, so a plugin says what it depends on (`per`), and is asked only then:

| kind | per | asked with | asked |
|---|---|---|---|
| filter | demand | demand, pool, worker, context | when something other than load has changed |
| filter | request | request, pool, worker, context | for each request and worker |
| preference | - | request, context | for each request |
| scorer | snapshot | worker, context | for each snapshot of a worker |
| scorer | pool | request, candidate, context | for each request, once for a pool: its workers are alike to it |
| scorer | request | request, candidate, context | for each request and worker |

A plugin must be as pure as the rest of the core: the same answer for the same question, in microseconds.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from dispatcher.core.breaker import Breakers
from dispatcher.core.fleet import Worker
from dispatcher.core.item import Demand, Excluded
from dispatcher.core.prediction import Prediction
from dispatcher.core.routing.catalog import PoolFacts
from schemas.errors import ConfigError
from schemas.messages import EngineKind
from schemas.policy import PoolSettings, RoutingConfig

Kind = Literal["filter", "preference", "scorer"]
Per = Literal["demand", "request", "snapshot", "pool"]
Given = TypeVar("Given", bound=Callable[..., Any])


class Rates(Protocol):
    """What routing asks of the pools' rates."""

    def allows(self, pool: str, now_ms: float) -> bool:
        """Whether the pool may be sent a request now."""

    def ready_ms(self, pool: str, now_ms: float) -> float:
        """When the pool may be sent one."""


class Question(NamedTuple):
    """What is asked, as far as it is alike for all requests of a demand.

    Attributes:
        demand: What is asked for.
        ranks: The pools that may answer it -> in which tier.
        context_max: The most that any of those is known to take.
        has_features: Whether any of those is known, or not known not, to have all features.
        passed_over: Pool -> who handed it back and is not asked.
        reach: Kinds of the pools that serve it -> the longest prompt that one of each was trained for and takes.
    """

    demand: Demand
    ranks: Mapping[str, int]
    context_max: int
    has_features: bool
    passed_over: Mapping[str, Excluded]
    reach: Mapping[EngineKind, float]


class Context:
    """What plugins may look at beside the request.

    Attributes:
        now_ms: Unix time.
        routing: The policy's numbers.
        question: What is asked.
        breakers: Who is left alone.
        rates: What pools may be sent.
    """

    __slots__ = ("_settings_of", "breakers", "now_ms", "question", "rates", "routing")

    def __init__(
        self, routing: RoutingConfig, breakers: Breakers, rates: Rates, settings_of: Callable[[str], PoolSettings]
    ) -> None:
        self.routing, self.breakers, self.rates = routing, breakers, rates
        self._settings_of = settings_of
        self.now_ms: float = 0
        self.question: Question

    def settings_of(self, pool: str) -> PoolSettings:
        """The settings of a pool as they stand."""
        return self._settings_of(pool)


class Candidate(NamedTuple):
    """A worker that might take a request.

    Attributes:
        pool: What the configuration says of its pool.
        worker: Its snapshot and load.
        wait_ms: What the request would wait there.
        prediction: What it would then take.
    """

    pool: PoolFacts
    worker: Worker
    wait_ms: float
    prediction: Prediction


class Plugin(NamedTuple):
    """One plugin.

    Attributes:
        ask: The function; a filter gives why not, or None.
        said: The first line of its docstring.
    """

    kind: Kind
    name: str
    per: Per
    ask: Callable[..., Any]
    said: str


_known: dict[Kind, dict[str, Plugin]] = {"filter": {}, "preference": {}, "scorer": {}}


def engine_filter(name: str, per: Literal["demand", "request"] = "request") -> Callable[[Given], Given]:
    """Register a filter: it says in a few words why a worker cannot take a request, or None.

    Args:
        name: What `routing.filters` calls it.
        per: Whether it looks at the demand only.

    Raises:
        ConfigError: Another one has that name.
    """
    return _registering("filter", name, per)


def preference(name: str) -> Callable[[Given], Given]:
    """Register a preference: it names the kind of engine that a request should go to, or None.

    Args:
        name: What `routing.preferences` calls it.

    Raises:
        ConfigError: Another one has that name.
    """
    return _registering("preference", name, "request")


def scorer(name: str, per: Literal["snapshot", "pool", "request"] = "request") -> Callable[[Given], Given]:
    """Register a scorer: it says what it costs to go somewhere, in milliseconds; what is below zero counts as nothing.

    Args:
        name: What `routing.scorers` calls it.
        per: What it depends on.

    Raises:
        ConfigError: Another one has that name.
    """
    return _registering("scorer", name, per)


def known(kind: Kind) -> Mapping[str, Plugin]:
    """All plugins of a kind that are registered, by name."""
    return _known[kind]


def find(kind: Kind, names: Sequence[str], path: str) -> list[Plugin]:
    """Look up plugins by name.

    Args:
        kind: Which kind.
        names: As configured.
        path: Of the list in the configuration.

    Raises:
        ConfigError: One is not known, or stands there twice.
    """
    for place, name in enumerate(names):
        if name not in _known[kind]:
            message = f"`{path}`: no {kind} {name!r} is registered: known are {', '.join(sorted(_known[kind]))}"
            raise ConfigError(message)
        if name in names[:place]:
            message = f"`{path}`: {name!r} stands there twice"
            raise ConfigError(message)
    return [_known[kind][name] for name in names]


def check(routing: RoutingConfig) -> None:
    """See that all plugins that are configured are registered.

    Raises:
        ConfigError: With the path of the first that is not.
    """
    find("filter", routing.filters, "routing.filters")
    find("preference", routing.preferences, "routing.preferences")
    find("scorer", list(routing.scorers), "routing.scorers")


def _registering(kind: Kind, name: str, per: Per) -> Callable[[Given], Given]:
    def register(function: Given) -> Given:
        there = _known[kind].get(name)
        if there is not None and _place(there.ask) != _place(function):
            message = f"two {kind}s are named {name!r}: {'.'.join(_place(there.ask))} and {'.'.join(_place(function))}"
            raise ConfigError(message)
        said = (function.__doc__ or "").strip().partition("\n")[0]
        _known[kind][name] = Plugin(kind, name, per, function, said)
        return function

    return register


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
