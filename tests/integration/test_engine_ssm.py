"""The SSM engine on small models: its cases run in its own environment, in one process for all (`ssm_checks.py`)."""

import re
from pathlib import Path

import pytest
from in_environment import report

from deploy.engines import install

MODELS_S, CASES_S, INSTALL_S = 300, 900, 1500
HERE = Path(__file__).parent
TEXT = "".join((HERE / name).read_text(encoding="utf-8") for name in ("ssm_numbers.py", "ssm_runs.py"))
CASES = re.findall(r"^async def case_(\w+)", TEXT, re.MULTILINE)  # they import what only their environment has


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Make the models, and run all cases."""
    home = tmp_path_factory.mktemp("ssm")
    python = install("ssm", "cpu", lambda _: None).python
    made = report(python, "tests/integration/ssm_models.py", home, log=home / "models.log", limit_s=MODELS_S)
    assert made.code == 0, made.ended
    return report(python, "tests/integration/ssm_checks.py", home, log=home / "cases.log", limit_s=CASES_S)


@pytest.mark.timeout(INSTALL_S + MODELS_S + CASES_S)
@pytest.mark.parametrize("case", CASES)
def test_ssm(case, told, record_property):
    result = told[case]
    record_property("figures", result.get("figures"))
    assert result["error"] is None, result["error"]
