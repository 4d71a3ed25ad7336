"""Kinds are open, and known without importing what they need."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from engine_consumers import registry
from engine_consumers.sim import SimEngine
from engine_consumers.transformer import TransformerEngine
from schemas.config import EngineConfig
from schemas.errors import ConfigError


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(registry, "_paths", dict(registry._paths))


def test_the_kinds_that_ship_are_loaded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(registry.load(EngineConfig(kind="sim")), SimEngine)
    made = registry.load(EngineConfig(kind="transformer", model_path=str(tmp_path)))
    assert isinstance(made, TransformerEngine)


def test_an_unknown_kind_names_those_that_exist():
    with pytest.raises(ConfigError, match=r"`kind`: no engine of kind 'smi': expected one of moe, sim, ssm, transformer"):
        registry.load(EngineConfig(kind="smi"))


def test_what_runs_an_engine_may_be_another_kind_than_its_own():
    assert isinstance(registry.load(EngineConfig(kind="moe", backend="sim")), SimEngine)
    with pytest.raises(ConfigError, match=r"`backend`: no engine of kind 'smi': expected one of moe, sim, ssm, transformer"):
        registry.load(EngineConfig(kind="sim", backend="smi"))


def test_a_kind_may_be_registered():
    registry.register("mine", "engine_consumers.sim:SimEngine")
    assert "mine" in registry.kinds()
    assert isinstance(registry.load(EngineConfig(kind="mine")), SimEngine)


def test_a_kind_may_come_with_a_package(monkeypatch):
    entry = EntryPoint("theirs", "engine_consumers.sim:SimEngine", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINTS else [])
    assert "theirs" in registry.kinds()
    assert isinstance(registry.load(EngineConfig(kind="theirs")), SimEngine)


@pytest.mark.parametrize("path", ["no_such_module:Engine", "engine_consumers.sim:NoSuchEngine"])
def test_a_kind_that_cannot_be_imported_says_so(path):
    registry.register("broken", path)
    with pytest.raises(ConfigError, match=f"the engine 'broken' .{path}. cannot be imported"):
        registry.load(EngineConfig(kind="broken"))


def test_making_engines_imports_no_heavy_library(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from engine_consumers.registry import load; from schemas.config import EngineConfig\n"
        "load(EngineConfig(kind='sim'))\n"
        f"load(EngineConfig(kind='transformer', model_path={str(tmp_path)!r}))\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'pynvml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
