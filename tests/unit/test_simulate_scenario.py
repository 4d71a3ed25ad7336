"""Scenarios: what is refused, with its path, and what those that ship say."""

import pytest
from small_scenario import raw_scenario, small_scenario

from deploy.simulate.arrivals import Arrivals
from deploy.simulate.errors import ScenarioError
from deploy.simulate.policies import POLICIES
from deploy.simulate.scenario import find_scenario, load_scenario, parse_scenario, shipped, to_config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"titel": "x"}, "`titel`: unknown field"),
        ({"engines": {}}, "`engines`: "),
        ({"engines__llama__slots": 0}, "`engines.llama.slots`: Expected `int` >= 1"),
        ({"engines__llama__profile__tpot": 1}, "`engines.llama.profile.tpot`: unknown field"),
        ({"engines__llama__profile__tpot_ms": -1}, "`engines.llama.profile.tpot_ms`: Expected `float` >= 0.0"),
        ({"engines__llama__kv_tokens": 100}, "`engines.llama.kv_tokens`: expected `max_context` (32768) at least"),
        ({"engines__llama__workers": 0, "engines__mamba__workers": 0}, "`engines`: expected one worker at least"),
        ({"warmup_s": 60.0}, "`warmup_s`: expected less than `duration_s` (60)"),
        ({"traffic__0__arrivals": {"process": "uniform"}}, "`traffic[0].arrivals.process`"),
        ({"traffic__0__arrivals": {"process": "poisson"}}, "`traffic[0].arrivals.per_s`: required field is missing"),
        ({"traffic__0__arrivals": {"process": "poisson", "per_s": 0}}, "`traffic[0].arrivals.per_s`: Expected `float` > 0.0"),
        ({"traffic__0__input_tokens": None}, "`traffic[0].input_tokens`: required where no trace gives the lengths"),
        ({"traffic__0__input_tokens": {"dist": "fixed", "tokens": 0}}, "`traffic[0].input_tokens.tokens`: Expected `int` >= 1"),
        ({"traffic__0__kinds": []}, "`traffic[0].kinds`: "),
        (
            {"traffic__0__kinds__1__hint": "moe"},
            "`traffic[0].kinds[1].hint`: no engine of kind 'moe'",
        ),
        ({"traffic__0__kinds__1__engine": "gpt"}, "`traffic[0].kinds[1].engine`: no engine 'gpt': there are llama, mamba"),
        ({"traffic__0__kinds__1__service_class": "slow"}, "`traffic[0].kinds[1].service_class`: "),
        ({"traffic__0__phases": [{"at_s": 1, "shares": [1]}]}, "`traffic[0].phases[0].shares`: expected 2 numbers"),
        (
            {"traffic__0__phases": [{"at_s": 9, "ramp_s": 5, "rate": 2}, {"at_s": 10}]},
            "`traffic[0].phases[1].at_s`: expected at or after the end of the phase before (14)",
        ),
        (
            {"faults": [{"at_s": 1, "worker": "llama-2", "does": "die"}]},
            "`faults[0].worker`: no worker 'llama-2': there are llama-0, ",
        ),
        ({"faults": [{"at_s": 1, "worker": "llama-0", "does": "explode"}]}, "`faults[0].does`: "),
        ({"forebay__tenants__one__weight": 0}, "`forebay.tenants.one.weight`: Expected `float` >= 0.001"),
        ({"forebay__routing__scorer": 1}, "`forebay.routing.scorer`: unknown field"),
        ({"forebay__engines__gpt__paused": True}, "`forebay.engines.gpt`: no such engine: there are llama, mamba"),
        ({"slo__attainment": 1.5}, "`slo.attainment`: Expected `float` <= 1.0"),
    ],
)
def test_a_bad_scenario_is_one_line_with_the_path(changes, said):
    with pytest.raises(ScenarioError) as refused:
        parse_scenario(raw_scenario(**changes), "mine.toml")
    told = str(refused.value)
    assert told.startswith("mine.toml: ")
    assert said in told
    assert "\n" not in told


def test_files_that_are_no_scenarios(tmp_path):
    with pytest.raises(ScenarioError, match=r"gone: no such scenario: give a file, or one of "):
        load_scenario(find_scenario("gone"))
    (tmp_path / "bad.toml").write_text("title = ")
    with pytest.raises(ScenarioError, match=r"bad.toml: Invalid value"):
        load_scenario(tmp_path / "bad.toml")
    with pytest.raises(ScenarioError):
        load_scenario(tmp_path)


def test_forebay_is_told_the_engines_and_what_is_believed_of_them():
    config = to_config(small_scenario(engines__mamba__believed={"tpot_ms": 99}, forebay__tenants__one__weight=3.0))
    assert sorted(config.engines) == ["llama", "mamba"]
    assert (config.engines["llama"].kind, config.engines["llama"].workers, config.engines["llama"].slots) == ("transformer", 2, 8)
    assert config.engines["llama"].profile.prefill_ms_per_1k == 50
    assert config.engines["mamba"].profile.tpot_ms == 99
    assert config.engines["mamba"].profile.ttft_ms is None
    assert config.tenants["one"].weight == 3.0


@pytest.mark.parametrize("name", sorted(shipped()))
def test_each_shipped_scenario_is_sound_and_says_why(name):
    path = shipped()[name]
    scenario = load_scenario(path)
    assert set(scenario.policies) <= set(POLICIES)
    assert next(iter(Arrivals(scenario, beside=path.parent))).at_ms >= 0
    assert path.read_text(encoding="utf-8").startswith("#"), "a scenario states its assumptions, and where they come from"
