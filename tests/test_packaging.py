"""What a user installs: names of our own, all that the stack needs, and nothing heavy."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import HeaderParser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trees import PACKAGES, ROOT, copy_tree, tracked

HEAVY = {"torch", "vllm", "mamba-ssm", "tritonclient", "transformers", "numpy"}


def toml(name):
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PACKAGES)
def test_each_of_our_names_is_ours_alone(name):
    assert set(packages_distributions().get(name, [])) == {"forebay"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as a stranger builds it: by way of the source distribution, from a clean tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    copy_tree(tree)
    built = subprocess.run(
        [uv.find_uv_bin(), "build", "--out-dir", str(out), str(tree)], capture_output=True, text=True, check=False, timeout=200
    )
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    assert list(out.glob("*.tar.gz"))
    with zipfile.ZipFile(found) as opened:
        yield opened


def test_the_wheel_holds_every_file_of_our_packages(wheel):
    ours = {path.as_posix() for path in tracked() if path.parts[0] in PACKAGES and path.name != "README.md"}
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert ours - names == set()
    assert names - ours == set()
    assert {"deploy/local/pom.xml", "deploy/demo/passages.jsonl"} <= names
    traces = "deploy/simulate/traces"
    assert {f"{traces}/AzureLLMInferenceTrace_conv.csv", f"{traces}/LICENSE-azure-CC-BY-4.0.txt"} <= names


def test_the_wheel_names_its_licence_and_its_command(wheel):
    meta = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert b"Apache License" in wheel.read(meta["licenses/LICENSE"])
    assert "forebay = deploy.entry:main" in wheel.read(meta["entry_points.txt"]).decode()
    assert sorted(wheel.read(meta["top_level.txt"]).decode().split()) == sorted(PACKAGES)


def test_the_wheel_asks_for_nothing_heavy_unless_an_extra_is_named(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(wheel.read(name).decode())
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    core = {canonicalize_name(one.name) for one in wanted if not one.marker or "extra" not in str(one.marker)}
    assert {"aiokafka", "msgspec"} <= core
    assert not core & HEAVY
    assert set(metadata.get_all("Provides-Extra")) == {"transformer", "ssm", "moe", "s3", "gateway", "plot", "dev"}


def test_nothing_heavy_follows_from_what_the_core_asks_for():
    packages = {}
    for package in toml("uv.lock")["package"]:
        packages.setdefault(package["name"], []).append(package)
    reached, waiting = set(), ["forebay"]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += [one["name"] for package in packages[name] for one in package.get("dependencies", [])]
    assert "aiokafka" in reached
    assert not reached & HEAVY


def test_the_lock_file_is_that_of_the_project_file():
    project = toml("pyproject.toml")["project"]
    (ours,) = [package for package in toml("uv.lock")["package"] if package["name"] == "forebay"]
    extras = project["optional-dependencies"]
    asked = {
        (canonicalize_name(r.name), str(r.specifier)) for r in map(Requirement, sum(extras.values(), project["dependencies"]))
    }
    locked = {
        (one["name"], str(Requirement(one["name"] + one.get("specifier", "")).specifier))
        for one in ours["metadata"]["requires-dist"]
    }
    assert asked == locked, "run `uv lock`"
    assert sorted(ours["metadata"]["provides-extras"]) == sorted(extras)


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, cwd=Path(sys.prefix)
    )


def test_the_client_is_imported_without_brokers_engines_or_redis():
    heavy = {"aiokafka", "redis", "torch", "vllm", "rich", "click", "kafka"}
    ran = run(f"import sys; from broker import Client; print(sorted({heavy!r} & sys.modules.keys()))")
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


@pytest.mark.parametrize("name", PACKAGES)
def test_each_package_is_imported_without_engines_and_without_a_word(name):
    ran = run(f"import sys, {name}; print(sorted({{'torch', 'vllm', 'tritonclient', 'mamba_ssm'}} & sys.modules.keys()))")
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")
