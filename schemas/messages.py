"""The messages on the wire: what a client sends, what it gets back, and what passes between the parts.

Every struct is lenient (unknown fields are ignored) so that parts of different versions understand one another;
`strict.py` holds the ingress variants that refuse what they do not know. Units stand last in a field's name.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from schemas.errors import ErrorCode
from schemas.formats import LogprobCount, OutputFormat, TokenLogprob

Id = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MetadataKey = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
BlobUrl = Annotated[str, Meta(max_length=2048, pattern=r"^[a-z][a-z0-9+.-]*://[^\x00-\x1f\x7f]+\Z")]
EngineKind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,31}\Z")]

ServiceClass = Literal["interactive", "batch"]
Status = Literal["completed", "failed", "cancelled", "expired", "rejected"]
FinishReason = Literal["stop", "length", "abort", "error"]
Fallback = Literal["any", "same_model", "none"]

AUTO = "auto"  # a model or a routing hint left to the dispatcher
DEFAULT_TENANT = "default"
DEFAULT_MAX_OUTPUT_TOKENS = 256
INPUTS = ("prompt", "messages", "input_tokens", "input_ref")
RUN_HOPS_MAX = 999_999  # as many as a run's id has digits for


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn; the defaults are the model's plain distribution.

    Attributes:
        logprobs: Tell of each token how likely it was, beside so many of the likeliest ones there.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0  # 0: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)] = field(default_factory=list)
    seed: Seed | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logprobs: LogprobCount | None = None


class BlobRef(Struct, frozen=True, omit_defaults=True):
    """Names what is too large for a record and lies elsewhere: the claim check.

    Attributes:
        url: Where, with its protocol: `file:///...`, `s3://...`, or another that fsspec knows.
        size_bytes: Its size.
        sha256: Its digest, 64 hexadecimal digits.
        content_type: `application/json`: an object with one of the inputs, or of outputs; `text/plain`: a prompt as it is.
    """

    url: BlobUrl
    size_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    content_type: Literal["application/json", "text/plain"] = "application/json"


class InferenceRequest(Struct, frozen=True, omit_defaults=True):
    """One request; exactly one of `prompt`, `messages`, `input_tokens` and `input_ref` holds the input.

    The service class is the topic it was produced to. A record without an id gets one derived from where it lies.

    Attributes:
        model: A model's name or alias; `auto` takes any.
        max_output_tokens: Upper bound of generated tokens.
        output_format: The form that the output must have; only engines that can hold to it are asked.
        routing_hint: The kind of engine preferred, or `auto`.
        fallback: Which engines may stand in: `any`, only those with the `same_model`, or `none`.
        slo_latency_ms: Latency wished for; it steers routing and is not a deadline.
        deadline: After this moment the answer is of no use (RFC 3339 with an offset).
        stream: Whether token chunks are published as they come.
        metadata: At most 16 pairs, returned with the result unread.
    """

    id: Id | None = None
    tenant: Tenant = DEFAULT_TENANT
    model: ModelName = AUTO
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    input_tokens: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    input_ref: BlobRef | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = DEFAULT_MAX_OUTPUT_TOKENS
    sampling: Sampling = field(default_factory=Sampling)
    output_format: OutputFormat | None = None
    routing_hint: EngineKind = AUTO
    fallback: Fallback = "any"
    slo_latency_ms: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    deadline: Annotated[datetime, Meta(tz=True)] | None = None
    stream: bool = False
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse none or several of the inputs."""
        given = (self.prompt is not None) + (self.messages is not None) + (self.input_tokens is not None)
        if given + (self.input_ref is not None) == 1:
            return
        names = [name for name in INPUTS if getattr(self, name) is not None]
        expected = "give exactly one of `prompt`, `messages`, `input_tokens` and `input_ref`"
        msg = f"`{names[1]}` cannot stand beside `{names[0]}`: {expected}" if names else f"`prompt` is missing: {expected}"
        raise ValueError(msg)


class TokenChunk(Struct, frozen=True, omit_defaults=True):
    """A piece of a stream.

    `run_id` sorts: a later run supersedes an earlier one, whose chunks a reader drops.
    Within a run `seq` counts from 0 without gaps; the last chunk has a `finish_reason`. `logprobs`, where they were asked
    for, are those of its tokens, in the same order.
    """

    request_id: str
    run_id: str
    seq: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Usage(Struct, frozen=True):
    """Tokens counted by the engine's own tokenizer."""

    input_tokens: int = 0
    output_tokens: int = 0


class Timing(Struct, frozen=True, omit_defaults=True):
    """Where the time went, in milliseconds; absent where the stage was not reached."""

    queued_ms: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    tokens_per_second: float | None = None


class ErrorInfo(Struct, frozen=True, omit_defaults=True):
    """What went wrong.

    Attributes:
        param: Path of the field at fault.
        retry_after_ms: When to ask again, where that is known.
    """

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_ms: int | None = None


class Placement(Struct, frozen=True, omit_defaults=True):
    """Why a request was sent where it was sent.

    Attributes:
        reason: The preference that was followed (`hint`, `long_context`, `low_latency`), `least_cost` among several, or
            `only` where no other engine that serves it as well had a slot.
        wanted: The kind that was preferred and not taken, or, where another model stands in, the pool that serves the one
            asked for.
        why_not: What kept it from there: `full` (no free slot, or over `preferred_load_max`), the filter that it did not
            pass, or `model`, which nobody of that kind serves.
        stands_in: Another model than the one asked for.
        predicted_ttft_ms: Until the first token, from the moment it was sent.
        predicted_ms: Until the end.
    """

    reason: str = field(default_factory=lambda: "only")  # a factory's value is always written
    wanted: str | None = None
    why_not: str | None = None
    stands_in: bool = False
    predicted_ttft_ms: float | None = None
    predicted_ms: float | None = None


class RouteAttempt(Struct, frozen=True, omit_defaults=True):
    """One engine that was tried."""

    engine: str
    worker: str
    outcome: Status | Literal["retried"]
    error: ErrorInfo | None = None
    placement: Placement | None = None


class ExpertFigures(Struct, frozen=True, omit_defaults=True):
    """How a mixture of experts got at its experts: since its start, or, in a result, while that request ran.

    What a result tells covers the steps that it shared with others.

    Attributes:
        hits: Times that an expert was resident when it was needed.
        misses: Times that it was not, and had to be waited for.
        stall_ms: Time that steps stood still for them.
        resident: Experts that are resident now.
        budget_bytes: What resident ones may take; None: all are.
        prefetched: Fetched before they were needed.
        prefetch_used: Of these, those that then were.
        evicted: That gave way.
        hottest: The most used of late: layer, expert, and how much.
    """

    hits: int
    misses: int
    stall_ms: float
    resident: int | None = None
    resident_bytes: int | None = None
    budget_bytes: int | None = None
    prefetched: int = 0
    prefetch_used: int = 0
    evicted: int = 0
    hottest: list[tuple[int, int, float]] = field(default_factory=list)


class InferenceResult(Struct, frozen=True, omit_defaults=True):
    """The terminal record: exactly one for each accepted request.

    Attributes:
        logprobs: Of each output token, where they were asked for.
        experts: Where the engine is a mixture of experts that tells.
        output_ref: Where text, tokens and logprobs lie, as a `BlobOutput`, when they are too large for a record.
    """

    request_id: str
    status: Status
    tenant: str = field(default_factory=lambda: DEFAULT_TENANT)  # a factory's value is always written
    model: str | None = None
    engine: str | None = None
    worker: str | None = None
    run_id: str | None = None
    output_text: str = ""
    output_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output_ref: BlobRef | None = None
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing = field(default_factory=Timing)
    route: list[RouteAttempt] = field(default_factory=list)
    error: ErrorInfo | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    experts: ExpertFigures | None = None


class BlobInput(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the blob of an `input_ref` holds: one of the inputs."""

    prompt: Annotated[str, Meta(min_length=1)] | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    input_tokens: Annotated[list[TokenId], Meta(min_length=1)] | None = None


class BlobOutput(Struct, frozen=True, omit_defaults=True):
    """What the blob of an `output_ref` holds."""

    output_text: str = ""
    output_tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Completion(Struct, frozen=True, array_like=True):
    """What one run took, so that the dispatcher may correct what it charged, and learn.

    Attributes:
        partition: With the offset, the record of the engine's topic.
        waited_ms: From being read to its start.
        ttft_ms: From its start to its first token; None where there was none.
        run_ms: From its start to its end.
        beside: Requests that ran beside it when it started.
        kv_cache_usage: At its start, where the engine tells.
        code: Why it failed.
    """

    partition: int
    offset: int
    input_tokens: int
    output_tokens: int
    waited_ms: float
    ttft_ms: float | None
    run_ms: float
    beside: int = 0
    kv_cache_usage: float | None = None
    code: ErrorCode | None = None


class EngineStatus(Struct, frozen=True, omit_defaults=True):
    """What one worker says of itself with each heartbeat; figures it cannot know are absent, not zero.

    Attributes:
        engine: The engine's name in the configuration; its pool reads `<prefix>.engine.<pool>`.
        worker: The worker's own name, unique in its pool.
        partitions: Partitions of the pool's topic that it owns.
        positions: Partition -> next offset it will take in: what lies below has been read.
        queue_depth: Requests read and not yet running.
        slots: Requests that may run at once.
        interactive_slots: Of these, those that batch may not take.
        batch_load: Batch requests read and not yet finished.
        completed: Runs that ended since the start; `completions` are the last of them, the oldest first, and some may
            have been told before.
        epoch: Changes with every start of the worker.
        updated_at_ms: Unix time of this snapshot.
    """

    engine: str
    kind: str
    pool: str
    worker: str
    epoch: int
    updated_at_ms: int
    is_healthy: bool = True
    partitions: list[int] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    queue_depth: int = 0
    running: int = 0
    slots: int = 1
    max_context: int | None = None
    trained_context: int | None = None
    models: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    kv_cache_usage: float | None = None
    gpu: int | None = None
    gpu_mem_used_bytes: int | None = None
    gpu_mem_total_bytes: int | None = None
    gpu_temperature_c: float | None = None
    gpu_utilization: float | None = None
    avg_latency_ms: float | None = None
    throughput_tps: float | None = None
    interactive_slots: int = 0
    batch_load: int = 0
    completed: int = 0
    completions: list[Completion] = field(default_factory=list)
    experts: ExpertFigures | None = None


class Envelope(Struct, frozen=True, omit_defaults=True, array_like=True):
    """What the system knows of a request beside the client's own bytes; a header of the inner records.

    The request's value is never rewritten on its way: the envelope carries everything that is added to it.

    Attributes:
        id: The request's id, also where the client gave none.
        origin: Topic, partition and offset of the record the client produced.
        received_at_ms: Its timestamp; a retry keeps it, so age counts from here.
        hop: How often the request was handed to an engine before; with the takeover count it orders runs.
        attempts: Failures that were the request's own.
        not_before_ms: Unix time before which a retry must not be dispatched.
        excluded: Engine -> epoch in which it handed the request back.
        route: The attempts so far.
        crashes: How often it was in hand when a worker or its engine died.
        placement: Why it was sent where it is now.
    """

    id: str
    tenant: str
    service_class: ServiceClass
    origin: tuple[str, int, int]
    received_at_ms: int
    hop: int = 0
    attempts: int = 0
    not_before_ms: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    route: list[RouteAttempt] = field(default_factory=list)
    crashes: int = 0
    placement: Placement | None = None


class SeenMark(Struct, frozen=True, array_like=True):
    """A request that was accepted for good, so that the same id is not run again for a while.

    Attributes:
        key: A digest of tenant, id and where the answer goes.
        topic: With partition and offset, the record that was accepted.
    """

    key: bytes
    topic: str
    partition: int
    offset: int


class SeenBatch(Struct, frozen=True, array_like=True):
    """Marks made in one go.

    Attributes:
        at_ms: Unix time at which the last of them was made.
    """

    at_ms: int
    marks: list[SeenMark]


JsonObject = dict[str, Any]


def run_id(hop: int, takeovers: int) -> str:
    """Name one run of a request so that later runs sort after earlier ones.

    Args:
        hop: How often the request was handed to an engine before this run.
        takeovers: How often its record was taken over unfinished on this engine's topic.
    """
    return f"{hop:06d}.{takeovers:06d}"
