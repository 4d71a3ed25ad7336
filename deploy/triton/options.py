"""What may be set of the model `forebay_moe`, and the requests that it answers."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from schemas.messages import Sampling

MODEL = "forebay_moe"
Positive = Annotated[int, Meta(ge=1)]


class ModelOptions(Struct, frozen=True):
    """How the model is run.

    Attributes:
        model_path: Folder with config.json, safetensors and tokenizer.json.
        device: `auto` takes the GPU where there is one.
        dtype: Of weights and computing.
        slots: Requests at once.
        readers: Prompts that are read in turns; one of them is kept for prompts of a single piece.
        prefill_chunk: Tokens of a prompt that one step reads beside those that decode.
        max_context: Tokens of prompt and output together; by default the model's own length, at most 4,096.
        cold: How experts that are not resident are kept: as they are, or in 8 bits with a scale for each row.
        expert_budget_bytes: Bytes of experts that may be resident; none: all of them.
        threads: Of the CPU; PyTorch's own choice by default.
    """

    model_path: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    slots: Positive = 8
    readers: Annotated[int, Meta(ge=2, le=64)] = 4
    prefill_chunk: Positive = 256
    max_context: Annotated[int, Meta(ge=2)] | None = None
    cold: Literal["host", "int8"] = "host"
    expert_budget_bytes: Annotated[int, Meta(ge=0)] | None = None
    threads: Positive | None = None


class Generate(Struct, frozen=True, tag_field="op", tag="generate"):
    """Run a prompt."""

    run: str
    max_output_tokens: int
    seed: int = 0
    priority: int = 0
    sampling: Sampling = field(default_factory=Sampling)


class Cancel(Struct, frozen=True, tag_field="op", tag="cancel"):
    """End a run; answered once it is out of the loop."""

    run: str


class Status(Struct, frozen=True, tag_field="op", tag="status"):
    """Ask for the figures."""


class Budget(Struct, frozen=True, tag_field="op", tag="budget"):
    """Set the bytes of experts that may be resident; none: all of them."""

    bytes: Annotated[int, Meta(ge=0)] | None


Operation = Generate | Cancel | Status | Budget
