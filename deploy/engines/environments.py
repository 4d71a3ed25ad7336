"""Making an engine's environment: its own Python packages, and the requirements of ours.

The engines' packages pin versions that exclude each other, so each lives in an environment of its own in the user's
cache; what each is made from stands in `recipes`. A marker is written last: an install that was interrupted is done
again. Where only our own requirements changed, they are brought up to date and the rest stays.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
from msgspec import Struct

from deploy.engines.packages import packages_folder, requirements
from deploy.engines.recipes import DEVICES, Device, Environment, Model, Recipe, Report, Step, hybrid, moe, ssm, transformer
from deploy.local.cache import cache_home, locked, make_once
from deploy.local.command import output, uv
from deploy.local.errors import LocalStackError, NotAvailable
from schemas.config import EngineConfig

RECIPES: dict[str, Recipe] = {recipe.kind: recipe for recipe in (transformer.RECIPE, ssm.RECIPE, moe.RECIPE, hybrid.RECIPE)}
INSTALL_S = 3_600.0  # 6 GB on a slow line
VENV_S = 120.0
LOCK_S = 7_200.0
MARKER = "forebay.json"
TRIED_FIRST = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "0"}  # PyTorch's own index, which not every network reaches


class Installed(Struct, frozen=True):
    """An engine that is whole: its environment and its models.

    Attributes:
        kind: Of the engine.
        device: What it was made for.
        python: Its interpreter.
        model: Name of the model that it serves by default.
        model_path: Folder of that model.
        weights: What kind of weights these are, in a few words.
        versions: Of the packages that matter.
    """

    kind: str
    device: Device
    python: str
    model: str
    model_path: str
    weights: str
    versions: dict[str, str]


class _Marker(Struct, frozen=True):
    """Says what an environment was made from: the engine's own part, and the requirements of ours."""

    recipe: str
    requirements: list[str]
    versions: dict[str, str]


def installed(kind: str, device: Device | None = None) -> Installed | None:
    """Give the engine of a kind where a whole one for this version is there, for the GPU first."""
    recipe = RECIPES.get(kind)
    if recipe is None:
        return None
    for one in (device,) if device else DEVICES:
        folder = _folder(recipe.environment, one)
        marker = _marker(folder)
        if marker and _is_current(folder, recipe.environment, one, marker) and all(map(_is_made, recipe.models)):
            model = recipe.models[0]
            path = str(cache_home() / model.folder)
            return Installed(kind, one, str(_python(folder)), model.name, path, model.label, marker.versions)
    return None


def install(kind: str, device: Device, report: Report) -> Installed:
    """Make the environment of a kind and its models, or give it where it is there already.

    Args:
        kind: A key of `RECIPES`.
        device: For which machine.
        report: Told of each step, in a few words.

    Raises:
        NotAvailable: There is no such kind, the disk is too small, or a package cannot be had.
    """
    recipe = RECIPES.get(kind)
    if recipe is None:
        raise NotAvailable(not_installable(kind))
    environment = recipe.environment
    folder = _folder(environment, device)
    with locked(cache_home() / "locks" / f"engine-{environment.name}-{device}.lock", LOCK_S):
        marker = _marker(folder)
        if marker is None or marker.recipe != environment.digest(device) or not _runs(folder):
            _make(folder, environment, device, report)
        elif marker.requirements != requirements():
            report("bringing the packages that Forebay itself needs up to date")
            output([uv(), "pip", "install", "--quiet", "--python", str(_python(folder)), *requirements()], INSTALL_S)
            _write_marker(folder, environment, device)
        _write_path(folder)
        for model in recipe.models:
            _make_model(model, _python(folder), report)
    found = installed(kind, device)
    if found is None:
        message = f"the environment {folder} was made and is not whole: remove it and install again"
        raise LocalStackError(message)
    return found


def not_installable(kind: str) -> str:
    """Say why a kind cannot be installed, and which can."""
    known = ", ".join(f"`{one}`" for one in RECIPES)
    return f"no engine called {kind!r} can be installed: expected one of {known}; `sim` needs no install"


def worker_environment(python: str | None) -> dict[str, str]:
    """Give the variables that let another interpreter run this very Forebay's code; none for our own interpreter.

    Args:
        python: The interpreter of an engine, as configured.

    Raises:
        NotAvailable: It is missing, or its environment was made by another version of Forebay.
    """
    if python is None or python == sys.executable:
        return {}
    owner = next(((kind, device) for kind in RECIPES for device in DEVICES if python == str(_python_of(kind, device))), None)
    if not os.access(python, os.X_OK):
        again = f"`forebay engines install {owner[0]} --{owner[1]}`" if owner else "`forebay engines install KIND`"
        message = f"the interpreter {python} is not there: {again} makes the one of an engine"
        raise NotAvailable(message)
    if owner is not None:
        environment, device = RECIPES[owner[0]].environment, owner[1]
        folder = _folder(environment, device)
        marker = _marker(folder)
        if marker is None or not _is_current(folder, environment, device, marker):
            message = f"the environment {folder} is not up to date: `forebay engines install {owner[0]} --{device}`"
            raise NotAvailable(message)
    return {"PYTHONPATH": str(packages_folder())}


def engine_config(kind: str, device: Device | None = None) -> EngineConfig | None:
    """Configure the engine of a kind for this machine, or None where it is not installed; arguments as for `installed`."""
    found = installed(kind, device)
    return RECIPES[kind].config(found.device, Path(found.python), Path(found.model_path)) if found else None


def weights_of(engine: EngineConfig) -> str | None:
    """Say what kind of weights a configured engine runs, where they are those that came with it; made up ones are none."""
    if engine.is_simulated:
        return "none"
    models = [model for recipe in RECIPES.values() for model in recipe.models]
    return next((model.label for model in models if engine.model_path == str(cache_home() / model.folder)), None)


def _folder(environment: Environment, device: Device) -> Path:
    return cache_home() / "engines" / f"{environment.name}-{device}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _python_of(kind: str, device: Device) -> Path:
    return _python(_folder(RECIPES[kind].environment, device))


def _runs(folder: Path) -> bool:
    """Whether its interpreter is still there: it is a link to the one that it was made with."""
    return os.access(_python(folder), os.X_OK)


def _marker(folder: Path) -> _Marker | None:
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.DecodeError):
        return None


def _write_marker(folder: Path, environment: Environment, device: Device) -> None:
    asked = "import importlib.metadata as m, json; print(json.dumps({d: m.version(d) for d in %r}))"
    said = output([str(_python(folder)), "-c", asked % (environment.shown[device],)], VENV_S)
    versions = msgspec.json.decode(said, type=dict[str, str])
    part = folder / f".{MARKER}"
    part.write_bytes(msgspec.json.encode(_Marker(environment.digest(device), requirements(), versions)))
    part.replace(folder / MARKER)


def _is_current(folder: Path, environment: Environment, device: Device, marker: _Marker) -> bool:
    return marker.recipe == environment.digest(device) and marker.requirements == requirements() and _runs(folder)


def _make(folder: Path, environment: Environment, device: Device, report: Report) -> None:
    _must_have_disk(folder, environment.disk_bytes_min)
    folder.parent.mkdir(parents=True, exist_ok=True)
    report("making its environment")
    (folder / MARKER).unlink(missing_ok=True)
    output([uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], VENV_S)
    for step in environment.steps[device]:
        _take(step, folder, environment, report)
    _write_marker(folder, environment, device)


def _take(step: Step, folder: Path, environment: Environment, report: Report) -> None:
    """Run a step: with PyTorch's small build for CPUs where its index is reached, and the large one otherwise."""
    argv = [uv(), "pip", "install", "--quiet", "--python", str(_python(folder)), *step.options, *step.packages]
    argv += requirements() if step.with_ours else []
    if step.torch != "cpu":
        report(f"installing {step.says}")
        output([*argv, "--torch-backend=auto"] if step.torch else argv, INSTALL_S, step.environment)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if environment.overrides:
            override = Path(scratch) / "override.txt"
            override.write_text("\n".join(environment.overrides) + "\n")
            argv += ["--override", str(override)]
        report(f"installing {step.says} with PyTorch's CPU build")
        try:
            output([*argv, "--torch-backend=cpu"], INSTALL_S, {**step.environment, **TRIED_FIRST})
        except NotAvailable:
            report(f"PyTorch's own index does not serve: installing {step.says} with the general build (6 GB)")
            output(argv, INSTALL_S, step.environment)


def _is_made(model: Model) -> bool:
    return (cache_home() / model.folder).is_dir()


def _make_model(model: Model, python: Path, report: Report) -> None:
    make_once(model.folder, lambda out: model.make(python, out, report))


def _write_path(folder: Path) -> None:
    """Make our packages importable for whoever starts the environment's interpreter by hand."""
    for site in folder.glob("lib/python*/site-packages"):
        part = site / ".forebay.pth.part"
        part.write_text(f"{packages_folder()}\n")
        part.replace(site / "forebay.pth")


def _must_have_disk(folder: Path, bytes_min: int) -> None:
    home = next(p for p in folder.parents if p.exists())
    free = shutil.disk_usage(home).free
    if free < bytes_min:
        message = (
            f"{home} has {free / 1e9:.1f} GB free and the engine needs {bytes_min / 1e9:.0f} GB: "
            "make room, or set FOREBAY_CACHE to a folder on a larger disk"
        )
        raise NotAvailable(message)
