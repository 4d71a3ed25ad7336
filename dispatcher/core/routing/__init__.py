"""Where a request may go and who of those takes it. Start reading in `router.py`; `plugins.py` says how to add to it."""

from dispatcher.core.routing.catalog import Catalog, PoolFacts
from dispatcher.core.routing.explain import Explanation, explain
from dispatcher.core.routing.plans import Choice
from dispatcher.core.routing.plugins import Context, Rates, engine_filter, preference, scorer
from dispatcher.core.routing.router import Predictor, Router

__all__ = [
    "Catalog",
    "Choice",
    "Context",
    "Explanation",
    "PoolFacts",
    "Predictor",
    "Rates",
    "Router",
    "engine_filter",
    "explain",
    "preference",
    "scorer",
]
