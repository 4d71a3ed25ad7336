"""`forebay tenants` and `forebay engines set|show|reset`: what they send, what they say, what they refuse."""

import asyncio

import msgspec
import pytest
from click.testing import CliRunner

from broker import Client, engine_change, tenant_change
from broker.steering import read_settings
from broker.transport.memory import MemoryCluster, MemoryTransport
from deploy.cli import steering as module
from deploy.cli.engines import engines
from deploy.cli.tenants import tenants
from schemas import InvalidMessage, Topics, parse_config

TABLES = """
[engines.llama]
kind = "transformer"
pool = "big"
tokens_per_s_max = 1000.0

[engines.mamba]
kind = "ssm"

[tenants.research]
weight = 3.0
tokens_per_s = 50.0
tokens_per_s_max = 80.0
"""


@pytest.fixture
def cluster(monkeypatch):
    """A cluster with a control topic, on which every client of the command line finds itself."""
    cluster = MemoryCluster()
    cluster.add_topic(Topics().control)
    monkeypatch.setattr(module, "Client", lambda config: Client(config, transport=MemoryTransport(cluster)))
    return cluster


@pytest.fixture
def invoke(cluster, tmp_path):  # noqa: ARG001 - it must be there
    path = tmp_path / "forebay.toml"
    path.write_text(TABLES)

    def run(group, *arguments):
        return CliRunner().invoke(group, [*arguments, "--config", str(path)], terminal_width=200)

    return run


def shown(invoke, group, *names):
    return msgspec.json.decode(invoke(group, "show", *names, "--json").stdout)


def written(cluster):
    return cluster.topics[Topics().control].logs[0].end


def test_set_says_what_holds_then_and_show_tells_the_three_apart(invoke):
    done = invoke(tenants, "set", "research", "--weight", "5", "--tokens-per-s-max", "none", "--pause")
    assert done.exit_code == 0
    assert done.stdout == "tenant research: weight 5, tokens_per_s 50, burst_s 2, paused\n"
    fact = shown(invoke, tenants)["research"]
    assert (fact["configured"]["weight"], fact["holds"]["weight"]) == (3.0, 5.0)
    assert fact["set"] == {"weight": 5.0, "tokens_per_s_max": "none", "paused": True}
    assert (fact["configured"]["tokens_per_s_max"], fact["holds"]["tokens_per_s_max"]) == (80.0, None)
    invoke(tenants, "set", "research", "--weight", "config", "--resume")
    assert shown(invoke, tenants, "research")["research"]["set"] == {"tokens_per_s_max": "none", "paused": False}


def test_a_weight_of_one_and_a_bound_of_one_are_said_as_any_other(invoke):
    done = invoke(tenants, "set", "research", "--weight", "1", "--queue-max", "1")
    assert done.stdout.startswith("tenant research: weight 1, tokens_per_s 50, ")
    assert "queue_max 1, not paused" in done.stdout


def test_reset_goes_back(invoke):
    invoke(tenants, "set", "research", "--weight", "5")
    done = invoke(tenants, "reset", "research")
    assert (
        done.stdout == "tenant research: weight 3, tokens_per_s 50, tokens_per_s_max 80, burst_s 2, not paused, as configured\n"
    )
    assert shown(invoke, tenants)["research"]["set"] == {}


def test_a_tenant_without_an_entry_has_the_defaults_and_may_be_set(invoke):
    assert "stranger" not in shown(invoke, tenants)
    assert shown(invoke, tenants, "stranger")["stranger"]["holds"]["burst_s"] == 2.0
    invoke(tenants, "set", "stranger", "--queue-max", "10")
    assert shown(invoke, tenants)["stranger"]["holds"]["queue_max"] == 10


def test_an_engine_is_set_by_its_name_or_its_pools(invoke):
    done = invoke(engines, "set", "llama", "--pause", "--json")
    assert msgspec.json.decode(done.stdout)["engines"] == ["llama"]
    invoke(engines, "set", "big", "--requests-per-s-max", "2.5")
    found = shown(invoke, engines)
    assert found["big"]["set"] == {"requests_per_s_max": 2.5, "paused": True}
    assert found["big"]["holds"]["tokens_per_s_max"] == 1000.0
    assert found["mamba"]["set"] == {}
    assert invoke(engines, "reset", "big").stdout == "engine big: tokens_per_s_max 1000, burst_s 2, not paused, as configured\n"


def test_the_table_for_people(invoke):
    invoke(tenants, "set", "research", "--weight", "5")
    rows = [line.split() for line in invoke(tenants, "show").stdout.splitlines()]
    assert rows[0] == ["tenant", "setting", "configured", "set", "holds"]
    assert rows[1] == ["research", "weight", "3", "5", "5"]
    assert ["tokens_per_s", "50", "50"] in rows
    assert not any("queue_max" in row for row in rows), "what is neither configured nor set is not worth a line"
    assert ["queue_max", "-", "-"] in [line.split() for line in invoke(tenants, "show", "research").stdout.splitlines()]


@pytest.mark.parametrize(
    ("group", "arguments", "said"),
    [
        (tenants, ["set", "a"], "nothing is given"),
        (tenants, ["set", "a", "--weight", "much"], "much"),
        (tenants, ["set", "a", "--weight", "0"], "range"),
        (tenants, ["set", "a", "--weight", "nan"], "finite"),
        (tenants, ["set", "a", "--burst-s", "none"], "cannot be `none`"),
        (tenants, ["set", "a", "--queue-max", "2.5"], "whole number"),
        (engines, ["set", "llama"], "nothing is given"),
        (engines, ["set", "llama", "--weight", "2"], "No such option"),
    ],
)
def test_wrong_usage_sends_nothing(invoke, cluster, group, arguments, said):
    done = invoke(group, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert written(cluster) == 0


@pytest.mark.parametrize(
    ("group", "arguments", "said"),
    [
        (
            tenants,
            ["set", "research", "--tokens-per-s", "90"],
            "`tokens_per_s`: expected at most its `tokens_per_s_max` (80), got 90",
        ),
        (tenants, ["set", "no spaces", "--pause"], "`tenant`: "),
        (tenants, ["set", "a", "--weight", "2000000"], "`weight`: "),
        (tenants, ["reset", ""], "`tenant`: "),
        (engines, ["set", "lama", "--pause"], "no engine called 'lama' is configured: known are big, llama, mamba"),
        (engines, ["reset", "lama"], "known are"),
        (engines, ["show", "lama"], "known are"),
    ],
)
def test_what_no_configuration_may_say_is_refused_before_it_is_sent(invoke, cluster, group, arguments, said):
    done = invoke(group, *arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, InvalidMessage)
    assert said in str(done.exception)
    assert written(cluster) == 0


def test_the_client_does_the_same(cluster):
    config = parse_config({"engines": {"sim": {"kind": "sim"}}})

    async def scenario():
        async with Client(config, transport=MemoryTransport(cluster)) as client:
            assert (await client.steer(tenant_change("a", weight=2))).tenants()["a"].weight == 2.0
            assert (await client.steer(engine_change("sim", paused=True))).pools()["sim"].paused
            with pytest.raises(InvalidMessage, match="no engine"):
                await client.steer(engine_change("gone", paused=True))
            with pytest.raises(InvalidMessage, match="`wait`: unknown field"):
                tenant_change("a", wait=1)
            return await client.settings(), await read_settings(MemoryTransport(cluster), config)

    for found in asyncio.run(scenario()):
        assert (list(found.tenants()), list(found.pools())) == (["a"], ["sim"])
