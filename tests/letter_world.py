"""A cluster in memory with the topics of a cell, and dead letters in it as dispatcher and worker write them."""

import asyncio
from itertools import count

from broker.dead_letters import DeadLetters
from broker.replay import replay
from broker.transport.memory import MemoryCluster, MemoryTransport
from broker.transport.outputs import Outputs
from broker.transport.protocol import Committed, Record, TopicPartition
from schemas import Envelope, ErrorCode, ErrorInfo, RouteAttempt, Topics, codecs, headers, parse_config

TOPICS = Topics()
DEAD = TOPICS.dead_letters
INTERACTIVE, BATCH = TOPICS.requests("interactive"), TOPICS.requests("batch")
BOOM = ErrorInfo(ErrorCode.INTERNAL, "boom (attempt 3 of 3)")
BAD = ErrorInfo(ErrorCode.INVALID_REQUEST, "not JSON: it is malformed")
START_MS = 1_700_000_000_000


class Letters:
    """What tests do with a cluster: write dead letters, read topics, put letters back."""

    def __init__(self, partitions=1, delivery="exactly_once"):
        raw = {"kafka": {"delivery": delivery}, "topics": {"dead_letter_partitions": partitions, "request_partitions": 2}}
        self.config = parse_config(raw)
        ticks = count()
        self.cluster = MemoryCluster(self.config.kafka, clock=lambda: START_MS / 1000 + next(ticks))
        self.outputs = Outputs(TOPICS, 1, self.config.kafka.record_bytes_max)
        for spec in TOPICS.specs(self.config.topics, []):
            self.cluster.add_topic(spec.name, spec.partitions)
        self.way = MemoryTransport(self.cluster, "test")

    async def write(self, *records, commit=True):
        """Write records in a transaction, as the hop does."""
        source = TopicPartition(INTERACTIVE, 0)
        outbox = self.way.outbox("somebody", source, await self.way.assign([source], "somebody"))
        await outbox.open()
        if commit:
            await outbox.commit(records, Committed(0))
        return outbox

    def refused(self, value, given=(), topic=INTERACTIVE, offset=7, key=None, error=BAD, partition=None):
        """A dead letter of a record that the dispatcher refused."""
        record = Record(topic, 1, offset, key, value, tuple(given), START_MS)
        return self.outputs.dead_letter(record, error)._replace(partition=partition)

    def failed(self, name, service_class="interactive", given=(), value=None, tenant="t0", error=BOOM, partition=None):
        """A dead letter of a request that a worker gave up."""
        value = value if value is not None else b'{"id":"%s","tenant":"%s","prompt":"a"}' % (name.encode(), tenant.encode())
        route = [RouteAttempt("sim", "w1", "retried", error)]
        envelope = Envelope(name, tenant, service_class, (TOPICS.requests(service_class), 1, 7), START_MS, 2, 2, route=route)
        forward = self.outputs.forward(TOPICS.engine("sim"), 3, envelope, value, tuple(given))
        record = Record(forward.topic, 3, 44, forward.key, forward.value, forward.headers, START_MS)
        return self.outputs.dead_letter(record, error)._replace(partition=partition)

    async def read(self, topic):
        """Every committed record of a topic."""
        tps = [log.tp for log in self.cluster.logs(topic)]
        consumer = await MemoryTransport(self.cluster).assign(tps)
        for tp in tps:
            consumer.seek(tp, self.cluster.log(tp).first)
        records = []
        while batch := await consumer.poll(tps, 10_000, 1):
            records += batch
        return records

    async def letters(self, *, put_back=False):
        return [letter async for letter in DeadLetters(self.way, TOPICS).read(put_back=put_back)]

    async def names(self, *, put_back=False):
        return [letter.id for letter in await self.letters(put_back=put_back)]

    async def put_back(self, letters=None, way=None, **more):
        """Put letters back, all by default; give what was told of it."""
        told = []
        letters = await self.letters() if letters is None else letters
        await replay(way or self.way, TOPICS, each(letters), told.append, **more)
        return told

    async def requests(self):
        return [*await self.read(INTERACTIVE), *await self.read(BATCH)]


async def each(letters):
    for letter in letters:
        await asyncio.sleep(0)
        yield letter


def fields(*given):
    """Headers that only a client would send."""
    return [(headers.CONTENT_TYPE, b"application/json"), ("x-mine", b"\x00\xff"), *given]


def envelope_header(**fields_of):
    return (headers.ENVELOPE, codecs.encode_envelope(Envelope(**fields_of)))
