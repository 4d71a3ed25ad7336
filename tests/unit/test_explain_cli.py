"""`forebay explain`: against a saved state and the running dispatcher's, for people and for scripts."""

import asyncio

import msgspec
import pytest
from click.testing import CliRunner
from msgspec import structs

from deploy.cli import explain as module
from deploy.cli.explain import explain, live_state
from dispatcher.core import Dispatcher, StatusSeen
from memory_coordinator import MemoryAsking
from schemas import EngineStatus, InvalidMessage, parse_config
from schemas.config import RedisConfig
from schemas.errors import ConfigError
from schemas.questions import Answer, StateOf, encode_state

NOW = 1_700_000_000_000
CONFIG = parse_config(
    {"engines": {"llama": {"kind": "transformer", "model": "llama"}, "mamba": {"kind": "ssm", "model": "mamba", "paused": True}}}
)
REQUEST = b'{"id": "r", "tenant": "a", "prompt": "hello", "model": "llama"}'


def state(*pools):
    made = Dispatcher(CONFIG)
    for pool in pools:
        kind = CONFIG.engines[pool].kind
        made.handle(StatusSeen(EngineStatus(pool, kind, pool, "w1", 1, NOW, partitions=[0], slots=4, max_context=4_096)), NOW)
    return made.state(None, NOW)


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run the command; the running dispatcher has this state, or there is none."""

    def run(*arguments, value=REQUEST, running=None, saved=None, columns="200"):
        async def answered(_config, tenant, _timeout_s):
            run.asked.append(tenant)
            asking = MemoryAsking()
            task = asyncio.ensure_future(asking.answer(lambda _question: Answer("d", "dispatcher", state=running)))
            await asyncio.sleep(0)
            try:
                return await live_state(asking, tenant, 1.0)
            finally:
                task.cancel()

        monkeypatch.setattr(module, "_running", answered)
        if saved is not None:
            (tmp_path / "state.json").write_bytes(saved)
            arguments = (*arguments, "--state", str(tmp_path / "state.json"))
        environ = {"FOREBAY_CONFIG": "", "FOREBAY_HOME": "/nowhere", "COLUMNS": columns}
        return CliRunner().invoke(explain, [*arguments, "-"], input=value, env=environ)

    run.asked = []
    return run


def test_a_saved_state_says_where_it_goes_and_why(invoke):
    done = invoke(saved=encode_state(state("llama", "mamba")))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("request r of tenant a (interactive): model llama, about ")
    (llama,) = [line.split() for line in lines if line.split()[:2] == ["llama", "transformer"]]
    assert llama[2:] == ["serves", "it", "w1", "free", "0/6", "-"]
    assert any("mamba" in line and "unpaused: is paused" in line for line in lines)
    assert lines[-1].startswith("it goes to llama/w1; reason only; first token in ")
    assert invoke.asked == []


def test_json_holds_every_filter_score_and_prediction(invoke):
    done = invoke("--json", saved=encode_state(state("llama", "mamba")))
    found = msgspec.json.decode(done.stdout)
    assert (found["at_ms"], found["refused"]) == (NOW, None)
    explanation = found["explanation"]
    assert (explanation["pool"], explanation["worker"]) == ("llama", "w1")
    (llama, mamba) = explanation["pools"]
    assert set(llama["workers"][0]["filters"]) == set(CONFIG.routing.filters)
    assert set(llama["workers"][0]["scores"]) == set(CONFIG.routing.scorers)
    assert mamba["workers"][0]["filters"]["unpaused"] == "is paused"
    assert found["soonest_ms"] >= llama["workers"][0]["run_ms"] > 0
    assert explanation["placement"]["why_not"] is None, "scripts need not guess"


def test_the_running_dispatcher_is_asked_and_its_state_may_be_saved(invoke, tmp_path):
    path = tmp_path / "saved.json"
    assert invoke("--save-state", str(path), running=state("llama")).exit_code == 0
    assert invoke.asked == [None], "a saved state is for other tenants too"
    assert path.read_bytes() == encode_state(state("llama"))
    assert invoke(running=state("llama")).exit_code == 0
    assert invoke.asked == [None, "a"]
    assert invoke("--save-state", str(path), running=state()).exit_code == 0
    assert path.read_bytes() == encode_state(state()), "a later state takes an older one's place"


def test_a_state_is_not_saved_over_something_else(invoke, tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"kafka": "a stack keeps this"}')
    done = invoke("--save-state", str(path), running=state("llama"))
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"--save-state: {path} holds something else: give another name, or remove it"
    assert path.read_text() == '{"kafka": "a stack keeps this"}'


def test_where_nobody_can_take_it_now_it_says_what_it_waits_for(invoke):
    done = invoke(saved=encode_state(state()))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "it waits: nobody takes it now (llama: has no worker, mamba: has no worker)"


def test_off_a_terminal_no_figure_is_cut(invoke):
    lines = invoke(saved=encode_state(state("llama", "mamba")), columns=None).stdout.splitlines()
    (heads,) = [line.split() for line in lines if line.split()[:3] == ["engine", "worker", "first"]]
    assert {*CONFIG.routing.scorers, "cost"} <= set(heads)


def test_what_would_be_refused_ends_with_an_error(invoke):
    saved = encode_state(state("llama"))
    done = invoke(saved=saved, value=b'{"prompt": "a", "model": "lama"}')
    assert done.exit_code == 1
    assert "it would be refused: model_not_found: no engine serves model 'lama'" in done.stderr
    past = invoke(saved=saved, value=b'{"prompt": "a", "model": "llama", "deadline": "2020-01-01T00:00:00Z"}')
    assert (past.exit_code, "it goes to" in past.stdout) == (1, False)
    assert "it would be refused: expired: its deadline has passed" in past.stderr
    late = b'{"prompt": "a", "model": "llama", "deadline": "2023-11-14T22:13:20.001Z", "max_output_tokens": 4000}'
    assert "it goes to" not in invoke(saved=saved, value=late).stdout
    done = invoke("--json", saved=saved, value=late)
    assert done.exit_code == 1
    found = msgspec.json.decode(done.stdout)
    assert (found["refused"]["code"], found["refused"]["param"]) == ("capacity_exceeded", "deadline")
    assert found["explanation"]["pool"] == "llama"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'{"prompt": "a", "sampling": {"top_p": 3}}', "`sampling.top_p`"),
        (b'{"prompt": "a", "colour": 1}', "`colour`: unknown field"),
        (b"{", "not JSON"),
        (b"", "<stdin>: it is empty"),
    ],
)
def test_what_is_wrong_with_the_request_is_said_before_anybody_is_asked(invoke, value, said):
    done = invoke(value=value, running=state("llama"))
    assert isinstance(done.exception, InvalidMessage)
    assert said in str(done.exception)
    assert invoke.asked == []


def test_a_broken_state_is_told_with_its_file_and_path(invoke, tmp_path):
    done = invoke(saved=b'{"at_ms": "now"}')
    assert isinstance(done.exception, InvalidMessage)
    assert str(done.exception).startswith(f"{tmp_path / 'state.json'}: `at_ms`: ")


def test_a_plugin_of_a_saved_state_is_never_imported(invoke):
    routing = structs.replace(CONFIG.routing, plugins=["antigravity"], filters=["model", "of_a_stranger"])
    saved = encode_state(structs.replace(state("llama"), config=structs.replace(CONFIG, routing=routing)))
    done = invoke(saved=saved)
    assert isinstance(done.exception, ConfigError)
    assert "of_a_stranger" in str(done.exception)


def test_where_nobody_answers_it_says_what_to_do(invoke):
    done = invoke()
    assert isinstance(done.exception, ConnectionError)
    assert "forebay dispatch" in str(done.exception)


def test_a_state_that_is_too_large_names_the_bound():
    async def scenario():
        asking = MemoryAsking(RedisConfig(answer_bytes_max=100))
        task = asyncio.ensure_future(asking.answer(lambda _question: Answer("d", "dispatcher", state=state("llama"))))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError, match=r"redis\.answer_bytes_max"):
            await live_state(asking, None, 5.0)
        assert (await asking.ask(StateOf(), 5.0))[0].is_cut
        task.cancel()

    asyncio.run(scenario())
