"""What may be set of vLLM from `[engines.<name>.options]`, and vLLM's arguments made from it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from engine_consumers.model_folder import model_folder
from engine_consumers.transformer.adapters import lora_arguments
from schemas.config import EngineConfig, TimeSlicesConfig
from schemas.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]

SLICES = "forebay_time_slices"  # where vLLM's core process finds them, in vLLM's `additional_config`
SCHEDULER = "engine_consumers.transformer.slicing.SlicedScheduler"
ONE_STEP = "vLLM would use the device for more than one step at a time, and `time_slices` end with a step"

OURS = ("chat_template", "engine_args", "loras", "start_timeout_s")
# What no option says; none of it may come in by another way, or what is told of the engine would not be true.
SET_ELSEWHERE = {
    "model": "`model` or `model_path` of the engine says it",
    "max_num_seqs": "`slots` of the engine says it",
    "scheduling_policy": "it is always priority",
    "disable_log_stats": "the figures go to the engine's status",
    "enable_log_requests": "the worker's log names requests",
    "scheduler_cls": "`time_slices` of the engine sets it where it is needed",
    "enable_lora": "`options.loras` says it",
    "served_model_name": "`model` and `aliases` of the engine say it",
}


class TransformerOptions(Struct, frozen=True, omit_defaults=True):
    """vLLM's own names and meanings; what is not set is left to vLLM.

    Attributes:
        chat_template: Folder's file or text of a template, for models that bring none.
        engine_args: Whatever else vLLM's engine takes, by its own names.
        loras: Adapters of the model, name -> folder. Requests ask for one as for a model, by its name.
        start_timeout_s: Time that loading may take.
        max_num_batched_tokens: Tokens of one step; a longer prompt is read in several.
    """

    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] | None = None
    max_model_len: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    enforce_eager: bool | None = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    kv_cache_dtype: str | None = None
    block_size: Positive | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: Positive | None = None
    pipeline_parallel_size: Positive | None = None
    enable_expert_parallel: bool | None = None
    cpu_offload_gb: Annotated[float, Meta(ge=0)] | None = None
    quantization: str | None = None
    load_format: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    trust_remote_code: bool | None = None
    seed: Annotated[int, Meta(ge=0)] | None = None
    generation_config: str | None = None
    chat_template: str | None = None
    loras: dict[Annotated[str, Meta(min_length=1, max_length=256)], str] = field(default_factory=dict)
    engine_args: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: Annotated[float, Meta(gt=0, le=7_200)] = 900.0

    def arguments(self, model: str, slots: int) -> dict[str, Any]:
        """Give the arguments of vLLM's `AsyncEngineArgs`.

        Args:
            model: Folder or hub name.
            slots: Requests that run at once.

        Raises:
            ConfigError: `engine_args` holds what is said elsewhere, or a folder of `loras` no adapter.
        """
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None and name not in OURS}
        for name in self.engine_args:
            elsewhere = SET_ELSEWHERE.get(name) or (f"`options.{name}` says it" if name in self.__struct_fields__ else None)
            if elsewhere is not None:
                message = f"`options.engine_args.{name}`: it does not stand here: {elsewhere}"
                raise ConfigError(message)
        return {
            # By itself vLLM may check a form with one library and hold to it with another; and models may go on with blanks.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            **given,
            **lora_arguments(self.loras),
            **self.engine_args,
            "model": model,
            "max_num_seqs": slots,
            "scheduling_policy": "priority",  # orders what waits in vLLM; it preempts nothing for it (vllm#40004)
            "disable_log_stats": True,  # our own logger takes the figures; vLLM's would print and export them too
            "enable_log_requests": False,
        }


def sliced(arguments: dict[str, Any], slices: TimeSlicesConfig | None) -> dict[str, Any]:
    """Give vLLM's arguments such that its core takes turns, where it shares its device.

    Raises:
        ConfigError: They let it run several steps at once.
    """
    if slices is None:
        return arguments
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if arguments.get(name, 1) != 1:
            message = f"`options`: expected no `{name}` beside `time_slices`: {ONE_STEP}"
            raise ConfigError(message)
    if arguments.get("async_scheduling"):
        message = f"`options.engine_args.async_scheduling`: expected false beside `time_slices`: {ONE_STEP}"
        raise ConfigError(message)
    more = {**arguments.get("additional_config", {}), SLICES: msgspec.to_builtins(slices)}
    return {**arguments, "scheduler_cls": SCHEDULER, "async_scheduling": False, "additional_config": more}


def model_source(config: EngineConfig) -> str:
    """Give the folder of the model where one is configured, else its name for the hub.

    Raises:
        ConfigError: The folder does not exist or holds no model.
    """
    if config.model_path is None:
        return config.model
    return str(model_folder(config))
