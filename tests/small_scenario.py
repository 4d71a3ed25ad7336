"""A small scenario for tests: two engines, two kinds of requests, two tenants."""

import json
from copy import deepcopy

from deploy.simulate.runs import Runs
from deploy.simulate.scenario import parse_scenario

PROFILE = {"ttft_ms": 10, "prefill_ms_per_1k": 50, "tpot_ms": 10, "tpot_batch_ms": 0.5}
RAW = {
    "title": "small",
    "duration_s": 60.0,
    "warmup_s": 5.0,
    "engines": {
        "llama": {"kind": "transformer", "model": "llama", "workers": 2, "slots": 8, "profile": PROFILE},
        "mamba": {"kind": "ssm", "model": "mamba", "workers": 1, "slots": 8, "profile": PROFILE},
    },
    "traffic": [
        {
            "name": "all",
            "arrivals": {"process": "poisson", "per_s": 6.0},
            "input_tokens": {"dist": "lognormal", "median": 500, "sigma": 1.0, "most": 8_000},
            "output_tokens": {"dist": "exponential", "mean": 60, "least": 2, "most": 600},
            "kinds": [
                {"engine": "llama", "share": 2, "hint": "transformer", "tenant": "one"},
                {"engine": "mamba", "share": 1, "hint": "ssm", "tenant": "two", "service_class": "batch"},
            ],
        }
    ],
}


def raw_scenario(**changes):
    """The scenario as plain tables; a change names its path with double underscores, a number a place in a list."""
    raw = deepcopy(RAW)
    for path, value in changes.items():
        *way, last = (int(step) if step.isdigit() else step for step in path.split("__"))
        place = raw
        for step in way:
            place = place.setdefault(step, {}) if isinstance(place, dict) else place[step]
        place[last] = value
    return raw


def as_toml(raw):
    """Write plain tables as TOML, each on a line."""
    return "".join(f"{name} = {_inline(value)}\n" for name, value in raw.items())


def _inline(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_inline(each)}" for name, each in value.items()) + "}"
    return "[" + ", ".join(map(_inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def small_scenario(**changes):
    return parse_scenario(raw_scenario(**changes))


def run_small(policy, requests=None, scale=1.0, **changes):
    return Runs(small_scenario(**changes), requests_max=requests).run(policy, scale)
