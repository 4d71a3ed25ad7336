"""Starts Triton's server from nvidia-pytriton's package, with a repository that holds `forebay_moe` alone.

The server's own Python backend wants its stub in one folder with it, the interpreter first in PATH and its library in
LD_LIBRARY_PATH; it does not look at PYTHONPATH, so the model's file names the folder of our packages itself.
"""

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import msgspec

from deploy.local.guard import die_with
from deploy.triton.options import MODEL, ModelOptions
from schemas.errors import ConfigError

TICK_S = 0.2
EXIT_S = 5  # what the server gives to requests in flight when it is told to stop
KILL_S = 20.0

CONFIG = """name: "{name}"
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
input [ {{ name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
        {{ name: "request" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "output_ids" data_type: TYPE_INT32 dims: [ -1 ] }},
         {{ name: "text" data_type: TYPE_STRING dims: [ 1 ] }},
         {{ name: "finish_reason" data_type: TYPE_STRING dims: [ 1 ] }},
         {{ name: "error" data_type: TYPE_STRING dims: [ 1 ] }},
         {{ name: "statistics" data_type: TYPE_STRING dims: [ 1 ] }} ]
parameters {{ key: "options" value {{ string_value: {options} }} }}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""  # the kind is where Triton keeps inputs and outputs: the model chooses its device itself
FILE = """import sys

sys.path.insert(0, {folder!r})
from deploy.triton.model import TritonPythonModel
"""


def write_repository(folder: Path, options: ModelOptions) -> Path:
    """Write the model's repository; gives its folder."""
    version = folder / "models" / MODEL / "1"
    version.mkdir(parents=True)
    told = json.dumps(msgspec.json.encode(options).decode(), ensure_ascii=False)
    (version.parent / "config.pbtxt").write_text(CONFIG.format(name=MODEL, options=told), encoding="utf-8")
    packages = Path(__file__).parents[2]
    (version / "model.py").write_text(FILE.format(folder=str(packages)), encoding="utf-8")
    return version.parents[1]


def write_backend(folder: Path, triton: Path) -> Path:
    """Put the Python backend and its stub for this interpreter into one folder; gives the folder of backends.

    Raises:
        ConfigError: There is no stub for this interpreter.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        known = sorted(one.name for one in stub.parents[1].iterdir())
        message = f"Triton's Python backend does not know Python {version}: expected one of {', '.join(known)}"
        raise ConfigError(message)
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for one in [*(triton / "backends" / "python").iterdir(), stub]:
        (backend / one.name).symlink_to(one)
    return backend.parent


def triton_folder() -> Path:
    """Give where nvidia-pytriton keeps its server.

    Raises:
        ConfigError: It is not installed here.
    """
    spec = importlib.util.find_spec("pytriton")
    folder = Path(next(iter(spec.submodule_search_locations or ()))) / "tritonserver" if spec else None
    if folder is None or not (folder / "bin" / "tritonserver").is_file():
        message = (
            f"{sys.executable} has no Triton: expected nvidia-pytriton: `forebay engines install moe` makes such an environment"
        )
        raise ConfigError(message)
    return folder


def environment(triton: Path) -> dict[str, str]:
    """Give the server's environment.

    Raises:
        ConfigError: The interpreter was built without the shared library that the backend needs.
    """
    library = sysconfig.get_config_var("INSTSONAME") or ""
    places = [sysconfig.get_config_var("LIBDIR") or "", str(Path(sys.base_prefix) / "lib")]
    found = [place for place in places if library.partition(".so")[1] and (Path(place) / library).exists()]
    if not found:
        try:
            ctypes.CDLL(f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0")
        except OSError:
            message = f"{sys.executable} has no shared library, which Triton's Python backend needs: take a Python built with one"
            raise ConfigError(message) from None
    before = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", os.defpath)]),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [str(triton.parents[1] / "nvidia_pytriton.libs"), *found[:1], *([before] if before else [])]
        ),
        "HF_HUB_OFFLINE": "1",
    }


def command(triton: Path, repository: Path, backends: Path, host: str, grpc_port: int, metrics_port: int | None) -> list[str]:
    """Give the server's command line."""
    metrics = (
        ["--allow-metrics=false"] if metrics_port is None else [f"--metrics-port={metrics_port}", f"--metrics-address={host}"]
    )
    return [
        str(triton / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--cache-directory={triton / 'caches'}",
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",  # else it starts the model's process once more, only to ask
        f"--load-model={MODEL}",
        f"--grpc-port={grpc_port}",
        f"--grpc-address={host}",
        "--allow-http=false",
        "--allow-gpu-metrics=false",
        f"--exit-timeout-secs={EXIT_S}",
        *metrics,
    ]


class Server:
    """The server as our child: it is told to stop when we are, or when our own parent is gone, and dies with us.

    Args:
        argv: Its command line.
        variables: Its environment.
    """

    def __init__(self, argv: list[str], variables: dict[str, str]) -> None:
        self._parent, here = os.getppid(), os.getpid()
        self._kill_at_s: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._end())
        self._process = subprocess.Popen(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: die_with(here),  # noqa: PLW1509 - this process has one thread
        )

    def wait(self) -> int:
        """Wait for its end.

        Returns:
            Its exit code, or 128 plus the signal that ended it.
        """
        while True:
            try:
                code = self._process.wait(TICK_S)
            except subprocess.TimeoutExpired:
                if os.getppid() != self._parent:
                    self._end()
                if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                    self._process.kill()
                continue
            return code if code >= 0 else 128 - code

    def _end(self) -> None:
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + KILL_S
            self._process.terminate()
