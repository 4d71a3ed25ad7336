"""What every layer of tests may ask for."""

pytest_plugins = ["services"]
