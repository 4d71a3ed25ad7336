"""What must hold at the end of a run, read from the cluster's own logs and the producers' acknowledgements."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from simulation.scenario import POISON, TENANTS

from broker.assembly import Assembly, StreamRestarted
from broker.transport.cancels import Cancels
from broker.transport.ledger import Ledger
from broker.transport.memory import MemoryCluster
from broker.transport.protocol import Record, TopicPartition
from engine_consumers.core import babble
from schemas import codecs, ids
from schemas.config import Config
from schemas.control import decode_control
from schemas.errors import ErrorCode
from schemas.messages import InferenceRequest, InferenceResult, TokenChunk
from schemas.topics import Topics

ALL = 1 << 40
Key = tuple[str, str]  # tenant, id


@dataclass
class Findings:
    """One run's figures.

    Attributes:
        accepted: Requests by tenant and id; one that was sent again counts once.
        terminal: Those of them that have a terminal result.
        lost: Those that have none.
        duplicated: Terminal results beyond one for each record.
        violations: What broke.
    """

    accepted: int = 0
    terminal: int = 0
    lost: int = 0
    duplicated: int = 0
    violations: list[str] = field(default_factory=list)


def unfinished(cluster: MemoryCluster, config: Config) -> Iterator[tuple[TopicPartition, int]]:
    """Give every record of an input topic that its group has not finished; -1 stands for an open transaction."""
    topics = Topics(config.kafka.topic_prefix)
    served = topics.requests("interactive"), topics.requests("batch"), topics.retries, topics.lanes
    inputs = [(topics.dispatcher_group, t) for t in served]
    inputs += [(topics.engine_group(pool), topics.engine(pool)) for pool in config.pools]
    for group, topic in inputs:
        for log in cluster.logs(topic):
            committed = cluster.committed.get((group, log.tp))
            ledger = Ledger(committed, log.first)
            if log.stable < log.end:
                yield log.tp, -1
            low = committed.offset if committed else log.first
            yield from ((log.tp, r.offset) for r in log.read(low, ALL)[0] if not ledger.is_finished(r.offset))


def check(world: Any, acknowledged: list[tuple[str, int, int]], alarms: list[str]) -> Findings:  # noqa: PLR0912 - one verdict each
    """Judge a run that has come to rest, or did not in time."""
    cluster, topics = world.cluster, world.topics
    findings = Findings(violations=list(alarms))
    broken = findings.violations
    asked: dict[Key, list[tuple[Record, InferenceRequest]]] = defaultdict(list)
    places = set()
    for service_class in ("interactive", "batch"):
        for record in world.read(topics.requests(service_class)):
            request = codecs.decode_request(record.value)
            name = request.id or ids.derived_id(*record[:3], record.timestamp_ms)
            asked[request.tenant, name].append((record, request))
            places.add(record[:3])
    places |= {record[:3] for record in world.read(topics.control)}
    cancels = Cancels()
    for record in world.read(topics.control):
        cancels.add(decode_control(record.value), record.offset, record.timestamp_ms)
    broken += [f"acknowledged {place} is not in its log" for place in acknowledged if place not in places]
    results: dict[Key, list[tuple[Record, InferenceResult]]] = defaultdict(list)
    for record in world.read(topics.results):
        result = codecs.decode_result(record.value)
        results[result.tenant, result.request_id].append((record, result))
    chunks: dict[str, list[tuple[Record, TokenChunk]]] = defaultdict(list)
    for record in world.read(topics.streams):
        chunk = codecs.decode_chunk(record.value)
        chunks[chunk.request_id].append((record, chunk))

    findings.accepted = len(asked)
    findings.terminal = len(results)
    tenants = Counter(name for _, name in asked)
    broken += [f"{key} has a result and was never accepted" for key in results if key not in asked]
    for key, found in asked.items():
        ended = results.get(key, [])
        findings.lost += not ended
        findings.duplicated += max(len(ended) - len(found), 0)
        if not 1 <= len(ended) <= len(found):  # one that comes again is answered by the first one's result, or once more
            broken.append(f"{key} was accepted {len(found)} times and ended {len(ended)} times")
        streams = chunks.get(key[1], []) if len(ended) == tenants[key[1]] == 1 else []  # a chunk names neither tenant nor record
        for record, result in ended:
            if result.status == "cancelled" and not any(cancels.matches(key[1], key[0], None, r.timestamp_ms) for r, _ in found):
                broken.append(f"{key} ended cancelled, and no cancel that is as new as it covers it")
            elif result.status == "expired" and found[0][1].deadline is None:
                broken.append(f"{key} ended expired and has no deadline")
            elif _is_refused_for(result, "tenant"):
                if world._config.topics.lane_partitions > len(TENANTS):
                    broken.append(f"{key} ended rejected, and every tenant could have a lane")
            elif _is_refused_for(result, "deadline"):
                if found[0][1].deadline is None:
                    broken.append(f"{key} ended rejected for its deadline, and has none")
            elif result.status not in {"cancelled", "expired"}:
                broken += _judge(key[1], found[0][1], record, result, streams)
    broken += [f"unfinished {tp.topic}/{tp.partition} offset {offset}" for tp, offset in unfinished(cluster, world._config)]
    broken += [f"{name} has {count} runs open" for name, count in world.open_runs.items()]
    return findings


def _is_refused_for(result: InferenceResult, param: str) -> bool:
    error = result.error
    return result.status == "rejected" and error is not None and (error.code, error.param) == (ErrorCode.CAPACITY_EXCEEDED, param)


def _judge(
    name: str, request: InferenceRequest, record: Record, result: InferenceResult, chunks: list[tuple[Record, TokenChunk]]
) -> Iterator[str]:
    """Hold one result, and the stream that led to it, against what the request must give."""
    if POISON in (request.prompt or ""):
        if result.error is None or result.error.code is not ErrorCode.POISON:
            yield f"{name} is poison and ended {result.status}: {result.error}"
        return
    if result.status != "completed":
        yield f"{name} ended {result.status}: {result.error}"
        return
    said = tokens_of(name, request)
    if result.output_tokens != said:
        yield f"{name} says {result.output_tokens} instead of {said}"
    twice = [where for where, n in Counter((c.run_id, c.seq) for _, c in chunks).items() if n > 1]
    if twice:
        yield f"{name}: two runs share one name, or wrote a chunk twice: {twice}"
    beyond = sorted({c.run_id for _, c in chunks if c.run_id > (result.run_id or "")})
    if beyond:
        yield f"{name}: run {result.run_id} won, yet {beyond} came after it"
    if chunks:
        for result_at_ms in (record.timestamp_ms, record.timestamp_ms + 0.5, ALL):
            yield from _follow(name, result_at_ms, result, chunks)


def tokens_of(name: str, request: InferenceRequest) -> list[int]:
    """What any engine says to the request."""
    seed = request.sampling.seed if request.sampling.seed is not None else ids.derived_seed(name)
    key = zlib.crc32((request.prompt or "").encode()) ^ (seed << 32)
    return babble.tokens(key, 0, request.max_output_tokens)


def _follow(name: str, result_at_ms: float, result: InferenceResult, chunks: list[tuple[Record, TokenChunk]]) -> Iterator[str]:
    """Read the stream as a subscriber does, who is done when the result comes."""
    events: list[tuple[float, int, TokenChunk | InferenceResult]]
    events = [(r.timestamp_ms, r.offset, chunk) for r, chunk in chunks]
    events.append((result_at_ms, -1, result))
    reader, text, newest = Assembly(name), "", ""
    for *_, event in sorted(events, key=lambda event: event[:2]):
        for item in reader.chunk(event) if isinstance(event, TokenChunk) else reader.result(event):
            if item.run_id < newest:
                yield f"{name}: a token of run {item.run_id} came after one of {newest}"
            newest = item.run_id
            if isinstance(item, StreamRestarted):
                yield f"{name}: the reader is told to begin anew, and all runs say the same"
                text = ""
            else:
                text += item.text
        if event is result:
            break
    if text != result.output_text:
        yield f"{name}: the reader has {text!r}, the result {result.output_text!r}"
