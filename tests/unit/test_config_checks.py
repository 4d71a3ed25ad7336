"""The parts of a configuration that do not agree: each is one line with its path."""

import pytest

from schemas import ConfigError, parse_config

LLAMA = {"kind": "transformer", "model": "llama", "aliases": ["fast"]}
MAMBA = {"kind": "ssm", "model": "mamba"}
ENGINES = {"llama": LLAMA, "mamba": MAMBA}


def engines(**changes):
    return {"engines": {"llama": LLAMA, "more": LLAMA | {"pool": "llama"} | changes}}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        # rates and weights
        ({"tenants": {"a": {"tokens_per_s": -1}}}, "`tenants.a.tokens_per_s`: Expected `float` > 0.0"),
        ({"tenants": {"a": {"requests_per_s_max": 0}}}, "`tenants.a.requests_per_s_max`: Expected `float` > 0.0"),
        ({"tenants": {"a": {"weight": 0}}}, "`tenants.a.weight`: Expected `float` >= 0.001"),
        ({"classes": {"batch_weight": 0}}, "`classes.batch_weight`: Expected `float` >= 0.001"),
        ({"dispatcher": {"cell": {"tokens_per_s_max": -5.0}}}, "`dispatcher.cell.tokens_per_s_max`: Expected `float` > 0.0"),
        ({"engines": {"a": LLAMA | {"tokens_per_s_max": -1}}}, "`engines.a.tokens_per_s_max`: Expected `float` > 0.0"),
        ({"engines": {"a": LLAMA | {"burst_s": 0}}}, "`engines.a.burst_s`: Expected `float` > 0.0"),
        ({"routing": {"scorers": {"wait": -1}}}, "`routing.scorers.wait`: Expected `float` >= 0.0"),
        (
            {"tenants": {"a": {"requests_per_s": 5, "requests_per_s_max": 4}}},
            "`tenants.a.requests_per_s`: expected at most its `requests_per_s_max` (4), got 5",
        ),
        (
            {"tenants": {"a": {"tokens_per_s": 5, "tokens_per_s_max": 4.5}}},
            "`tenants.a.tokens_per_s`: expected at most its `tokens_per_s_max` (4.5), got 5",
        ),
        (
            {
                "tenants": {"a": {"tokens_per_s": 60}, "b": {"tokens_per_s": 50}, "c": {}},
                "dispatcher": {"cell": {"tokens_per_s_max": 100}},
            },
            "`dispatcher.cell.tokens_per_s_max`: expected at least the 110 that all tenants together are guaranteed, got 100",
        ),
        (
            {"tenants": {"a": {"requests_per_s": 2}}, "dispatcher": {"cell": {"requests_per_s_max": 1}}},
            "`dispatcher.cell.requests_per_s_max`: expected at least the 2 that all tenants together are guaranteed, got 1",
        ),
        # adapters
        (
            {"engines": {"a": LLAMA | {"options": {"loras": {"fast": "/f"}}}}},
            "`engines.a.options.loras.fast`: it is a name of the engine's model: give the adapter another name",
        ),
        (engines(options={"loras": {"sql": "/f"}}), "`engines.more.options.loras`: expected the adapters of `engines.llama`"),
        # time slices
        ({"engines": {"a": LLAMA | {"time_slices": {}}}}, "`engines.a.time_slices.device`: required field is missing"),
        (
            {"engines": {"a": LLAMA | {"time_slices": {"device": "../gpu"}}}},
            "`engines.a.time_slices.device`: Expected `str` matching regex",
        ),
        (
            {"engines": {"a": LLAMA | {"time_slices": {"device": "gpu0", "weight": 0}}}},
            "`engines.a.time_slices.weight`: Expected `float` >= 0.001",
        ),
        (
            {"engines": {"a": LLAMA | {"time_slices": {"device": "gpu0", "slice_ms": 50, "patience_ms": 50}}}},
            "`engines.a.time_slices.patience_ms`: expected more than its `slice_ms` (50)",
        ),
        (
            {"engines": {"a": {"kind": "ssm", "backend": "sim", "time_slices": {"device": "gpu0"}}}},
            "`engines.a.time_slices`: the engine runs no model, and uses no device",
        ),
        # names
        (
            {"engines": ENGINES, "aliases": {"chat": "gpt"}},
            "`aliases.chat`: no model, alias or class of equivalents 'gpt': known are chat, fast, llama, mamba",
        ),
        ({"aliases": {"chat": "gpt"}}, "`aliases.chat`: no model, alias or class of equivalents 'gpt': known are chat"),
        (
            {"engines": ENGINES, "aliases": {"a": "b", "b": "c", "c": "a"}},
            "`aliases.a`: the aliases go round in a circle: a -> b -> c -> a",
        ),
        (
            {"engines": ENGINES, "aliases": {"a": "b", "b": "c", "c": "b"}},
            "`aliases.b`: the aliases go round in a circle: b -> c -> b",
        ),
        ({"engines": ENGINES, "aliases": {"a": "a"}}, "`aliases.a`: the aliases go round in a circle: a -> a"),
        ({"engines": ENGINES, "aliases": {"llama": "mamba"}}, "`aliases.llama`: it hides what is called 'llama' already"),
        ({"engines": ENGINES, "aliases": {"fast": "mamba"}}, "`aliases.fast`: it hides what is called 'fast' already"),
        ({"engines": ENGINES, "aliases": {"auto": "mamba"}}, "`aliases.auto`: it hides what takes any model"),
        (
            {"engines": ENGINES, "equivalents": {"small": ["llama"]}, "aliases": {"small": "mamba"}},
            "`aliases.small`: it hides what is called 'small' already: take another name",
        ),
        (
            {"engines": ENGINES, "equivalents": {"small": ["llama", "gpt"]}},
            "`equivalents.small[1]`: no model 'gpt': known are fast, llama, mamba",
        ),
        ({"equivalents": {"small": ["gpt"]}}, "`equivalents.small[0]`: no model 'gpt': no engine is configured"),
        ({"engines": ENGINES, "equivalents": {"small": []}}, "`equivalents.small`: expected at least one model"),
        (
            {"engines": ENGINES, "equivalents": {"llama": ["mamba"]}},
            "`equivalents.llama`: the name is taken by a model or an alias of an engine",
        ),
        (
            {"engines": ENGINES, "equivalents": {"auto": ["mamba"]}},
            "`equivalents.auto`: the name is taken by what takes any model",
        ),
        ({"engines": {"a": LLAMA | {"model": "auto"}}}, "`engines.a.model`: 'auto' is what requests say that take any model"),
        ({"engines": {"a": LLAMA | {"aliases": ["auto"]}}}, "`engines.a.aliases`: 'auto' is what requests say"),
        # engines and pools
        (
            {"engines": {"a": LLAMA | {"slots": 2, "interactive_slots": 2}}},
            "`engines.a.interactive_slots`: expected less than its `slots` (2), so that some are left for batch",
        ),
        (
            engines(kind="ssm", backend="transformer"),
            "`engines.more.kind`: expected 'transformer' as in `engines.llama`, which is of the same pool, got 'ssm'",
        ),
        (engines(backend="sim"), "`engines.more.backend`: expected 'transformer' as in `engines.llama`"),
        (engines(model="mamba"), "`engines.more.model`: expected 'llama' as in `engines.llama`"),
        (engines(tokens_per_s_max=5.0), "`engines.more.tokens_per_s_max`: expected None as in `engines.llama`"),
        # numbers that belong together
        (
            {"routing": {"temperature_from_c": 90, "temperature_full_c": 85}},
            "`routing.temperature_from_c`: expected at most `routing.temperature_full_c` (85)",
        ),
        ({"routing": {"filters": ["fresh", "model", "fresh"]}}, "`routing.filters`: 'fresh' stands there twice"),
        ({"routing": {"degradation": ["moe", "moe"]}}, "`routing.degradation`: 'moe' stands there twice"),
        (
            {"dispatcher": {"breaker": {"open_ms": 90_000}}},
            "`dispatcher.breaker.open_ms`: expected at most `dispatcher.breaker.open_ms_max` (60000)",
        ),
    ],
)
def test_what_does_not_agree_is_refused_in_one_line_with_its_path(raw, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "forebay.toml")
    assert str(caught.value).startswith(f"forebay.toml: {said}")
    assert "\n" not in str(caught.value)


def test_what_agrees_is_taken():
    config = parse_config(
        {
            "engines": {**ENGINES, "more": LLAMA | {"pool": "llama", "slots": 16, "backend": "transformer", "aliases": ["slow"]}},
            "equivalents": {"small": ["fast", "mamba"]},
            "aliases": {"chat": "talk", "talk": "small", "quick": "fast", "old": "llama"},
            "tenants": {"a": {"tokens_per_s": 60, "tokens_per_s_max": 60}, "b": {"tokens_per_s": 40}},
            "dispatcher": {"cell": {"tokens_per_s_max": 100}},
            "routing": {"long_context_kind": "tape", "low_latency_kind": "wafer", "degradation": ["wafer"]},
        }
    )
    assert config.pools == ["llama", "mamba"]


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ("sql", "sql"),
        ("law", "law"),
        ("queries", "sql"),
        ("fast", "llama"),
        ("auto", "llama"),
        ("mamba", "llama"),
        ("any", "llama"),
    ],
)
def test_an_adapter_answers_only_where_it_is_meant(asked, answers):
    llama = LLAMA | {"options": {"loras": {"sql": "/sql", "law": "/law"}}}
    raw = {"engines": {"llama": llama, "mamba": MAMBA}, "aliases": {"queries": "sql"}, "equivalents": {"any": ["sql", "llama"]}}
    assert parse_config(raw).answering("llama", asked) == answers
