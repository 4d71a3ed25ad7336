"""The whole path in memory, with a client on it."""

from memory_stack import TOPICS, Stack, config_of, on_stack

from broker import Client


class World(Stack):
    """A stack and its clients; dispatcher and worker are started when a test wants answers."""

    topics = TOPICS

    def __init__(self, config):
        super().__init__(config)
        self.clients = []

    def answer(self):
        self.dispatcher()
        self.worker()

    def client(self, name="client", **named):
        clock = lambda: self.clock() / 1000  # noqa: E731
        client = Client(self.config, transport=self.way(name), client_id=name, clock=clock, **named)
        self.clients.append(client)
        return client

    async def stop(self):
        for client in self.clients:
            await client.close()
        await super().stop()


def in_world(scenario, config=None):
    """Run a scenario under virtual time."""
    return on_stack(scenario, config or config_of(), World)
