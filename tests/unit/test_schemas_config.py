"""The configuration: what is refused and how it is said, and what the environment may override."""

import pytest

from memory_coordinator import StatusBoard
from schemas import ConfigError, load_config, parse_config
from schemas.config import RedisConfig

SIM = {"kind": "sim"}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"kafak": {}}, "`kafak`: unknown field"),
        ({"kafka": {"boot": "x"}}, "`kafka.boot`: unknown field"),
        ({"kafka": 5}, "`kafka`: Expected `object`, got `int`"),
        ({"kafka": {"bootstrap": ""}}, "`kafka.bootstrap`: Expected `str` of length >= 1"),
        ({"kafka": {"bootstrap": 9092}}, "`kafka.bootstrap`: Expected `str`, got `int`"),
        (
            {"kafka": {"delivery": "perhaps"}},
            "`kafka.delivery`: Invalid enum value 'perhaps': expected one of at_least_once, exactly_once",
        ),
        ({"kafka": {"delivery": 2}}, "`kafka.delivery`: Expected `str`, got `int`: expected one of at_least_once, exactly_once"),
        ({"kafka": {"sasl_mechanism": "GSSAPI"}}, "`kafka.sasl_mechanism`: Invalid enum value 'GSSAPI': expected one of PLAIN, "),
        ({"kafka": {"topic_prefix": "a b"}}, "`kafka.topic_prefix`: Expected `str` matching regex"),
        ({"kafka": {"topic_prefix": "a\n"}}, "`kafka.topic_prefix`: Expected `str` matching regex"),
        ({"kafka": {"topic_prefix": "__consumer"}}, "`kafka.topic_prefix`: Expected `str` matching regex"),
        ({"kafka": {"request_timeout_ms": 0}}, "`kafka.request_timeout_ms`: Expected `int` >= 1"),
        ({"kafka": {"request_timeout_ms": 1.5}}, "`kafka.request_timeout_ms`: Expected `int`, got `float`"),
        (
            {"kafka": {"request_timeout_ms": 3_000}},
            "`kafka.request_timeout_ms`: expected more than `kafka.rebalance_timeout_ms` (3000)",
        ),
        ({"kafka": {"heartbeat_ms": 6_000}}, "`kafka.heartbeat_ms`: expected less than `kafka.session_timeout_ms` (6000)"),
        ({"kafka": {"bootstrap": "kafka"}}, "`kafka.bootstrap`: 'kafka' has no port: expected HOST:PORT, or several with commas"),
        ({"kafka": {"bootstrap": "a:1, b"}}, "`kafka.bootstrap`: 'b' has no port"),
        ({"kafka": {"bootstrap": "a:1,"}}, "`kafka.bootstrap`: an address is empty"),
        ({"kafka": {"bootstrap": "a b:1"}}, "`kafka.bootstrap`: 'a b:1' is no address"),
        ({"kafka": {"bootstrap": ":1"}}, "`kafka.bootstrap`: ':1' is no address"),
        ({"kafka": {"bootstrap": "kafka://a:1"}}, "`kafka.bootstrap`: 'kafka://a:1' is no address"),
        ({"kafka": {"bootstrap": "::1:9092"}}, "`kafka.bootstrap`: '::1:9092' is no address"),
        ({"kafka": {"bootstrap": "a:port"}}, "`kafka.bootstrap`: 'a:port': the port is a number from 1 to 65535"),
        ({"kafka": {"bootstrap": "a:65536"}}, "`kafka.bootstrap`: 'a:65536': the port is a number from 1 to 65535"),
        (
            {"redis": {"url": "localhost:6379"}},
            "`redis.url`: it does not begin with redis://: expected redis://HOST:PORT/DATABASE",
        ),
        ({"redis": {"url": ""}}, "`redis.url`: it does not begin with redis://"),
        ({"redis": {"url": "redis:localhost"}}, "`redis.url`: it does not begin with redis://"),
        ({"redis": {"url": "redis:///0"}}, "`redis.url`: the host is missing"),
        ({"redis": {"url": "redis://:pass word@h"}}, "`redis.url`: there are spaces in it"),
        ({"redis": {"url": "redis://h:6379x/0"}}, "`redis.url`: the port is a number from 1 to 65535"),
        ({"redis": {"url": "redis://h:0"}}, "`redis.url`: the port is a number from 1 to 65535"),
        ({"redis": {"url": "redis://[::1/0"}}, "`redis.url`: Invalid IPv6 URL"),
        ({"redis": {"url": "redis://h/cache"}}, "`redis.url`: the database is a number"),
        ({"redis": {"url": "unix://"}}, "`redis.url`: the path of the socket is missing"),
        ({"topics": {"min_insync": 2}}, "`topics.min_insync`: expected at most `topics.replication` (1)"),
        ({"worker": {"hop": {"unfinished_max": 401}}}, "`worker.hop.unfinished_max`: Expected `int` <= 400"),
        ({"dispatcher": {"max_hops": 1_000_000}}, "`dispatcher.max_hops`: Expected `int` <= 999999"),
        ({"dispatcher": {"reply_topics": ["a", 1]}}, "`dispatcher.reply_topics[1]`: Expected `str`, got `int`"),
        ({"classes": {"batch_weight": float("inf")}}, "`classes.batch_weight`: Expected `float` <= 1000"),
        ({"tenants": {"a": {"weight": 1e-320}}}, "`tenants.a.weight`: Expected `float` >= 0.001"),
        ({"classes": {"batch_weight": float("nan")}}, "`classes.batch_weight`: Expected `float`"),
        ({"engines": {"one": SIM, "two": {"slots": 4}}}, "`engines.two.kind`: required field is missing"),
        ({"engines": {"one": SIM, "two": SIM | {"slots": 0}}}, "`engines.two.slots`: Expected `int` >= 1"),
        ({"engines": {"one": SIM, "two": SIM | {"slot": 4}}}, "`engines.two.slot`: unknown field"),
        ({"engines": {"one": SIM | {"env": {"A": "1", "B": 2}}}}, "`engines.one.env.B`: Expected `str`, got `int`"),
        ({"engines": {"one": {"kind": "No Such"}}}, "`engines.one.kind`: Expected `str` matching regex"),
        ({"engines": {"one": SIM, "a b": SIM}}, "`engines`: key 'a b': Expected `str` matching regex"),
        ({"engines": {"one": SIM, "two": 2}}, "`engines.two`: Expected `object`, got `int`"),
        ({"tenants": {"acme": {"weight": 1}, "zeta": {"weight": 0}}}, "`tenants.zeta.weight`: Expected `float` >= 0.001"),
        ({"tenants": {"a/b": {}}}, "`tenants`: key 'a/b': Expected `str` matching regex"),
    ],
)
def test_a_bad_value_is_refused_with_its_path(raw, said):
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "forebay.toml")
    assert str(caught.value).startswith(f"forebay.toml: {said}")


@pytest.mark.parametrize(
    "address", ["a:1", "a:1,b:2", "a:1, b:2", "[::1]:9092", "[fe80::1%eth0]:1", "my_host-1.example.org:65535"]
)
def test_addresses_of_kafka_that_are_sound(address):
    assert parse_config({"kafka": {"bootstrap": address}}).kafka.bootstrap == address


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:1",
        "rediss://me:p%20w@h:1/15?ssl_cert_reqs=none",
        "redis://:a:b@[::1]:1/",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_addresses_of_redis_that_are_sound(url):
    assert parse_config({"redis": {"url": url}}).redis.url == url
    StatusBoard(RedisConfig(url=url), "forebay")


def test_pools_are_named_by_their_engines_unless_said_otherwise():
    config = parse_config({"engines": {"b": SIM, "a": SIM | {"pool": "shared"}, "c": SIM | {"pool": "shared"}}})
    assert config.pools == ["b", "shared"]
    assert config.pool("a") == "shared"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "forebay.toml"
    path.write_text(
        '[kafka]\nbootstrap = "kafka:9092"\n[engines.my-engine]\nkind = "sim"\nslots = 2\n[tenants."acme.eu"]\nweight = 2\n'
    )
    return path


def test_without_file_and_environment_the_defaults_hold():
    assert load_config(None, {}) == parse_config({})


def test_the_file_is_read_also_with_a_byte_order_mark(file):
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert load_config(file, {}).kafka.bootstrap == "kafka:9092"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"[kafka", "Expected"),
        (b'kafka = "\xff"', "utf-8"),
        (b"[kafka]\nretries = 5", "`kafka.retries`: unknown field"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, said):
    path = tmp_path / "forebay.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        load_config(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("KAFKA__BOOTSTRAP", "a:1,b:2", lambda c: c.kafka.bootstrap == "a:1,b:2"),
        ("KAFKA__TOPIC_PREFIX", "5", lambda c: c.kafka.topic_prefix == "5"),
        ("KAFKA__TOPIC_PREFIX", "true", lambda c: c.kafka.topic_prefix == "true"),
        ("KAFKA__SASL_PASSWORD", "1234", lambda c: c.kafka.sasl_password == "1234"),
        ("KAFKA__SASL_PASSWORD", '"[x', lambda c: c.kafka.sasl_password == '"[x'),
        ("KAFKA__DELIVERY", "at_least_once", lambda c: c.kafka.delivery == "at_least_once"),
        ("KAFKA__REQUEST_TIMEOUT_MS", "20_000", lambda c: c.kafka.request_timeout_ms == 20_000),
        ("WORKER__HOP__UNFINISHED_MAX", "7", lambda c: c.worker.hop.unfinished_max == 7),
        ("CLASSES__BATCH_WEIGHT", "2", lambda c: c.classes.batch_weight == 2.0),
        ("DISPATCHER__REPLY_TOPICS", '["a", "b"]', lambda c: c.dispatcher.reply_topics == ["a", "b"]),
        ("ENGINES__MY_ENGINE__SLOTS", "9", lambda c: c.engines["my-engine"].slots == 9),
        ("ENGINES__MY_ENGINE__MODEL", "70", lambda c: c.engines["my-engine"].model == "70"),
        ("ENGINES__MY_ENGINE__OPTIONS__MAX_MODEL_LEN", "512", lambda c: c.engines["my-engine"].options == {"max_model_len": 512}),
        ("ENGINES__MY_ENGINE__OPTIONS__DTYPE", "bfloat16", lambda c: c.engines["my-engine"].options == {"dtype": "bfloat16"}),
        ("ENGINES__MY_ENGINE__ENV__OMP_NUM_THREADS", "2", lambda c: c.engines["my-engine"].env == {"OMP_NUM_THREADS": "2"}),
        ("ENGINES__OTHER__KIND", "sim", lambda c: sorted(c.engines) == ["my-engine", "other"]),
        ("TENANTS__ACME_EU__WEIGHT", "3", lambda c: c.tenants["acme.eu"].weight == 3),
    ],
)
def test_a_variable_is_read_by_the_type_of_its_field(file, name, value, read):
    config = load_config(file, {f"FOREBAY_{name}": value})
    assert read(config)
    assert config != load_config(file, {})


def test_variables_that_are_not_ours_or_name_no_section_are_passed_over(file):
    environ = {"FOREBAY_HOME": "/x", "KAFKA__BOOTSTRAP": "x", "forebay_kafka__bootstrap": "y", "PATH": "/bin"}
    assert load_config(file, environ) == load_config(file, {})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KAFKA__REQUEST_TIMEOUT_MS", "soon", "`kafka.request_timeout_ms`: Expected `int`, got `str`"),
        ("KAFKA__REQUEST_TIMEOUT_MS", "2000", "`kafka.request_timeout_ms`: expected more than"),
        ("KAFKA__DELIVERY", "exactly-once", "`kafka.delivery`: Invalid enum value 'exactly-once': expected one of at_least_once"),
        ("KAFKA__TOPIC_PREFIX", "", "`kafka.topic_prefix`: Expected `str` matching regex"),
        ("KAFKA__BOOTSTRAPS", "x", "`kafka.bootstraps`: unknown field"),
        ("KAFAK__BOOTSTRAP", "x", "`kafak`: unknown field"),
        ("KAFKA__BOOTSTRAP__HOST", "x", "`kafka.bootstrap` is not a section"),
        ("KAFKA__", "x", "expected FOREBAY_SECTION__FIELD"),
        ("__BOOTSTRAP", "x", "expected FOREBAY_SECTION__FIELD"),
        ("ENGINES__OTHER__SLOTS", "4", "`engines.other.kind`: required field is missing"),
        ("ENGINES__MY_ENGINE__SLOTS", "0", "`engines.my-engine.slots`: Expected `int` >= 1"),
        ("DISPATCHER__REPLY_TOPICS", "a,b", "`dispatcher.reply_topics`: Expected `array`, got `str`"),
        ("DISPATCHER__REPLY_TOPICS", '["a", 1]', "`dispatcher.reply_topics[1]`: Expected `str`, got `int`"),
    ],
)
def test_a_bad_variable_is_refused_by_its_own_name(file, name, value, said):
    with pytest.raises(ConfigError) as caught:
        load_config(file, {f"FOREBAY_{name}": value})
    assert str(caught.value).startswith(f"environment variable FOREBAY_{name}: {said}")


def test_a_fault_of_the_file_is_not_laid_at_a_variables_door(file):
    file.write_text(file.read_text() + "[redis]\ntimeout_ms = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"FOREBAY_REDIS__URL": "redis://x", "FOREBAY_KAFKA__BOOTSTRAP": "x"})
    assert str(caught.value).startswith(f"{file}: `redis.timeout_ms`")


def test_records_that_have_no_room_for_a_request_are_refused():
    with pytest.raises(ConfigError, match=r"`kafka\.record_bytes_max`: expected more than 65536"):
        parse_config({"kafka": {"record_bytes_max": 65_536}})
