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


def _metadata() -> dict[str, Path]:
    """Find what the installer wrote of us: version and requirements."""
    try:
        found = importlib.metadata.distribution("forebay")
    except importlib.metadata.PackageNotFoundError:
        return {}
    name = f"forebay-{found.version}.dist-info"
    place = Path(str(found.locate_file(name)))
    return {name: place.resolve()} if place.is_dir() else {}
