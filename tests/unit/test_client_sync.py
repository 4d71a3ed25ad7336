"""The client without asyncio: the same calls, from a thread that has no loop."""

import asyncio
import contextlib
import threading

import pytest
from client_world import World
from memory_stack import config_of

from broker import ClientClosed, ClientTimeout, SyncClient
from broker.transport.memory import MemoryTransport
from schemas import InvalidMessage


@pytest.fixture
def client():
    config = config_of(ttft_ms=1, tpot_ms=0.1)
    world = World(config)
    with SyncClient(config, transport=MemoryTransport(world.cluster, "client")) as client:

        async def begin():
            await world.ensure()
            world.dispatcher()

        client.wait(begin())
        client.world = world
        yield client
        with contextlib.suppress(ClientClosed):
            client.wait(world.stop())


def answer(client):
    async def begin():
        client.world.worker()

    client.wait(begin())


def test_submit_stream_and_results(client):
    answer(client)
    result = client.submit("hello", id="one", max_output_tokens=5)
    assert (result.request_id, result.status) == ("one", "completed")
    stream = client.stream("hello", max_output_tokens=9)
    text = "".join(item.text for item in stream)
    assert text == stream.result.output_text
    sent = list(client.send_many([{"prompt": "a", "max_output_tokens": 1}] * 5))
    assert {r.request_id for r in client.results("beginning", ids=sent, timeout_s=20)} == set(sent)


def test_a_request_is_cancelled(client):
    sent = [client.send("nobody answers", id=name, batch="b") for name in ("one", "two", "three")]
    client.cancel("one")
    client.cancel(batch="b")
    found = list(client.results("beginning", ids=sent, timeout_s=20))
    assert [r.status for r in found] == ["cancelled"] * 3


def test_several_threads_share_one_client(client):
    answer(client)
    got = {}
    threads = [
        threading.Thread(target=lambda n=n: got.update({n: client.submit(f"{n}", id=f"t{n}", max_output_tokens=2)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {n: r.request_id for n, r in got.items()} == {n: f"t{n}" for n in range(8)}


def test_errors_come_through_and_leaving_a_stream_early_is_fine(client):
    with pytest.raises(InvalidMessage):
        client.submit("")
    with pytest.raises(ClientTimeout):
        client.submit("nobody answers", timeout_s=0.05)
    answer(client)
    for _ in client.stream("x", max_output_tokens=50):
        break
    assert client.submit("still here", max_output_tokens=1).status == "completed"


def test_close_ends_the_thread_and_may_be_called_twice():
    config = config_of()
    client = SyncClient(config, transport=MemoryTransport(World(config).cluster, "client"))
    client.close()
    client.close()
    assert not any(t.name == "forebay-client" and t.is_alive() for t in threading.enumerate())


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.submit("x"),
        lambda client: client.send("x"),
        lambda client: list(client.send_many(["x"])),
        lambda client: list(client.stream("x")),
        lambda client: list(client.results("beginning", follow=False)),
        lambda client: client.__enter__(),
    ],
    ids=["submit", "send", "send_many", "stream", "results", "enter"],
)
def test_every_call_after_close_is_told_that_the_client_is_closed(use):
    config = config_of()
    client = SyncClient(config, transport=MemoryTransport(World(config).cluster, "client"))
    client.close()
    with pytest.raises(ClientClosed, match="make a new one"):
        use(client)


@pytest.mark.parametrize(
    "use",
    [
        lambda client: client.submit("nobody answers"),
        lambda client: list(client.stream("nobody answers")),
        lambda client: list(client.results("latest")),
    ],
    ids=["submit", "stream", "results"],
)
def test_whoever_still_waits_when_another_thread_closes_is_told_too(client, use):
    ended = []

    def wait():
        try:
            use(client)
        except ClientClosed as error:
            ended.append(error)

    before = client.wait(_tasks())
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while client.wait(_tasks()) == before:
        pass
    client.wait(client.world.stop())
    client.close()
    thread.join(30)
    assert len(ended) == 1


async def _tasks():
    await asyncio.sleep(0)
    return len(asyncio.all_tasks())
