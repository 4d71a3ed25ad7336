"""What `forebay check` finds wrong, and what it only warns of."""

import asyncio
import time

import click
import pytest
from client_world import in_world
from memory_stack import config_of

from deploy.cli.check import look_at_blobs, look_at_kafka, look_at_redis, of_config, of_sizes
from memory_coordinator import MemoryBoard
from schemas import EngineStatus, parse_config


def of(raw):
    with click.Context(click.Command("check")):
        return [(found.verdict, found.said) for found in of_config(parse_config(raw))]


def test_an_engine_of_an_unknown_kind_is_an_error_that_names_those_there_are():
    told, unknown = of({"engines": {"a": {"kind": "sim"}, "b": {"kind": "simm"}}})
    assert told[0] == "ok"
    assert unknown[0] == "error"
    assert unknown[1].startswith("`engines.b.kind`: no engine of kind 'simm': expected one of ")
    assert "sim, ssm, transformer" in unknown[1]


def test_a_kind_that_only_another_environment_may_know_is_a_warning():
    (_, unknown) = of({"engines": {"b": {"kind": "theirs", "python": "/opt/theirs/bin/python"}}})
    assert unknown[0] == "warning"
    assert "/opt/theirs/bin/python has to have a package that brings it" in unknown[1]


def test_what_runs_an_engine_has_to_be_known_and_not_its_kind():
    assert [verdict for verdict, _ in of({"engines": {"a": {"kind": "moe", "backend": "sim"}}})] == ["ok"]
    (_, unknown) = of({"engines": {"a": {"kind": "sim", "backend": "simm"}}})
    assert unknown[0] == "error"
    assert unknown[1].startswith("`engines.a.backend`: no engine of kind 'simm': expected one of ")


def test_a_simulated_engine_is_told_from_a_real_one():
    async def scenario():
        board = MemoryBoard()
        await board.write(EngineStatus("sim", "sim", "sim", "w", 1, int(time.time() * 1000), slots=4), 1_000)
        return await look_at_redis(config_of(), board, "error")

    (found,) = [one for one in asyncio.run(scenario()) if one.subject == "engines.sim"]
    assert (found.verdict, found.said) == ("ok", "1 workers with 4 slots, serving sim, simulated: no model runs")


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


@pytest.mark.parametrize(("record", "prompt", "verdict"), [(8 << 20, 8_000_000, "ok"), (1 << 20, 8_000_000, "warning")])
def test_sizes_that_do_not_agree_are_told(record, prompt, verdict):
    raw = {"kafka": {"record_bytes_max": record}, "dispatcher": {"prompt_bytes_max": prompt}}
    (found,) = of_sizes(parse_config(raw))
    assert found.verdict == verdict
    assert str(min(prompt, record - 65_536)) in found.said


def test_a_store_is_tried(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    stores = {"ok": f"file://{tmp_path}/store", "error": f"file://{tmp_path}/file/below"}
    for verdict, store in stores.items():
        (found,) = asyncio.run(look_at_blobs(parse_config({"blobs": {"store": store}})))
        assert (found.subject, found.verdict) == ("blobs", verdict)
    assert asyncio.run(look_at_blobs(parse_config({}))) == []
