"""Which engines a local stack starts where none is named: a simulated one only where no real one can run."""

import pytest

from deploy.local import plan
from schemas import parse_config
from schemas.config import EngineConfig

REAL, MADE_UP, SIM = {"kind": "transformer"}, {"kind": "moe", "backend": "sim"}, {"kind": "sim"}


@pytest.mark.parametrize(
    ("engines", "installed", "names", "is_made_up"),
    [
        ({"a": REAL, "b": MADE_UP, "c": SIM}, False, ["a"], False),
        ({"a": REAL, "b": MADE_UP}, True, ["a"], False),
        ({"b": MADE_UP, "c": SIM}, True, ["transformer"], False),
        ({"c": SIM, "b": MADE_UP}, False, ["b", "c"], True),
        ({"transformer": {"kind": "transformer", "backend": "sim"}}, True, ["transformer"], True),
        ({}, True, ["transformer"], False),
        ({}, False, ["sim"], True),
    ],
)
def test_real_ones_before_simulated_ones(monkeypatch, engines, installed, names, is_made_up):
    monkeypatch.setattr(plan, "engine_config", lambda kind: EngineConfig(kind=kind) if installed else None)
    found, note = plan.default_engines(parse_config({"engines": engines}))
    assert (found, note is not None) == (names, is_made_up)
    assert note is None or all(f"`{name}`" in note for name in names)
