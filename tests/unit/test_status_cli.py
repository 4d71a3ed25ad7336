"""`forebay status`: what it says for people and for scripts, and how it ends."""

import msgspec
import pytest
from click.testing import CliRunner

from deploy.cli import status as module
from deploy.cli.status import Found, status
from deploy.cli.whereabouts import describe, span
from schemas import InvalidMessage
from schemas.questions import Stage, Where, Why

NOW_MS = 1_000_000


def invoke(monkeypatch, found, *arguments):
    asked = []

    async def look(_config, request_id, tenant, timeout_s):
        asked.append((request_id, tenant, timeout_s))
        return found

    monkeypatch.setattr(module, "_look", look)
    done = CliRunner().invoke(status, arguments, env={"FOREBAY_CONFIG": "", "FOREBAY_HOME": "/nowhere"})
    return done, asked


def test_what_is_found_is_told_and_notes_go_beside(monkeypatch):
    where = Where("r", Stage.WAITING, "alice", "batch", why=Why.TENANT_PAUSED, ahead=3)
    done, asked = invoke(monkeypatch, Found("r", [where], ["no active dispatcher has answered"]), "r", "--tenant", "alice")
    assert done.exit_code == 0
    assert asked == [("r", "alice", 2.0)]
    assert done.stdout.splitlines() == [
        "request r of tenant alice (batch)",
        "  waiting in the dispatcher",
        "  3 expected to go before it",
        "  why: its tenant is paused (`forebay tenants set alice --resume`)",
    ]
    assert done.stderr == "forebay: no active dispatcher has answered\n"


def test_json_has_all_that_is_known(monkeypatch):
    where = Where("r", Stage.RUNNING, "a", pool="p", worker="w", output_tokens=7)
    done, _ = invoke(monkeypatch, Found("r", [where], []), "r", "--json")
    (one,) = msgspec.json.decode(done.stdout)["found"]
    assert (one["stage"], one["pool"], one["worker"], one["output_tokens"]) == ("running", "p", "w", 7)
    assert one["why"] is None, "scripts need not guess"


def test_what_is_not_found_is_an_error_that_says_what_it_may_mean(monkeypatch):
    done, _ = invoke(monkeypatch, Found("r", [], ["not looked at: results"]), "r", "--tenant", "a")
    assert done.exit_code == 1
    first, second = done.stderr.splitlines()
    assert first == "forebay: not looked at: results"
    assert second.startswith("forebay: request r of tenant a was not found: it was never sent to this cell, ")
    done, _ = invoke(monkeypatch, Found("r", [], []), "r", "--json")
    assert (done.exit_code, msgspec.json.decode(done.stdout)["found"], done.stderr) == (1, [], "")


@pytest.mark.parametrize("arguments", [["x" * 129], ["r", "--tenant", "no spaces"], [""]])
def test_a_name_that_cannot_be_one_is_refused(monkeypatch, arguments):
    done, asked = invoke(monkeypatch, None, *arguments)
    assert isinstance(done.exception, InvalidMessage)
    assert asked == []


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (
            Where("r", Stage.ENDED, "a", since_ms=NOW_MS - 5_000, status="failed", pool="p", worker="w"),
            "ended 5.0 s ago: failed on p/w",
        ),
        (
            Where("r", Stage.RUNNING, "a", since_ms=NOW_MS - 65_000, pool="p", worker="w", output_tokens=9),
            "running on p/w for 1 min 5 s, 9 tokens so far",
        ),
        (Where("r", Stage.DELAYED, "a", why=Why.RETRY, until_ms=NOW_MS + 250), "the next one has its time, for 250 ms"),
        (Where("r", Stage.RUNWAY, "a", why=Why.SLOT, ahead=0), "next in line"),
        (Where("r", Stage.SENT, "a", pool="p"), "sent to the engine; no worker has it in hand yet on p"),
        (Where("r", Stage.WAITING, "a", deadline_ms=NOW_MS - 1_000), "its deadline passed 1.0 s ago"),
        (Where("r", Stage.WAITING, "a", hop=3, attempts=1), "sent to an engine 3 times before, of which 1 were failures"),
        (Where("r", Stage.LANE, "a", record=("t.lanes", 2, 17), ahead=40), "record t.lanes/2 at offset 17"),
        (Where("r", Stage.WAITING, "a", why=Why.ENGINES_FULL, engines={"llama": "full"}), "llama: full"),
    ],
)
def test_each_stage_in_words(where, said):
    assert said in "\n".join(describe(where, NOW_MS))


def test_every_stage_and_every_reason_has_words():
    for stage in Stage:
        assert describe(Where("r", stage, "a"), NOW_MS)
    for why in Why:
        assert describe(Where("r", Stage.WAITING, "a", why=why), NOW_MS)


@pytest.mark.parametrize(
    ("time_ms", "said"), [(-5, "0 ms"), (999, "999 ms"), (1_500, "1.5 s"), (200_000, "3 min 20 s"), (7_500_000, "2 h 5 min")]
)
def test_time_spans(time_ms, said):
    assert span(time_ms) == said
