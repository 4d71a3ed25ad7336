"""Programs run to their end: bounded in time, one line where they fail."""

import sys

import pytest

from deploy.local.brokers import _format
from deploy.local.command import ended, output
from deploy.local.errors import LocalStackError, NotAvailable


def python(code):
    return [sys.executable, "-c", code]


def test_what_it_wrote_comes_back_and_it_reads_nothing():
    assert output(python("import sys; print(sys.stdin.read() == '')"), 30) == "True\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit('no network')", "-c failed: no network"),
        ("import sys; sys.exit('first\\n\\n between \\nlast')", "-c failed: first ... last"),
        ("print('to standard output'); raise SystemExit(3)", "-c failed: to standard output"),
        ("raise SystemExit(3)", "-c failed: it said nothing"),
        ("import os, sys; os.write(2, b'\\xff oh'); sys.exit(1)", "-c failed: \ufffd oh"),
    ],
)
def test_a_failure_is_one_line_with_what_it_said_first_and_last(code, said):
    with pytest.raises(NotAvailable) as caught:
        output(python(code), 30)
    assert str(caught.value).endswith(said)
    assert "\n" not in str(caught.value)
    assert ended(python(code), 30).returncode != 0


def test_one_that_takes_too_long_or_is_not_there_is_told():
    with pytest.raises(NotAvailable, match=r"-c: not done within 0\.3 s"):
        output(python("import time; time.sleep(60)"), 0.3)
    with pytest.raises(NotAvailable, match="cannot run /nowhere/program: No such file"):
        output(["/nowhere/program"], 1)


def test_environment_and_folder_are_set_and_no_python_environment_is_handed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setenv("KEPT", "kept")
    told = output(
        python("import os; print(os.getcwd(), os.environ.get('PYTHONPATH'), os.environ['KEPT'], os.environ['SET'])"),
        30,
        {"SET": "set"},
        tmp_path,
    )
    assert told.split() == [str(tmp_path), "None", "kept", "set"]


def test_a_kafka_that_cannot_make_its_data_does_not_count_as_one_that_is_not_there(tmp_path):
    with pytest.raises(LocalStackError, match=r"Kafka cannot make its data folder .*broker: .* failed: disk full") as caught:
        _format(python("raise SystemExit('disk full')"), tmp_path, "broker")
    assert not isinstance(caught.value, NotAvailable)
