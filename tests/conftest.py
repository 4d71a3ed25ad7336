"""What every layer of tests may ask for."""

from hypothesis import settings

pytest_plugins = ["services"]

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")
