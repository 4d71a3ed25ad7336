"""The stack's forebay.toml: three values are set, engines are added, the rest is the user's."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.errors import LocalStackError
from deploy.local.settings import HEAD, add_engine, read_text, set_value, write_text
from schemas.config import EngineConfig, parse_config

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

USERS = """\
# mine
[kafka]
bootstrap = "old:1"   # the address
topic_prefix = "cell-1"

[worker]  # slow ones
heartbeat_ms = 500
"""


def test_a_value_is_replaced_and_every_other_line_stays():
    edited = set_value(USERS, "kafka", "bootstrap", "new:2")
    assert edited.splitlines() == ['bootstrap = "new:2"' if line.startswith("bootstrap") else line for line in USERS.splitlines()]


def test_a_missing_value_and_a_missing_section_are_added():
    edited = set_value(set_value(USERS, "kafka", "delivery", "at_least_once"), "redis", "url", "redis://h:1/0")
    config = parse_config(tomllib.loads(edited))
    assert (config.kafka.delivery, config.kafka.topic_prefix, config.kafka.bootstrap) == ("at_least_once", "cell-1", "old:1")
    assert config.redis.url == "redis://h:1/0"
    assert config.worker.heartbeat_ms == 500
    assert all(line in edited.splitlines() for line in USERS.splitlines())


@pytest.mark.parametrize("text", ['kafka = { bootstrap = "a:1" }\n', 'kafka.bootstrap = "a:1"\n', "not toml at all\n[kafka]\n"])
def test_what_cannot_be_edited_is_refused_with_what_to_do(text):
    with pytest.raises(LocalStackError, match=r"cannot set `kafka\.bootstrap` in forebay\.toml: write it as a line"):
        set_value(text, "kafka", "bootstrap", "b:2")


@given(
    model=WORDS.filter(lambda word: word != "auto"),
    aliases=st.lists(WORDS.filter(lambda word: word != "auto"), max_size=3),
    env=st.dictionaries(WORDS, WORDS, max_size=3),
    options=st.dictionaries(
        WORDS,
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | WORDS
        | st.lists(WORDS),
        max_size=3,
    ),
    slots=st.integers(1, 1_000),
)
def test_any_engine_that_toml_can_say_comes_back_as_it_was(model, aliases, env, options, slots):
    options = {key: value for key, value in options.items() if value is not None}
    engine = EngineConfig(kind="sim", model=model or "m", aliases=aliases, env=env, options=options, slots=slots)
    config = parse_config(tomllib.loads(add_engine(HEAD, "one", engine)))
    assert config.engines == {"one": engine}


def test_two_engines_and_values_stand_side_by_side():
    text = add_engine(add_engine(HEAD, "a", EngineConfig(kind="sim", env={"X": "1"})), "b", EngineConfig(kind="sim"))
    text = set_value(text, "kafka", "bootstrap", "h:1")
    config = parse_config(tomllib.loads(text))
    assert sorted(config.engines) == ["a", "b"]
    assert config.kafka.bootstrap == "h:1"


def test_reading_and_writing(tmp_path):
    path = tmp_path / "forebay.toml"
    assert read_text(path) == HEAD
    write_text(path, USERS)
    assert read_text(path) == USERS
    assert [entry.name for entry in tmp_path.iterdir()] == ["forebay.toml"]
    with pytest.raises(LocalStackError, match="cannot write"):
        write_text(tmp_path / "missing" / "forebay.toml", USERS)
