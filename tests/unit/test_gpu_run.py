"""`make gpu` on machines with and without a GPU; no engine is installed and none runs."""

import pynvml
import pytest
from gpu import run

from deploy.engines import RECIPES, Tried


def test_without_a_gpu_it_ends_with_one_line_and_3(monkeypatch, capsys):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert run.main([]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("no NVIDIA GPU here (")


def test_an_unknown_engine_is_wrong_usage(capsys):
    assert run.main(["tpu"]) == 2
    assert "transformer, ssm, moe, hybrid" in capsys.readouterr().err


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("moe", 1)])
def test_with_one_every_engine_is_tried_and_one_that_fails_is_told(monkeypatch, capsys, broken, code):
    asked = []

    def tried(kind):
        asked.append(kind)
        return Tried(works=kind != broken, told="a token", seconds=1.0)

    monkeypatch.setattr(run, "gpus", lambda: ["A GPU"])
    monkeypatch.setattr(run, "tried", tried)
    assert run.main([]) == code
    assert asked == list(RECIPES)
    out = capsys.readouterr().out
    assert "A GPU" in out
    assert all(f"\n{kind} " in out or f"\n {kind} " in out for kind in asked)
