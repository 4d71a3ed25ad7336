"""The engines' real environments: their packages, their models, and our own code, in interpreters that are not ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.engines import engine_config, install, try_token, worker_environment
from deploy.engines.packages import PACKAGES

INSTALL_S = 1500
ASK = f"""
import importlib, importlib.metadata, importlib.util, json
places = {{name: importlib.import_module(name).__file__ for name in {PACKAGES!r}}}
import deploy.processes, engine_consumers.worker
print(json.dumps({{
    "places": places,
    "vllm": importlib.util.find_spec("vllm") is not None,
    "left_out": [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)],
    "version": importlib.metadata.version("forebay"),
}}))
"""


@pytest.mark.timeout(INSTALL_S)
def test_the_environment_holds_vllm_and_this_very_forebay(tmp_path):
    install("transformer", "cpu", lambda _: None)
    config = engine_config("transformer")
    environment = {**os.environ, **worker_environment(config.python)}
    done = subprocess.run(
        [config.python, "-P", "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    ours = Path(__file__).parents[2]
    assert all(Path(place).resolve().is_relative_to(ours) for place in told["places"].values())
    assert told["vllm"]
    assert told["left_out"] == []
    assert Path(config.model_path, "model.safetensors").stat().st_size > 2e8
    assert Path(config.model_path, "chat_template.jinja").exists()
    assert Path(config.env["LD_PRELOAD"]).exists()
    assert config.python != sys.executable


@pytest.mark.timeout(INSTALL_S)
@pytest.mark.parametrize("kind", ["ssm", "moe"])
def test_what_was_installed_gives_a_token(kind):
    found = install(kind, "cpu", lambda _: None)
    assert "tiny" in found.weights
    tried = try_token(engine_config(kind, "cpu"))
    assert tried.works, tried.told
