"""What `forebay check` finds wrong, and what it only warns of."""

import asyncio

import click
import pytest
from client_world import in_world
from memory_stack import config_of

from deploy.cli.check import look_at_kafka, look_at_redis, of_config
from schemas import parse_config


def of(raw):
    with click.Context(click.Command("check")):
        return [(found.verdict, found.said) for found in of_config(parse_config(raw))]


def test_an_engine_of_an_unknown_kind_is_an_error_that_names_those_there_are():
    told, unknown = of({"engines": {"a": {"kind": "sim"}, "b": {"kind": "simm"}}})
    assert told[0] == "ok"
    assert unknown[0] == "error"
    assert unknown[1].startswith("`engines.b.kind`: no engine of kind 'simm': expected one of ")
    assert "sim, transformer" in unknown[1]


def test_a_kind_that_only_another_environment_may_know_is_a_warning():
    (_, unknown) = of({"engines": {"b": {"kind": "theirs", "python": "/opt/theirs/bin/python"}}})
    assert unknown[0] == "warning"
    assert "/opt/theirs/bin/python has to have a package that brings it" in unknown[1]


@pytest.mark.parametrize("absent", ["warning", "error"])
def test_that_nothing_runs_is_what_the_caller_makes_of_it(absent):
    async def scenario(world):
        transport = world.way("check")
        before = [*await look_at_kafka(world.config, transport, absent), *await look_at_redis(world.config, world.board, absent)]
        world.answer()
        await asyncio.sleep(5)
        after = [*await look_at_kafka(world.config, transport, absent)]
        return [(one.subject, one.verdict) for one in before], [(one.subject, one.verdict) for one in after]

    before, after = in_world(scenario, config_of())
    assert ("dispatcher", absent) in before
    assert ("engines.sim", absent) in before
    assert ("dispatcher", "ok") in after
