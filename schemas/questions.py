"""What a process may be asked while it runs, and what it answers: where a request is, and how a dispatcher sees things.

Questions and answers are advice on Redis: one that is lost costs nothing. What is not known is refused.
"""

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field, structs

from schemas import faults, headers
from schemas.config import BlobsConfig, Config, KafkaConfig, RedisConfig
from schemas.messages import EngineStatus, Id, ServiceClass, Status, Tenant
from schemas.policy import PoolSettings, TenantConfig

AskId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z]{1,64}\Z")]


class Stage(str, Enum):
    """How far a request has come."""

    UNREAD = "unread"  # on the topic that it was sent to, and nobody has read it yet
    WAITING = "waiting"  # in the dispatcher's queue
    DELAYED = "delayed"  # there, and tried again later
    LANE = "lane"  # in a lane of its tenant
    RETRY = "retry"  # on the retries' topic
    SENT = "sent"  # on an engine's topic, and no worker has read it yet
    RUNWAY = "runway"  # in a worker's hands, before it runs
    RUNNING = "running"
    ENDED = "ended"


class Why(str, Enum):
    """Why a request waits."""

    TURN = "turn"  # others go before it
    TENANT_PAUSED = "tenant_paused"
    TENANT_RATE = "tenant_rate"
    ENGINES_FULL = "engines_full"  # of those that may serve it
    ENGINES_PAUSED = "engines_paused"
    ENGINES_RATE = "engines_rate"
    ENGINES_BROKEN = "engines_broken"  # their breakers are open
    NO_ENGINE = "no_engine"  # none that may serve it lives
    RETRY = "retry"  # it is tried again at a time of its own
    SLOT = "slot"  # all of the worker's are taken
    ALONE = "alone"  # it is to run with nothing beside it


class Where(Struct, frozen=True, omit_defaults=True):
    """Where a request is.

    Attributes:
        id: The request's.
        stage: How far it has come.
        received_at_ms: When the client's record was written (Unix time).
        since_ms: When it came to this stage, where that is known.
        ahead: How many are expected to go before it.
        why: Why it waits.
        until_ms: When that is over by itself.
        engines: What stands in the way of each pool that may serve it.
        record: Topic, partition and offset of the record that it is now.
        output_tokens: So far.
        status: Of its result.
    """

    id: str
    stage: Stage
    tenant: str
    service_class: ServiceClass | None = None
    received_at_ms: int | None = None
    since_ms: int | None = None
    deadline_ms: int | None = None
    ahead: int | None = None
    why: Why | None = None
    until_ms: int | None = None
    engines: dict[str, str] = field(default_factory=dict)
    record: tuple[str, int, int] | None = None
    pool: str | None = None
    worker: str | None = None
    attempts: int = 0
    hop: int = 0
    output_tokens: int | None = None
    status: Status | None = None


class WorkerSeen(Struct, frozen=True, omit_defaults=True):
    """A worker as a dispatcher sees it.

    Attributes:
        status: Its last snapshot, without completions.
        heard_ms: When that came.
        load: What it has, with what was sent to it since.
        batch_load: Of that, batch.
        start: So many at most, while it starts slowly.
    """

    status: EngineStatus
    heard_ms: int
    load: int = 0
    batch_load: int = 0
    start: int | None = None


class QueueSeen(Struct, frozen=True):
    """What waits of a tenant.

    Attributes:
        waiting: In hand.
        ready_ms: When the tenant's rates let it be served next; None at once, and where it is paused.
    """

    service_class: ServiceClass
    tenant: str
    waiting: int
    ready_ms: float | None = None


class BreakerSeen(Struct, frozen=True, omit_defaults=True):
    """A worker that failed over and over.

    Attributes:
        epoch: Of its start.
        state: `open`: it is left alone; `half_open`: it is probed.
        open_ms: How long it is left alone.
        until_ms: When it is probed, or may be again; None where nothing is awaited.
        probing: Probes that are out.
    """

    pool: str
    worker: str
    epoch: int
    state: Literal["half_open", "open"]
    open_ms: int
    until_ms: float | None = None
    probing: int = 0


class DispatcherState(Struct, frozen=True, omit_defaults=True):
    """All that a dispatcher goes by when it routes a request, at one moment.

    Attributes:
        at_ms: Unix time.
        config: The configuration, without addresses, secrets, and what only engines read.
        tenants: Tenant -> its whole setting, of those that were set while it runs.
        pools: Pool -> likewise.
        pools_ready_ms: Pool -> when its rates let it be sent the next request, of those that must wait.
        pools_run_ms: Pool -> its mean run of late.
        predictor: What it has learned, as its own `restore` takes it.
    """

    at_ms: int
    config: Config
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    pools: dict[str, PoolSettings] = field(default_factory=dict)
    workers: list[WorkerSeen] = field(default_factory=list)
    queues: list[QueueSeen] = field(default_factory=list)
    breakers: list[BreakerSeen] = field(default_factory=list)
    pools_ready_ms: dict[str, float] = field(default_factory=dict)
    pools_run_ms: dict[str, float] = field(default_factory=dict)
    predictor: Any = None


class WhereIs(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="where"):
    """Where is this request? Without a tenant that of any."""

    id: Id
    tenant: Tenant | None = None


class StateOf(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="kind", tag="state"):
    """How does the active dispatcher see things? With a tenant only what it has learned of that one's answers is told."""

    tenant: Tenant | None = None


Question = WhereIs | StateOf


class Asked(Struct, frozen=True, forbid_unknown_fields=True):
    """A question on its way.

    Attributes:
        id: Names it, and so where the answers are awaited.
    """

    id: AskId
    question: Question


class Answer(Struct, frozen=True, omit_defaults=True):
    """What one process says.

    Attributes:
        name: Of the process.
        role: `standby` is a dispatcher that is not active.
        found: The requests that it has in hand.
        is_cut: There is more than was sent.
    """

    name: str
    role: Literal["dispatcher", "standby", "worker"]
    found: list[Where] = field(default_factory=list)
    state: DispatcherState | None = None
    is_cut: bool = False


_asked, _answer = msgspec.msgpack.Decoder(Asked), msgspec.msgpack.Decoder(Answer)
_state = msgspec.json.Decoder(DispatcherState)


def decode_asked(value: bytes) -> Asked:
    """Read a question.

    Raises:
        InvalidMessage: It is malformed, or of a kind that is not known here.
    """
    try:
        return _asked.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, headers.MSGPACK, Asked) from None


def decode_answer(value: bytes) -> Answer:
    """Read an answer.

    Raises:
        InvalidMessage: It is malformed.
    """
    try:
        return _answer.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, headers.MSGPACK, Answer) from None


def decode_state(value: bytes) -> DispatcherState:
    """Read a state that was saved as JSON.

    Raises:
        InvalidMessage: With the path of what is wrong.
    """
    try:
        return _state.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise faults.misread(error, value, headers.JSON, DispatcherState) from None


def encode_state(state: DispatcherState) -> bytes:
    """Write a state as JSON, to be saved."""
    return msgspec.json.format(msgspec.json.encode(state), indent=2)


def public(config: Config) -> Config:
    """The part of a configuration that routing goes by: no addresses, no secrets, nothing that only an engine reads."""
    engines = {
        name: structs.replace(engine, model_path=None, python=None, options={}, env={}) for name, engine in config.engines.items()
    }
    plain = {"redis": RedisConfig(), "blobs": BlobsConfig(), "engines": engines}
    return structs.replace(config, kafka=KafkaConfig(topic_prefix=config.kafka.topic_prefix), **plain)


def without_completions(status: EngineStatus) -> EngineStatus:
    """A snapshot as it is shown: what was completed lately is left out."""
    return structs.replace(status, completions=[]) if status.completions else status
