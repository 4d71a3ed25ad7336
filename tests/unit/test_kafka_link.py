"""How clients behave while no broker is there."""

import asyncio

from virtual_loop import run_virtual

from broker.transport.kafka.link import CONNECT_RETRY_S, bootstrap
from schemas.config import KafkaConfig


class Away:
    """A client of the library that was connected once, and finds its broker gone."""

    def __init__(self) -> None:
        self.tries = 0

    async def bootstrap(self) -> None:
        """The broker was there then."""

    async def _get_conn(self, node_id: int, *, group: str = "default") -> None:
        assert (node_id, group) == (1, "coordination")
        self.tries += 1


def test_a_client_whose_broker_is_away_tries_again_a_few_times_a_second():
    async def scenario():
        client = Away()
        await bootstrap(client, KafkaConfig())

        async def insist() -> None:
            while True:  # as the library's sender does, whose backoff we have made short
                assert await client._get_conn(1, group="coordination") is None

        task = asyncio.ensure_future(insist())
        await asyncio.sleep(10)
        task.cancel()
        return client.tries

    assert run_virtual(scenario()) <= 10 / CONNECT_RETRY_S + 1
