"""The example configuration names every setting, with its default."""

import tomllib
from pathlib import Path

import msgspec

from schemas.config import Config, load_config

EXAMPLE = Path(__file__).parents[2] / "deploy" / "forebay.example.toml"
SAID_IN_A_COMMENT = {
    ("blobs", "store"),
    ("kafka", "sasl_username"),
    ("kafka", "sasl_password"),
    ("kafka", "ssl_cafile"),
    ("worker", "hop"),
}


def test_the_example_says_the_defaults():
    assert load_config(EXAMPLE, {}) == Config()


def test_the_example_leaves_out_nothing():
    said = tomllib.loads(EXAMPLE.read_text())
    for section, fields in msgspec.to_builtins(Config()).items():
        if section in {"engines", "tenants"}:
            continue
        for name, value in fields.items():
            assert (section, name) in SAID_IN_A_COMMENT or name in said[section], f"[{section}] {name}"
            if isinstance(value, dict) and name in said[section]:
                assert set(said[section][name]) == {key for key, below in value.items() if below is not None}
