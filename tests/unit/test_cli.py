"""The command line's frame: errors in one line, exit codes, signals, finding the configuration, quick imports."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
from msgspec import structs

from broker.discovery import find_config
from deploy.cli.app import COMMANDS, cli
from deploy.cli.show import failure, result_line, whole_json
from schemas import ErrorCode, ErrorInfo, InferenceResult
from schemas.messages import BlobRef

NOWHERE = {"FOREBAY_KAFKA__BOOTSTRAP": "127.0.0.1:9", "FOREBAY_REDIS__URL": "redis://127.0.0.1:9/0"}


def forebay(*arguments, cwd, stdin=b"", **environ):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_")}
    env |= {"HOME": str(cwd), "XDG_DATA_HOME": str(cwd), **environ}
    command = [sys.executable, "-P", "-m", "deploy.cli", *arguments]
    return subprocess.run(command, capture_output=True, cwd=cwd, env=env, input=stdin, timeout=60, check=False)


def told(done):
    """The one line on stderr."""
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("forebay: ")
    return lines[0]


def commands(group, path=()):
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def test_every_command_has_help_with_an_example():
    leaves = [(path, c) for path, c in commands(cli) if not isinstance(c, click.Group)]
    assert {path[0] for path, _ in leaves} == set(COMMANDS)
    for path, command in leaves:
        assert "forebay " + " ".join(path) in command.help, path
        assert "\\b" not in command.help, path


def test_no_number_on_the_command_line_may_be_infinite_or_none_at_all():
    numbers = [
        (path, option)
        for path, command in commands(cli)
        for option in command.params
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert {(*path, option.name) for path, option in numbers} >= {
        ("batch", "run", "window_h"),
        ("batch", "run", "stall_s"),
        ("local", "up", "timeout_s"),
        ("local", "down", "timeout_s"),
        ("results", "timeout_s"),
        ("submit", "timeout_s"),
        ("submit", "temperature"),
    }
    for path, option in numbers:
        for text in ("nan", "inf", "-inf", "1e999", "NaN"):
            with pytest.raises(click.UsageError, match=r"finite number|in the range"):
                option.type.convert(text, option, click.Context(cli))
        if isinstance(option.default, float):
            assert option.type.convert(str(option.default), option, None) == option.default, path


@pytest.mark.parametrize("text", ["nan", "inf", "1e300"])
def test_a_window_that_no_clock_can_count_is_wrong_usage(tmp_path, text):
    done = forebay("batch", "run", "in", "-o", "out", "-e", "err", "--window", text, cwd=tmp_path)
    assert "'--window'" in told(done)
    assert done.returncode == 2


def test_help_and_version_import_no_command(tmp_path):
    code = "import sys; sys.argv = ['forebay', '--help']; from deploy.cli import main; main()"
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=env, cwd=tmp_path)
    for heavy in (b"aiokafka", b"redis", b"rich", b"deploy.cli.submit"):
        assert heavy not in done.stderr
    assert forebay("--version", cwd=tmp_path).stdout.startswith(b"forebay ")


def test_what_is_logged_beside_a_command_is_not_shown():
    code = """
        import logging, sys
        from deploy.cli import main
        sys.argv = ["forebay", "--version"]
        try:
            main()
        except SystemExit:
            logging.getLogger("forebay.batch").warning("retry")
            logging.getLogger("asyncio").error("unclosed")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, check=True)
    assert done.stderr == b""


def test_the_client_imports_neither_kafka_nor_the_command_line():
    code = "import sys; from broker import Client; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()
    assert not {b"aiokafka", b"redis", b"click", b"rich", b"deploy"} & set(modules)


@pytest.mark.parametrize(
    ("arguments", "environ", "said", "code"),
    [
        (["nonsense"], {}, "No such command 'nonsense'", 2),
        (["submit"], {}, "Missing argument 'PROMPT'", 2),
        (["submit", "--config", "none.toml", "x"], {}, "none.toml: no such file", 1),
        (["submit", "x"], {"FOREBAY_KAFKA__DELIVERY": "perhaps"}, "`kafka.delivery`", 1),
        (["submit", "x"], {"FOREBAY_KAFKA__BOOTSTRAP": "kafka"}, "BOOTSTRAP: `kafka.bootstrap`: 'kafka' has no port", 1),
        (["check"], {"FOREBAY_REDIS__URL": "localhost:6379"}, "URL: `redis.url`: it does not begin with redis://", 1),
        (["check"], {"FOREBAY_REDIS__URL": "redis://:secret@h:1/?hop=1"}, "`redis.url`: ", 1),
        (["local", "up", "--kafka", "kafka"], {}, "--kafka: 'kafka' has no port: expected HOST:PORT", 1),
        (["local", "up", "--redis", "redis://:secret@h:x"], {}, "--redis: the port is a number from 1 to 65535: expected ", 1),
        (["local", "up", "--redis", "redis://h:1?hop=1"], {}, "`redis.url`: ", 1),
        (["submit", "--temperature", "9", "x"], {}, "`sampling.temperature`", 1),
        (["submit", "--max-output-tokens", "0", "x"], {}, "`max_output_tokens`", 1),
        (["submit", ""], {}, "`prompt`", 1),
        (["submit", "--deadline", "tomorrow", "x"], {}, "`deadline`: Invalid RFC3339", 1),
        (["submit", "--slo-latency-ms", "0", "x"], {}, "`slo_latency_ms`: ", 1),
        (["submit", "--logprobs", "21", "x"], {}, "`sampling.logprobs`", 1),
        (["submit", "--regex", "", "x"], {}, "`output_format.regex`", 1),
        (["submit", "--json-schema", "none.json", "x"], {}, "--json-schema none.json: expected a file with a JSON schema", 1),
        (["submit", "--json-schema", "s.json", "--regex", "a", "x"], {}, "--json-schema and --regex exclude each other", 2),
        (["submit", "--metadata", "a", "x"], {}, "--metadata: expected KEY=VALUE, each key once, got 'a'.", 2),
        (["submit", "--metadata", "a=1", "--metadata", "a=2", "x"], {}, "each key once, got 'a=2'.", 2),
        (["cancel"], {}, "nothing is given: name a request's ID, --tenant or --batch. See `forebay cancel --help`.", 2),
        (["cancel", "--tenant", "no spaces", "--yes"], {}, "`tenant`: ", 1),
        (["cancel", ""], {}, "`id`: ", 1),
        (["cancel", "--batch", "x" * 129], {}, "`batch`: ", 1),
        (["results", "--from", "-3"], {}, "expected beginning, latest or an offset", 2),
        (["topics", "ensure", "--partitions", "nope=3"], {}, "known are requests.interactive", 1),
        (["topics", "ensure", "--partitions", "results=x"], {}, "expected TOPIC=N", 1),
        (["topics", "ensure", "--partitions", "control=2"], {}, "one partition by design", 1),
        (["topics", "ensure", "--min-insync", "2"], {}, "`topics.min_insync`", 1),
        (["topics", "ensure", "--prefix", "/"], {}, "`kafka.topic_prefix`", 1),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path, arguments, environ, said, code):
    done = forebay(*arguments, cwd=tmp_path, **{**NOWHERE, **environ})
    assert said in told(done)
    assert done.returncode == code
    assert b"secret" not in done.stderr
    assert b"internal error" not in done.stderr
    assert not list(tmp_path.rglob("forebay.toml"))


@pytest.mark.parametrize("arguments", [["submit", "x"], ["results"], ["cancel", "x"], ["topics", "ensure"]])
def test_a_kafka_that_is_not_there_is_told_with_its_address(tmp_path, arguments):
    done = forebay(*arguments, cwd=tmp_path, **NOWHERE, FOREBAY_KAFKA__CONNECT_TIMEOUT_MS="500")
    assert "cannot reach Kafka at 127.0.0.1:9" in told(done)
    assert "forebay local up" in told(done)
    assert done.returncode == 1


def test_check_tells_everything_that_is_wrong_at_once(tmp_path):
    url = "redis://:secret@127.0.0.1:9/0"
    done = forebay("check", cwd=tmp_path, **{**NOWHERE, "FOREBAY_REDIS__URL": url}, FOREBAY_KAFKA__CONNECT_TIMEOUT_MS="500")
    assert done.returncode == 1
    assert told(done) == "forebay: not everything is well: config, kafka, redis"
    assert b"error   kafka: cannot reach Kafka at 127.0.0.1:9" in done.stdout
    assert b"error   redis: cannot reach Redis at redis://:***@127.0.0.1:9/0" in done.stdout
    assert b"secret" not in done.stdout


def test_standard_input_that_is_no_text_is_refused(tmp_path):
    assert "not UTF-8" in told(forebay("submit", "-", cwd=tmp_path, stdin=b"caf\xe9", **NOWHERE))


SCRIPT = """
    import asyncio, sys
    from deploy.cli import common

    async def waits():
        try:
            print("ready", flush=True)
            await asyncio.sleep(60)
        finally:
            print("cleaned up", flush=True)

    async def stops():
        over = asyncio.Event()
        common.on_stop(over.set)
        print("ready", flush=True)
        await over.wait()
        print("stopped", flush=True)
        return 7

    def blocks():
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)

    async def nothing():
        pass

    def goes_on():
        common.run(nothing())
        blocks()

    async def breaks():
        raise ExceptionGroup("tasks", [ValueError("two\\nlines")])

    async def floods():
        while True:
            print("x" * 1000)

    what = {"blocks": blocks, "goes_on": goes_on}.get(sys.argv[1]) or (lambda: sys.exit(common.run(globals()[sys.argv[1]]())))
    common.guarded(what)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("what", "end"), [("waits", b"cleaned up"), ("stops", b"stopped"), ("blocks", b"cleaned up"), ("goes_on", b"cleaned up")]
)
def test_signals_end_in_good_order_with_their_exit_code_and_a_service_with_its_own(what, end, number):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    assert out.strip() == end
    assert error.strip() == b""
    assert process.returncode == (7 if what == "stops" else 128 + number)


def test_an_error_of_our_own_making_is_one_line_that_says_so():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "breaks"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert told(done) == "forebay: internal error: ValueError: two lines (set FOREBAY_DEBUG=1 for the traceback)"
    assert done.returncode == 1
    loud = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "FOREBAY_DEBUG": "1"})
    assert b"Traceback" in loud.stderr


def test_nobody_reading_the_output_ends_it_quietly():
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), "floods"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_configuration_is_found_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    assert find_config(None, env) is None
    stack = tmp_path / "data" / "forebay" / "forebay.toml"
    stack.parent.mkdir(parents=True)
    stack.touch()
    assert find_config(None, env) == stack
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "forebay.toml").touch()
    env["FOREBAY_HOME"] = str(tmp_path / "home")
    assert find_config(None, env) == tmp_path / "home" / "forebay.toml"
    Path("forebay.toml").touch()
    assert find_config(None, env) == Path("forebay.toml")
    env["FOREBAY_CONFIG"] = "/elsewhere.toml"
    assert find_config(None, env) == Path("/elsewhere.toml")
    assert find_config(Path("given.toml"), env) == Path("given.toml")


def test_results_on_one_line_and_whole():
    result = InferenceResult("r", "rejected", error=ErrorInfo(ErrorCode.MODEL_NOT_FOUND, "no\n\x1b[31mmodel"))
    assert "\n" not in result_line(result)
    assert "\x1b" not in result_line(result)
    assert len(result_line(result, 40)) == 40
    assert failure(result).startswith("forebay: request r rejected: model_not_found: no")
    assert '"output_text":""' in whole_json(result)


def test_an_output_that_lies_elsewhere_is_told():
    ref = BlobRef("s3://bucket/a.json", 9_000_000, "0" * 64)
    result = InferenceResult("r1", "completed", output_ref=ref)
    assert "9000000 bytes lies at s3://bucket/a.json" in result_line(result)
    assert "s3://" not in result_line(structs.replace(result, output_text="here"))
