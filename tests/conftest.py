"""What every layer of tests may ask for."""

import logging

import pytest
from hypothesis import settings

pytest_plugins = ["services"]

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _log_as_before():
    """Put the level of our log back: a program that was run in this process would hide what later tests look for."""
    log = logging.getLogger("forebay")
    level = log.level
    yield
    log.setLevel(level)
