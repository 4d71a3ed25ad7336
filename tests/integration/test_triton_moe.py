"""The model behind Triton, and its server, in the environment of the engine `moe`; see `triton_checks.py`."""

import pytest
from in_environment import report

from deploy.engines import install

INSTALL_S, CHECKS_S = 1_200, 600
CASES = (
    "tokens_are_those_of_transformers_alone_and_in_company",
    "logits_are_the_same_to_the_bit_whatever_is_resident",
    "eight_bits_are_near_and_do_not_depend_on_what_is_resident",
    "draws_are_the_same_alone_and_in_company",
    "who_waits_is_served_when_all_others_end_at_once",
    "ends_stops_and_refusals",
    "who_is_cancelled_or_hangs_up_leaves_the_loop",
    "the_launcher_serves_and_ends_when_told",
    "nothing_outlives_whoever_started_it",
    "a_model_that_cannot_be_served_is_told_in_a_line",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    home = tmp_path_factory.mktemp("triton")
    found = install("moe", "cpu", lambda _: None)
    return report(found.python, "tests/integration/triton_checks.py", home, log=home / "checks.log", limit_s=CHECKS_S)


@pytest.mark.timeout(INSTALL_S + CHECKS_S)
@pytest.mark.parametrize("case", CASES)
def test_triton(case, told):
    assert told[case]["error"] is None, told[case]["error"]


def test_every_case_is_asked_for(told):
    assert set(told) == set(CASES)
