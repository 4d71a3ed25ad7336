"""What NVML says of the GPU an engine runs on."""

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

log = logging.getLogger("forebay.engine")

T = TypeVar("T")


class GpuFigures(Struct, frozen=True):
    """A GPU's figures; each is None where the GPU or its driver does not tell it, as for a part of a shared one."""

    gpu: int | None = None
    mem_used_bytes: int | None = None
    mem_total_bytes: int | None = None
    temperature_c: float | None = None
    utilization: float | None = None


class GpuProbe:
    """Reads one GPU. Without GPU, driver or library every reading is empty, and that is said once in the log.

    Args:
        device: Index among all GPUs of the host, or the name NVML knows it by (`GPU-...`, `MIG-...`).
    """

    def __init__(self, device: int | str) -> None:
        self._device = device
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml  # noqa: PLC0415 - not in every engine's environment

            pynvml.nvmlInit()
            self._handle = (
                pynvml.nvmlDeviceGetHandleByIndex(device) if isinstance(device, int) else pynvml.nvmlDeviceGetHandleByUUID(device)
            )
            self._nvml = pynvml
        except Exception as error:  # noqa: BLE001 - no library, no driver, no such GPU: all mean no figures
            log.info("gpu_absent device=%s error=%r", device, error)

    def read(self) -> GpuFigures:
        """Give the figures of this moment."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return GpuFigures()
        memory = _ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        utilization = _ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        temperature = _ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuFigures(
            gpu=self._device if isinstance(self._device, int) else _ask(lambda: int(nvml.nvmlDeviceGetIndex(handle))),
            mem_used_bytes=None if memory is None else int(memory.used),
            mem_total_bytes=None if memory is None else int(memory.total),
            temperature_c=None if temperature is None else float(temperature),
            utilization=None if utilization is None else utilization.gpu / 100,
        )


def first_visible(environ: Mapping[str, str] = os.environ) -> int | str | None:
    """Give the GPU that `CUDA_VISIBLE_DEVICES` names first: its index or name, 0 where all are visible, None where none is."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return 0
    first = names.split(",")[0].strip()
    if first.isdecimal():
        return int(first)
    return first if first.startswith(("GPU-", "MIG-")) else None


def _ask(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except Exception:  # noqa: BLE001 - NVML answers "not supported" by a different error on each driver
        return None
