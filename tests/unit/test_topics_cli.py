"""What `forebay topics ensure` does and tells."""

from memory_stack import config_of
from virtual_loop import run_virtual

from broker.transport.memory import MemoryCluster, MemoryTransport
from deploy.cli.topics import ensure_topics
from schemas.topics import Topics, TopicSpec


def test_it_tells_the_partitions_that_are_there_and_not_those_that_were_wished_for():
    config = config_of()
    cluster = MemoryCluster(config.kafka)
    specs = Topics().specs(config.topics, config.pools, config.kafka.record_bytes_max)
    wide = [TopicSpec(spec.name, spec.partitions + 5, spec.settings) for spec in specs]

    async def scenario():
        first = await ensure_topics(config, wide, MemoryTransport(cluster, "one"))
        return first, await ensure_topics(config, specs, MemoryTransport(cluster, "two"))

    (made, wished), (done, now) = run_virtual(scenario())
    assert len(made) == len(specs)
    assert wished == {spec.name: spec.partitions for spec in wide}
    assert done == []
    assert now == wished


def test_a_topic_that_could_not_be_made_has_no_partitions(monkeypatch):
    config = config_of()
    cluster = MemoryCluster(config.kafka)
    spec = TopicSpec("forebay.results", 4, {})

    async def scenario():
        transport = MemoryTransport(cluster, "one")
        admin = await transport.admin()

        async def cannot(*_):
            return ["NOT done: topic forebay.results"]

        async def ours():
            return admin

        monkeypatch.setattr(admin, "ensure", cannot)
        monkeypatch.setattr(transport, "admin", ours)
        return await ensure_topics(config, [spec], transport)

    assert run_virtual(scenario()) == (["NOT done: topic forebay.results"], {"forebay.results": None})
