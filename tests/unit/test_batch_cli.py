"""The batch command's own part: options, what it shows, and its refusals."""

import pytest
from click.testing import CliRunner

from broker.batch import CannotStart, Progress, Tally
from deploy.cli.batch import run_file
from deploy.cli.batch_progress import Plain, line
from schemas.errors import ConfigError


def invoke(*arguments):
    return CliRunner().invoke(run_file, arguments, env={"FOREBAY_CONFIG": "", "FOREBAY_HOME": "/nowhere"})


@pytest.mark.parametrize(
    ("now", "before", "elapsed_s", "said"),
    [
        (Progress(0, 0, 0, 0), 0, 0.0, "0 of 0 lines (100 %), 0.0/s, 0 errors"),
        (Progress(100, 0, 0, 9), 0, 5.0, "0 of 100 lines (0 %), 0.0/s, 0 errors"),
        (Progress(100, 48, 2, 9), 0, 25.0, "50 of 100 lines (50 %), 2.0/s, 0:25 left, 2 errors"),
        (Progress(100, 60, 0, 9), 50, 10.0, "60 of 100 lines (60 %), 1.0/s, 0:40 left, 0 errors"),
        (Progress(10_000, 1, 0, 9), 0, 1.0, "1 of 10000 lines (0 %), 1.0/s, 2:46:39 left, 0 errors"),
        (Progress(100, 100, 0, 0), 0, 10.0, "100 of 100 lines (100 %), 10.0/s, 0 errors"),
    ],
)
def test_a_line_tells_share_rate_and_time_left(now, before, elapsed_s, said):
    assert line(now, before, elapsed_s) == said


def test_plain_lines_come_every_ten_seconds_and_at_the_end(capsys):
    now = [0.0]
    with Plain(Tally(), lambda: now[0]) as shown:
        for second in range(26):
            now[0] = float(second)
            shown.show(Progress(26, second + 1, 0, 0))
    told = capsys.readouterr()
    assert told.out == ""
    assert [text.split(" lines")[0] for text in told.err.splitlines()] == ["11 of 26", "21 of 26", "26 of 26"]


def test_an_error_has_the_last_word(capsys):
    shown = Plain(Tally())
    shown.__enter__().show(Progress(26, 1, 0, 0))
    shown.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


def test_bad_options_are_refused_before_anything_is_touched(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "-e", str(tmp_path / "err")]
    refused = invoke(*files, "--tenant", "no spaces")
    assert isinstance(refused.exception, ConfigError)
    assert "no spaces" in str(refused.exception)
    for option in (["--window", "0"], ["--max-in-flight", "0"], ["--max-tokens", "-1"], ["--stall", "0"]):
        assert invoke(*files, *option).exit_code == 2
    assert invoke(files[0]).exit_code == 2
    missing = invoke(str(tmp_path / "gone.jsonl"), *files[1:])
    assert isinstance(missing.exception, CannotStart)
    assert str(missing.exception) == f"{tmp_path / 'gone.jsonl'}: no such file"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
