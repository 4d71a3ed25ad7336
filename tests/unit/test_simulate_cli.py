"""`forebay simulate`: what it prints, what it draws, and its refusals."""

import builtins
import json
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner
from small_scenario import as_toml, raw_scenario

from deploy.cli import simulate as command
from deploy.simulate.errors import SimulationError
from deploy.simulate.policies import POLICIES
from deploy.simulate.runs import Runs
from deploy.simulate.scenario import shipped


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(as_toml(raw_scenario(duration_s=30.0)))
    return path


def invoke(*arguments):
    return CliRunner().invoke(command.simulate, [str(each) for each in arguments])


def test_a_table_tells_each_policy(scenario):
    ran = invoke(scenario)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith("small\nobjective: 99% of interactive requests: first token within 2 s, 60 ms per token\n")
    assert [line.split()[0] for line in ran.stdout.splitlines() if "%" in line and "/" in line] == [
        "isolated",
        "pooled_fifo",
        "forebay",
    ]
    assert "share of the work" in ran.stdout


def test_json_holds_all_figures_and_nothing_else(scenario):
    ran = invoke(scenario, "--json", "--policy", "forebay", "--policy", "edf", "--seed", 7, "--scale", 2)
    told = json.loads(ran.stdout)
    assert (told["title"], told["seed"], told["scale"], told["gpus"]) == ("small", 7, 2.0, 3)
    assert list(told["policies"]) == ["forebay", "edf"]
    found = told["policies"]["forebay"]
    assert found["is_whole"]
    assert 0 < found["utilisation"] <= 1
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["latency_ms"]["p99"]
    assert sum(tenant["share"] for tenant in found["tenants"].values()) == pytest.approx(1, abs=1e-4)
    assert ran.stderr == ""


def test_the_number_of_requests_ends_a_run_and_prolongs_it(scenario):
    for count in (50, 1_500):
        told = json.loads(invoke(scenario, "--json", "--policy", "forebay", "--requests", count).stdout)
        assert told["policies"]["forebay"]["requests"] == count


def test_a_run_within_the_warm_up_measured_nothing_and_says_so(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(as_toml(raw_scenario(duration_s=30.0, warmup_s=20.0)))
    asked = path, "--policy", "forebay", "--requests", 2
    assert json.loads(invoke(*asked, "--json").stdout)["policies"]["forebay"]["attainment"] is None
    told = invoke(*asked).stdout
    assert "forebay: nothing was measured, as no request came after the warm-up of 20 s" in told
    assert "100.00%" not in told


def test_a_search_tells_what_it_found(scenario):
    told = json.loads(invoke(scenario, "--json", "--policy", "pooled_fifo", "--find", "load").stdout)
    assert told["found"]["pooled_fifo"]["load"] > 1
    assert told["policies"]["pooled_fifo"]["attainment"] >= 0.99
    ran = invoke(scenario, "--policy", "pooled_fifo", "--find", "gpus", "--scale", 4)
    assert "GPUs" in ran.stdout
    told = json.loads(invoke(scenario, "--json", "--policy", "pooled_fifo", "--find", "nothing").stdout)
    assert "found" not in told
    assert ran.exit_code == 0


def test_another_trace_is_put_under(scenario, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * n, "input_length": 64, "output_length": 1} for n in range(200)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = json.loads(invoke(scenario, "--json", "--policy", "forebay", "--trace", trace).stdout)
    assert told["policies"]["forebay"]["requests"] == pytest.approx(300, abs=2)
    trace.write_text('{"timestamp": 1, "input_length": -1, "output_length": 1}\n')
    refused = invoke(scenario, "--trace", trace)
    assert str(refused.exception).startswith(f"{trace}:1: input_length: expected a whole number")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(scenario, tmp_path, suffix):
    path = tmp_path / f"small.{suffix}"
    ran = invoke(scenario, "--plot", path)
    assert ran.exit_code == 0, ran.output
    drawn = path.read_bytes()
    if suffix == "png":
        assert drawn.startswith(b"\x89PNG")
        assert len(drawn) > 20_000
    else:
        assert ET.fromstring(drawn).tag.endswith("svg")


def test_without_matplotlib_one_line_says_what_to_install(scenario, tmp_path, monkeypatch):
    imported = builtins.__import__

    def missing(name, *arguments, **named):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    ran = invoke(scenario, "--plot", tmp_path / "small.png")
    assert isinstance(ran.exception, SimulationError)
    assert str(ran.exception) == "--plot needs matplotlib, which is not installed: pip install 'forebay[plot]'"
    assert ran.stdout == ""  # said before anything is run


def test_bad_options_are_refused_in_one_line(scenario, tmp_path):
    assert invoke().exit_code == 2
    for option in (["--requests", 0], ["--scale", "nan"], ["--scale", 0], ["--seed", -1], ["--find", "luck"]):
        assert invoke(scenario, *option).exit_code == 2
    for arguments, said in (
        ([scenario, "--policy", "magic"], "no policy 'magic': there are isolated, "),
        ([scenario, "--plot", tmp_path / "x.gif"], "x.gif: expected a name that ends in .png or .svg"),
        ([scenario, "--plot", tmp_path / "no" / "x.png"], "no such folder"),
        ([scenario, "--trace", tmp_path / "gone"], "no such trace"),
        (["gone"], "gone: no such scenario: give a file, or one of "),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 1
        assert said in str(refused.exception)
        assert "\n" not in str(refused.exception)


def test_what_ships_is_listed():
    told = json.loads(invoke("--list", "--json").stdout)
    assert set(told["scenarios"]) == set(shipped())
    assert set(told["policies"]) == set(POLICIES)
    assert "forebay" in invoke("--list").stdout


def test_an_interrupt_prints_what_there_is_and_begins_no_more(scenario, monkeypatch):
    run = Runs.run

    def stopped(self, policy, *arguments, **named):
        self._report = None if policy == "isolated" else interrupt
        return run(self, policy, *arguments, **named)

    monkeypatch.setattr(Runs, "run", stopped)
    ran = invoke(scenario, "--json", "--requests", 5_000)
    told = json.loads(ran.stdout)
    assert ran.exit_code == 130
    assert {name: found["is_whole"] for name, found in told["policies"].items()} == {"isolated": True, "pooled_fifo": False}
    assert ran.stderr == "stopped: these are the figures so far\n"


def interrupt(_policy, arrived, _now_ms):
    if arrived:
        raise KeyboardInterrupt
