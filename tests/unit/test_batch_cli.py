"""The batch command's own part: options, what it shows, and its refusals."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from broker.batch import CannotStart, Progress, Tally
from deploy.cli.batch import run_file
from deploy.cli.batch_progress import Bar, Outage, Plain, line
from schemas.errors import ConfigError

OUTAGE = Outage("kafka:9092", 600.0)


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
        (Progress(100, 10, 0, 9, 34.2), 0, 10.0, "10 of 100 lines (10 %), 1.0/s, 1:30 left, 0 errors, Kafka is away for 34 s"),
        (Progress(100, 100, 0, 0), 0, 10.0, "100 of 100 lines (100 %), 10.0/s, 0 errors"),
    ],
)
def test_a_line_tells_share_rate_and_time_left(now, before, elapsed_s, said):
    assert line(now, before, elapsed_s) == said


def test_plain_lines_come_every_ten_seconds_and_at_the_end(capsys):
    now = [0.0]
    with Plain(Tally(), OUTAGE, lambda: now[0]) as shown:
        for second in range(26):
            now[0] = float(second)
            shown.show(Progress(26, second + 1, 0, 0))
    told = capsys.readouterr()
    assert told.out == ""
    assert [text.split(" lines")[0] for text in told.err.splitlines()] == ["11 of 26", "21 of 26", "26 of 26"]


AWAY = "forebay: cannot reach Kafka at kafka:9092 for 10 s: waiting for it up to 600 s (--absence), then stopping; "
BACK = "forebay: Kafka at kafka:9092 answers again: going on"


def outages(shown):
    """A run through two outages, of which each is reported many times."""
    with shown:
        for away_s in (0.0, 10.2, 11.0, 17.0, 0.0, 0.0, 10.4, 0.0):
            shown.show(Progress(26, 1, 0, 5, away_s))


def test_an_outage_is_one_line_and_its_end_another(capsys):
    outages(Plain(Tally(), Outage("kafka:9092", 600.0), lambda: 0.0))
    told = capsys.readouterr().err.splitlines()[:-1]
    assert [text[: len(AWAY)] for text in told] == [AWAY, BACK, AWAY, BACK]
    assert told[0].endswith("what was reached is kept")


def test_the_bar_shows_an_outage_beside_the_lines():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200, color_system=None)
    bar = Bar(Tally(), Outage("kafka:9092", 600.0), lambda: 0.0, console)
    with bar:
        bar.show(Progress(26, 1, 0, 5, 12.0))
        bar._bar.refresh()
        assert "Kafka is away for 12 s" in written.getvalue()
    outages(Bar(Tally(), Outage("kafka:9092", 600.0), lambda: 0.0, console))
    assert written.getvalue().count(AWAY) == 2
    assert written.getvalue().count(BACK) == 2


def test_an_error_has_the_last_word(capsys):
    shown = Plain(Tally(), OUTAGE)
    shown.__enter__().show(Progress(26, 1, 0, 0))
    shown.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == ""


def test_bad_options_are_refused_before_anything_is_touched(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    files = [str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "-e", str(tmp_path / "err")]
    refused = invoke(*files, "--tenant", "no spaces")
    assert isinstance(refused.exception, ConfigError)
    assert "no spaces" in str(refused.exception)
    for option in (["--window", "0"], ["--max-in-flight", "0"], ["--max-tokens", "-1"], ["--stall", "0"], ["--absence", "0"]):
        assert invoke(*files, *option).exit_code == 2
    assert invoke(files[0]).exit_code == 2
    missing = invoke(str(tmp_path / "gone.jsonl"), *files[1:])
    assert isinstance(missing.exception, CannotStart)
    assert str(missing.exception) == f"{tmp_path / 'gone.jsonl'}: no such file"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
