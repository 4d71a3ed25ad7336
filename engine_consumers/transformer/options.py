"""What may be set of vLLM from `[engines.<name>.options]`, and vLLM's arguments made from it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from schemas.config import EngineConfig
from schemas.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]


class TransformerOptions(Struct, frozen=True, omit_defaults=True):
    """vLLM's own names and meanings; what is not set is left to vLLM.

    Attributes:
        chat_template: Folder's file or text of a template, for models that bring none.
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
    start_timeout_s: Annotated[float, Meta(gt=0, le=7_200)] = 900.0

    def arguments(self, model: str, slots: int) -> dict[str, Any]:
        """Give the arguments of vLLM's `AsyncEngineArgs`.

        Args:
            model: Folder or hub name.
            slots: Requests that run at once.
        """
        ours = ("chat_template", "start_timeout_s")
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None and name not in ours}
        return {
            **given,
            "model": model,
            "max_num_seqs": slots,
            "scheduling_policy": "priority",  # orders what waits in vLLM; it preempts nothing for it (vllm#40004)
            "disable_log_stats": True,  # our own logger takes the figures; vLLM's would print and export them too
            "enable_log_requests": False,
        }


def model_source(config: EngineConfig) -> str:
    """Give the folder of the model where one is configured, else its name for the hub.

    Raises:
        ConfigError: The folder does not exist or holds no model.
    """
    if config.model_path is None:
        return config.model
    folder = Path(config.model_path).expanduser()
    if not (folder / "config.json").is_file():
        message = f"`model_path`: expected a folder with a model (config.json), got {config.model_path}"
        raise ConfigError(message)
    return str(folder)
