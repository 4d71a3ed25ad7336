"""Our own packages for other interpreters: a folder that holds nothing but links to the six of them and their metadata.

An engine's environment lives in the user's cache and serves every Forebay on the machine: checkouts, wheels, old and
new ones. So each of them has a folder of links of its own, named for where it lies and never changed, and what the
stack starts is pointed at the folder of the Forebay that starts it. A checkout's own root will not do as that folder,
nor will site-packages: either holds more than us.
"""

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from deploy.local.cache import make_once
from deploy.local.errors import LocalStackError

PACKAGES = ("broker", "deploy", "dispatcher", "engine_consumers", "memory_coordinator", "schemas")


def packages_folder() -> Path:
    """Give the folder that makes this very Forebay importable, and nothing beside it.

    Raises:
        LocalStackError: A package of ours cannot be found, or the cache cannot be written.
    """
    places = {name: _place(name) for name in PACKAGES} | _metadata()
    digest = hashlib.sha256("\n".join(map(str, places.values())).encode()).hexdigest()[:16]

    def link(folder: Path) -> None:
        for name, place in places.items():
            (folder / name).symlink_to(place)

    return make_once(f"packages/{digest}", link)


def _place(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        message = f"our own package {name!r} cannot be found"
        raise LocalStackError(message)
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def requirements() -> list[str]:
    """List what Forebay itself needs, without extras.

    Raises:
        LocalStackError: It was never installed, only run from a folder.
    """
    found = _distribution()
    if found is None:
        message = "forebay runs from a folder in which it was not installed: `pip install` it, so that its requirements are known"
        raise LocalStackError(message)
    return sorted(one for one in found.requires or [] if "extra ==" not in one)


def _metadata() -> dict[str, Path]:
    found = _distribution()
    return {} if found is None else {_folder(found).name: _folder(found).resolve()}


def _distribution() -> importlib.metadata.Distribution | None:
    """Find what the installer wrote of us, and not what a build left in a checkout, which may be of yesterday."""
    every = importlib.metadata.distributions(name="forebay")
    return next((one for one in every if _folder(one).is_dir()), None)


def _folder(distribution: importlib.metadata.Distribution) -> Path:
    return Path(str(distribution.locate_file(f"forebay-{distribution.version}.dist-info")))
