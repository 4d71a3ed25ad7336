"""What may be set of an SSM engine from `[engines.<name>.options]`."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class SsmOptions(Struct, frozen=True, omit_defaults=True):
    """How a Mamba model is run.

    Attributes:
        device: `auto` takes the GPU where there is one.
        dtype: Of weights and states.
        max_context: Tokens of prompt and output together; states do not grow with it, so it bounds time only.
        trained_context: Length that the model was trained for; read from its configuration by default.
        prefill_chunk: Tokens of a prompt that one step reads beside those that decode: 256 on a GPU by default, 64 on a CPU,
            which reads more at a time no faster.
        readers: Prompts that are read in turns; one of them is kept for prompts of a single piece.
        tokenizer: Folder of the tokenizer, where the model's own has none: mamba_ssm's checkpoints bring none.
        threads: Of the CPU; PyTorch's own choice by default.
        chat_template: File or text of a template, instead of the tokenizer's own.
        start_timeout_s: Time that loading may take.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_context: Annotated[int, Meta(ge=2)] = 131_072
    trained_context: Positive | None = None
    prefill_chunk: Positive | None = None
    readers: Annotated[int, Meta(ge=2, le=64)] = 4
    tokenizer: str | None = None
    threads: Positive | None = None
    chat_template: str | None = None
    start_timeout_s: Annotated[float, Meta(gt=0, le=7_200)] = 600.0
