"""The images' recipes: well formed, without rights they do not need, and with all that they copy."""

import subprocess
import sys
from pathlib import Path

import pytest
from trees import PACKAGES, ROOT

HADOLINT = Path(sys.executable).parent / "hadolint"
FILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


def test_there_is_one_for_each_engine_that_has_an_environment_and_one_for_the_dispatcher():
    assert [file.stem for file in FILES] == ["dispatcher", "moe", "ssm", "transformer"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_linter_finds_nothing(file):
    done = subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_runs_is_not_root(file):
    users = [line for line in file.read_text().splitlines() if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]


def test_what_is_built_from_holds_our_packages_and_nothing_of_a_checkout_beside():
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert let_in == {"pyproject.toml", "README.md", "LICENSE", *PACKAGES}
