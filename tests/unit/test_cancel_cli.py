"""The cancel command: what it says, what it asks, and what it sends."""

from typing import ClassVar

import pytest
from click.testing import CliRunner

from deploy.cli import cancel as module
from deploy.cli.cancel import cancel


class Sent:
    """Stands in for the client."""

    calls: ClassVar[list] = []

    def __init__(self, _config):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def cancel(self, id_, **given):
        self.calls.append((id_, given["tenant"], given["batch"]))


@pytest.fixture
def sent(monkeypatch):
    monkeypatch.setattr(module, "Client", Sent)
    monkeypatch.setattr(Sent, "calls", [])
    return Sent.calls


def invoke(*arguments, **named):
    return CliRunner().invoke(cancel, arguments, env={"FOREBAY_CONFIG": "", "FOREBAY_HOME": "/nowhere"}, **named)


@pytest.mark.parametrize(
    ("arguments", "given", "said"),
    [
        (["r1"], ("r1", None, None), "request r1 of any tenant"),
        (["r1", "--tenant", "a"], ("r1", "a", None), "request r1 of tenant a"),
        (["r1", "--batch", "b"], ("r1", None, "b"), "request r1 in batch b of any tenant"),
        (["--batch", "b"], (None, None, "b"), "batch b of any tenant"),
        (["--batch", "b", "--tenant", "a"], (None, "a", "b"), "batch b of tenant a"),
        (["--tenant", "a", "--yes"], (None, "a", None), "all requests of tenant a"),
    ],
)
def test_one_line_says_what_was_cancelled(sent, arguments, given, said):
    done = invoke(*arguments)
    assert done.exit_code == 0
    assert done.stdout == f"cancelling {said}: whatever was sent until now and has not ended yet ends as cancelled\n"
    assert sent == [given]


def test_where_nobody_can_be_asked_all_of_a_tenant_goes_with_yes_only(sent):
    done = invoke("--tenant", "a")
    assert (done.exit_code, sent) == (2, [])
    assert "that would cancel all requests of tenant a, and nobody is there to be asked: give --yes." in done.stderr


@pytest.mark.parametrize(("answer", "code", "calls"), [("y\n", 0, 1), ("n\n", 1, 0), ("\n", 1, 0)])
def test_on_a_terminal_it_asks_before_all_of_a_tenant_goes(monkeypatch, sent, answer, code, calls):
    monkeypatch.setattr(module, "is_terminal", lambda: True)
    done = invoke("--tenant", "a", input=answer)
    assert "Cancel all requests of tenant a?" in done.stderr
    assert (done.exit_code, len(sent)) == (code, calls)
    if not calls:
        assert "nothing was cancelled" in done.stderr


@pytest.mark.parametrize("arguments", [["--tenant", "a", "--yes"], ["r1"], ["--batch", "b", "--tenant", "a"]])
def test_it_asks_for_nothing_less(monkeypatch, sent, arguments):
    monkeypatch.setattr(module, "is_terminal", lambda: True)
    assert invoke(*arguments).exit_code == 0
    assert len(sent) == 1
