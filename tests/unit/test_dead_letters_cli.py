"""`forebay dead-letters` on the in-memory cluster: what it prints, its exit codes, what it asks."""

import io
import json

import pytest
from click.testing import CliRunner
from letter_world import BAD, BATCH, INTERACTIVE, START_MS, Letters, fields
from virtual_loop import run_virtual

from broker.transport.memory import MemoryTransport
from broker.transport.protocol import Outgoing
from deploy.cli import dead_letters as command
from deploy.cli import replaying
from deploy.cli.app import cli
from deploy.cli.letters import moment, value_text
from schemas import ErrorCode, ErrorInfo, headers


class Typed(io.BytesIO):
    """Standard input, as a terminal is."""

    def isatty(self):
        return True


@pytest.fixture
def world(monkeypatch):
    letters = Letters()
    monkeypatch.setattr(replaying, "connect", lambda _: MemoryTransport(letters.cluster))
    monkeypatch.setattr(command, "run", run_virtual)
    return letters


def forebay(*arguments, typed=None):
    env = {"FOREBAY_CONFIG": "", "FOREBAY_HOME": "/nowhere"}
    return CliRunner().invoke(cli, ["dead-letters", *arguments], env=env, input=typed)


def given(world, *records):
    run_virtual(world.write(*records))


def lines(done):
    return done.stdout.splitlines()


def requests(world):
    return run_virtual(world.requests())


# -- list -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
def test_an_empty_list_says_so_and_is_no_error():
    done = forebay("list")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no dead letters\n")


def test_the_list_has_a_line_for_each_the_newest_last(world):
    given(
        world,
        world.refused(b"not json", error=ErrorInfo(ErrorCode.INVALID_REQUEST, "bad \x1b[31m")),
        world.failed("r1"),
        world.failed("r2", tenant="alice"),
    )
    title, *rows = lines(forebay("list"))
    assert title.split() == ["place", "written", "id", "tenant", "code", "reason"]
    assert [row.split()[0] for row in rows] == ["0/0", "0/1", "0/2"]
    assert rows[0].split()[3:6] == ["-", "-", "invalid_request"]
    assert rows[1][title.index("reason") :] == "boom (attempt 3 of 3)"
    assert "\x1b" not in rows[0]
    assert [row.split()[0] for row in lines(forebay("list", "--tenant", "alice"))[1:]] == ["0/2"]
    assert [row.split()[0] for row in lines(forebay("list", "--code", "internal", "--limit", "1"))[1:]] == ["0/2"]
    assert forebay("list", "--code", "poison").stderr == "no such dead letters\n"
    assert forebay("list", "--code", "nonsense").exit_code == 2


def test_the_list_as_json_has_an_object_a_line(world):
    given(world, world.failed("r1", "batch"), world.failed("r2"))
    assert forebay("replay", "r1").exit_code == 0
    (one,) = map(json.loads, lines(forebay("list", "--json")))
    assert one.pop("written_at_ms") >= START_MS
    assert one == {
        "place": "0/1",
        "id": "r2",
        "tenant": "t0",
        "service_class": "interactive",
        "code": "internal",
        "reason": "boom (attempt 3 of 3)",
        "original": {"topic": "forebay.engine.sim", "partition": 3, "offset": 44},
        "value_bytes": 38,
        "is_cut": False,
        "put_back_at_ms": None,
    }
    both = [json.loads(line) for line in lines(forebay("list", "--json", "--all"))]
    assert [(b["id"], b["put_back_at_ms"] is None) for b in both] == [("r1", False), ("r2", True)]
    assert "(put back 20" in lines(forebay("list", "--all"))[1]


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_tells_everything(world):
    given(world, world.failed("r1", "batch", fields()))
    for name in ("0/0", "r1"):
        done = forebay("show", name)
        assert done.exit_code == 0
        for said in (
            "place     0/0",
            "tenant    t0",
            "class     batch",
            "code      internal",
            "original  forebay.engine.sim/3/44",
            "origin    forebay.requests.batch/1/7",
            "route     sim/w1 retried: internal: boom",
            "put back  no",
            "header    content-type: application/json",
            "header    x-mine: 0x00ff",
            "value     38 bytes",
            '{"id":"r1","tenant":"t0","prompt":"a"}',
        ):
            assert said in done.stdout
        assert "forebay-envelope" not in done.stdout


def test_show_writes_the_very_bytes_or_json(world):
    value = b'\x00\xff{"id":\n'
    given(world, world.refused(value, key=b"\xfe"))
    assert forebay("show", "0/0", "--raw").stdout_bytes == value
    shown = json.loads(forebay("show", "0/0", "--json").stdout)
    assert shown["value"] is None
    assert shown["value_base64"] == "AP97ImlkIjoK"
    assert shown["key_base64"] == "/g=="
    assert {"name": headers.DEAD_CODE, "value": "invalid_request"} in shown["headers"]
    assert "00000000  00 ff 7b 22" in forebay("show", "0/0").stdout
    assert forebay("show", "0/0", "--raw", "--json").exit_code == 2


def test_a_value_cannot_steer_the_terminal():
    assert value_text(b"a\x1b[2J\tb\nc\x07") == "a?[2J\tb\nc?"
    assert value_text(b"\xff" * 10_000).endswith("5904 more bytes: --raw writes them all")
    assert moment(10**17) == "1" + "0" * 17


def test_show_of_an_id_that_several_have_takes_the_newest_that_waits_and_names_the_others(world):
    given(world, world.failed("r1"), world.failed("r1", tenant="t1"), world.failed("r1", tenant="t2"))
    forebay("replay", "0/2")
    done = forebay("show", "r1")
    assert "place     0/1" in done.stdout
    assert done.stderr == "the same id also: 0/0, 0/2\n"
    assert "place     0/2" in forebay("show", "r1", "--tenant", "t2").stdout


@pytest.mark.usefixtures("world")
def test_show_of_what_is_not_there_is_an_error():
    for name in ("0/9", "nobody"):
        done = forebay("show", name)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"forebay: no dead letter {name}: `forebay dead-letters list --all` lists them\n"


# -- replay -----------------------------------------------------------------------------------------------------------


def test_replay_of_some_says_where_they_went_and_how_to_follow_them(world):
    given(world, world.failed("r1", "batch"), world.failed("r2"), world.failed("x", value=b'{"prompt":"no id"}'))
    done = forebay("replay", "0/0", "0/2")
    assert done.exit_code == 0
    first, second = lines(done)
    assert first.split() == ["0/0", "r1", "->", f"{BATCH}/{requests(world)[-1].partition}/0"]
    assert "(a new id)" in second
    assert done.stderr == "2 of 2 put back, 1 with a new id; their results: forebay results --follow --replay 0/0 --replay 0/2\n"
    assert [line.split()[0] for line in lines(forebay("list"))[1:]] == ["0/1"]
    again = forebay("replay", "0/0")
    assert (again.exit_code, again.stdout, again.stderr) == (0, "", "0/0 was put back before\n")
    assert len(requests(world)) == 2


def test_replay_of_all_leaves_out_what_would_be_refused_again(world):
    given(world, world.failed("r1"), world.refused(b"not json"), world.failed("r2"), Outgoing("forebay.dead-letters", b"{}"))
    plan = forebay("replay", "--all", "--dry-run")
    assert [line.split("  ")[0] for line in lines(plan)] == ["0/0", "0/1", "0/2", "0/3"]
    assert "not JSON" in plan.stdout
    assert "--class" in plan.stdout
    assert requests(world) == []
    done = forebay("replay", "--all", "--json")
    assert done.exit_code == 0
    assert [json.loads(line)["id"] for line in lines(done)] == ["r1", "r2"]
    assert "2 left out: `forebay dead-letters replay --all --dry-run` tells why" in done.stderr
    assert sorted(r.key for r in requests(world)) == [b"r1", b"r2"]
    once_more = forebay("replay", "--all")
    assert (once_more.exit_code, once_more.stdout) == (0, "")
    assert len(requests(world)) == 2


def test_all_is_asked_for_on_a_terminal_only(world):
    given(world, world.failed("r1"), world.failed("r2"))
    no = forebay("replay", "--all", typed=Typed(b"n\n"))
    assert no.exit_code == 1
    assert "Put back 2 (2 internal)?" in no.stderr
    assert "nothing was put back" in no.stderr
    assert requests(world) == []
    assert forebay("replay", "--all", "--code", "poison", "--yes").stderr == "nothing to put back\n"
    assert forebay("replay", "--all", typed=Typed(b"y\n")).exit_code == 0
    assert len(requests(world)) == 2


def test_a_named_letter_that_would_be_refused_again_is_refused_with_the_ways_out(world, tmp_path):
    given(world, world.refused(b'{"id":"m","prompt":5}', error=BAD))
    done = forebay("replay", "m")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("forebay: dead letter 0/0: it would be refused again (`prompt`: ")
    assert "--value FILE" in line
    assert "--force" in line
    mended = tmp_path / "mended.json"
    mended.write_bytes(b'{"id":"m","prompt":6}')
    assert "`prompt`" in forebay("replay", "m", "--value", str(mended)).stderr
    mended.write_bytes(b'{"id":"m","prompt":"six"}')
    assert forebay("replay", "m", "--value", str(mended)).exit_code == 0
    (request,) = requests(world)
    assert (request.topic, request.value) == (INTERACTIVE, b'{"id":"m","prompt":"six"}')
    assert forebay("list").stderr == "no dead letters\n"


def test_force_puts_back_even_what_would_be_refused(world):
    given(world, world.refused(b"not json"))
    done = forebay("replay", "0/0", "--force", "--class", "batch")
    assert done.exit_code == 0
    assert [(r.topic, r.value) for r in requests(world)] == [(BATCH, b"not json")]


def test_names_that_mean_nothing_or_too_much_are_told_and_the_others_are_put_back(world):
    given(world, world.failed("same"), world.failed("same", tenant="t1"), world.failed("r1"))
    done = forebay("replay", "same", "gone", "r1")
    assert done.exit_code == 1
    told = done.stderr.splitlines()[-1]
    assert "same is the id of several: name one by its place: 0/0 (tenant t0), 0/1 (tenant t1)" in told
    assert "no dead letter gone" in told
    assert [r.key for r in requests(world)] == [b"r1"]
    assert forebay("replay", "same", "--tenant", "t1").exit_code == 0
    assert forebay("replay", "same").exit_code == 0, "only one is left"
    assert len(requests(world)) == 3


@pytest.mark.usefixtures("world")
def test_replay_needs_names_or_all_and_not_both():
    for arguments in ((), ("--all", "r1"), ("--all", "--value", __file__), ("a", "b", "--value", __file__)):
        done = forebay("replay", *arguments)
        assert done.exit_code == 2, arguments
    assert "name what to put back, or give --all" in forebay("replay").stderr
