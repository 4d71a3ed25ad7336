"""What may be set of an engine behind Triton from `[engines.<name>.options]`."""

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from engine_consumers.core.checks import parse_options
from schemas.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Text = Annotated[str, Meta(min_length=1)]


class MoeOptions(Struct, frozen=True, omit_defaults=True):
    """Which server, which of its models, and how long to wait for what.

    Attributes:
        profile: How its model takes requests and answers: our own, Triton's vLLM backend, TensorRT-LLM's core model, or the
            model around it that takes text (BLS).
        url: `host:port` of a server that somebody else runs; requests are handed back while it is away.
        server: Command that starts one for this worker alone; `--grpc-port N` is appended. Its end is the engine's.
        triton_model: The model's name there; each profile has a usual one.
        load: Load the model at the start and unload it at the end, where the server is run with explicit model control.
        tokenizer: Folder of the tokenizer, where the model's own has none.
        chat_template: File or text of a template, instead of the tokenizer's own.
        max_context: Tokens of prompt and output together; by default what the server or the model's configuration says.
        start_timeout_s: Time until the server and its model are ready.
        call_timeout_s: Time for a call that is not a run.
        run_timeout_s: Time for a whole run; a run that stands still is ended much sooner by the worker.
        keepalive_s: After so long in silence the connection is tried.
        message_bytes_max: Of one message, either way.
    """

    profile: Literal["forebay", "vllm", "tensorrt_llm", "tensorrt_llm_bls"] = "forebay"
    url: Text | None = None
    server: list[Text] = field(default_factory=list)
    triton_model: Text | None = None
    load: bool = False
    tokenizer: Text | None = None
    chat_template: str | None = None
    max_context: Annotated[int, Meta(ge=2)] | None = None
    start_timeout_s: Seconds = 600.0
    call_timeout_s: Seconds = 5.0
    run_timeout_s: Seconds = 3_600.0
    keepalive_s: Seconds = 20.0
    message_bytes_max: Annotated[int, Meta(ge=4_096, le=2**31 - 1)] = 64 * 2**20


def read_options(given: dict[str, Any]) -> MoeOptions:
    """Read the options.

    Raises:
        ConfigError: One is unknown or out of bounds, or it is not said which server.
    """
    options = parse_options(MoeOptions, given)
    if options.url is not None and not re.fullmatch(r"[^/\s]+:\d{1,5}", options.url):
        message = f"`options.url`: expected the host:port of a Triton server's gRPC, got {options.url!r}"
        raise ConfigError(message)
    if bool(options.url) == bool(options.server):
        said = "both are set" if options.url else "neither is set"
        message = (
            f"`options.url`, `options.server`: {said}: expected the address of a Triton server, or the command that starts one"
        )
        raise ConfigError(message)
    return options
