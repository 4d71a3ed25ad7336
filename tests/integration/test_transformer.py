"""The transformer engine beyond the suite of all engines: `transformer_checks.py`, run in its own environment."""

import pytest
from in_environment import Report, report

from deploy.engines import engine_config, install

CHECKS_S = 600
CHECKS = ("arguments_that_vllm_does_not_know", "an_adapter_that_does_not_fit", "adapters_answer_by_their_names")


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Report:
    folder = tmp_path_factory.mktemp("transformer")
    found, config = install("transformer", "cpu", lambda _: None), engine_config("transformer", "cpu")
    where = {"log": folder / "checks.log", "limit_s": CHECKS_S, "environment": config.env}
    return report(found.python, "tests/integration/transformer_checks.py", found.model_path, folder, **where)


@pytest.mark.timeout(CHECKS_S + 1200)
@pytest.mark.parametrize("check", CHECKS)
def test_transformer(check, told):
    assert told[check]["error"] is None, told[check]["error"]
