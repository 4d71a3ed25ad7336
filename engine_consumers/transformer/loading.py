"""Imports vLLM and brings its engine up, in a thread, so that the worker's loop stays alive meanwhile.

Everything of vLLM that the backend needs is gathered in `Loaded`; nothing else here or there imports it.
"""

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from engine_consumers.errors import EngineError
from engine_consumers.threads import in_thread
from schemas.errors import ConfigError, ErrorCode

log = logging.getLogger("forebay.engine")

CLOSE_S = 20.0

T = TypeVar("T")


@dataclass
class Stats:
    """vLLM's figures after its last step."""

    running: int = 0
    kv_cache_usage: float = 0.0
    steps: int = 0


@dataclass
class Loaded:
    """A running vLLM engine and what of vLLM is needed to use it."""

    llm: Any
    tokenizer: Any
    vocabulary: int
    max_context: int
    trained_context: int | None
    kv_bytes_per_token: int
    is_cuda: bool
    sampling_params: Callable[..., Any]
    output_format: Callable[..., Any]
    loras: dict[str, Any]
    prompt: Callable[[list[int]], Any]
    dead_errors: tuple[type[Exception], ...]
    full_errors: tuple[type[Exception], ...]
    client_errors: tuple[type[Exception], ...]
    stats: Stats = field(default_factory=Stats)

    async def shutdown(self, timeout_s: float) -> None:
        """Stop vLLM's processes, waiting for them at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await in_thread(self.llm.shutdown)
        except TimeoutError:
            log.warning("engine_close_slow kind=transformer timeout_s=%.0f", timeout_s)


async def load(arguments: dict[str, Any], loras: Mapping[str, str], timeout_s: float) -> Loaded:
    """Start vLLM.

    Args:
        arguments: Of vLLM's `AsyncEngineArgs`.
        loras: Adapters that it is to hold, name -> folder.
        timeout_s: Time that importing and loading may take.

    Raises:
        ConfigError: vLLM is not installed, or refuses an argument or the model.
        EngineError: `unhealthy` where it does not come up.
    """
    _set_environment(arguments["model"], timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            loaded = await in_thread(lambda: _out_of_reach(lambda: _bring_up(arguments, loras)))
            await _load_adapters(loaded)
    except TimeoutError:
        message = f"vLLM did not come up within {timeout_s:.0f} s (`options.start_timeout_s`)"
        raise EngineError(ErrorCode.UNHEALTHY, message) from None
    except ImportError as error:
        message = f"`kind`: vLLM cannot be imported here: {error}: run the worker in the engine's own environment"
        raise ConfigError(message) from error
    except ConfigError:
        raise
    except (ValueError, TypeError, OSError) as error:
        message = f"`options`: vLLM refuses the settings or the model: {one_line(error)}"
        raise ConfigError(message) from error
    except Exception as error:
        message = f"vLLM did not come up: {one_line(error)}"
        raise EngineError(ErrorCode.UNHEALTHY, message) from error
    if inspect.isawaitable(loaded.tokenizer):
        loaded.tokenizer = await loaded.tokenizer
    return loaded


def _set_environment(model: str, timeout_s: float) -> None:
    """Set what vLLM reads from the environment alone, unless whoever launched us has set it."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a process with threads may hang
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(timeout_s) + 1))
    if Path(model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _out_of_reach(work: Callable[[], T]) -> T:
    """Keep a terminal's Ctrl-C from the processes that are started meanwhile; for a thread that is not the main one.

    It goes to every process in front of the terminal. vLLM's would end at once, and the worker, which means to drain, would
    find its engine dead. They set handlers of their own, so only a signal that is blocked stays away; they inherit that.
    """
    resource_tracker.ensure_running()  # when it is started it unblocks the signal, whatever was before
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return work()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _load_adapters(loaded: Loaded) -> None:
    """Read all adapters now, so that one which does not fit the model stops the start and not a request."""
    try:
        for name, adapter in loaded.loras.items():
            try:
                await loaded.llm.add_lora(adapter)
            except loaded.dead_errors:
                raise
            except Exception as error:  # whatever vLLM raises in its core is told of the adapter
                message = f"`options.loras.{name}`: vLLM refuses the adapter in {adapter.path}: {one_line(error)}"
                raise ConfigError(message) from error
    except BaseException:
        await loaded.shutdown(CLOSE_S)
        raise


def _bring_up(arguments: dict[str, Any], loras: Mapping[str, str]) -> Loaded:
    import vllm.exceptions  # noqa: PLC0415 - only here, and slow
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

    known = [one.name for one in fields(AsyncEngineArgs)]
    if unknown := [name for name in arguments if name not in known]:
        near = get_close_matches(unknown[0], known, n=3)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        message = f"`options.engine_args.{unknown[0]}`: vLLM {vllm.__version__} has no such argument{hint}"
        raise ConfigError(message)
    stats = Stats()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[_stat_logger(stats)])
    model = llm.model_config
    text_config = model.hf_text_config
    errors = vllm.exceptions
    return Loaded(
        llm=llm,
        tokenizer=llm.get_tokenizer(),
        vocabulary=model.get_vocab_size(),
        max_context=model.max_model_len,
        trained_context=getattr(text_config, "max_position_embeddings", None),
        kv_bytes_per_token=_kv_bytes_per_token(llm.vllm_config),
        is_cuda=current_platform.is_cuda(),
        sampling_params=lambda **given: SamplingParams(output_kind=RequestOutputKind.DELTA, **given),
        output_format=StructuredOutputsParams,
        loras={
            name: LoRARequest(name, number, str(Path(folder).expanduser()))
            for number, (name, folder) in enumerate(loras.items(), start=1)
        },
        prompt=_prompt_maker(),
        dead_errors=(EngineDeadError,),
        full_errors=tuple(getattr(errors, n) for n in ("QueueOverflowError", "MaxQueuedTokensError") if hasattr(errors, n)),
        client_errors=(ValueError, getattr(errors, "VLLMClientError", ValueError)),
        stats=stats,
    )


def _prompt_maker() -> Callable[[list[int]], Any]:
    """Make vLLM's prompt of tokens: rendered where this version knows it, which skips its own preprocessing."""
    import vllm.inputs  # noqa: PLC0415

    if hasattr(vllm.inputs, "tokens_input"):
        return lambda token_ids: vllm.inputs.tokens_input(list(token_ids))
    return lambda token_ids: {"prompt_token_ids": list(token_ids)}


def _stat_logger(stats: Stats) -> Any:  # noqa: ANN401 - a factory of vLLM's StatLoggerBase
    from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: PLC0415

    class _Keeper(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ANN401
            pass

        def record(self, scheduler_stats: Any = None, *_args: Any, **_more: Any) -> None:  # noqa: ANN401
            if scheduler_stats is not None:
                stats.running = scheduler_stats.num_running_reqs
                stats.kv_cache_usage = scheduler_stats.kv_cache_usage
                stats.steps += 1

        def log_engine_initialized(self) -> None:
            pass

    return _Keeper


def _kv_bytes_per_token(config: Any) -> int:  # noqa: ANN401 - vLLM's VllmConfig
    """Bytes that one token takes in the caches of all ranks; for models with other states it is an upper bound."""
    model, parallel = config.model_config, config.parallel_config
    name = str(config.cache_config.cache_dtype)
    width = model.dtype.itemsize if name == "auto" else 1 if "8" in name else 4 if "32" in name else 2
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    values = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return int(2 * values * width * ranks)


def one_line(error: BaseException) -> str:
    """What an error says, on one line of bounded length."""
    return " ".join(str(error).split())[:500] or type(error).__name__
