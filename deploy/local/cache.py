"""One user's cache: entries that are made once, whole or not at all, whoever asks first.

An entry is a folder. It is made beside its place and moved there in one step, under a lock that dies with its holder.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.local.errors import LocalStackError

LOCK_S = 900.0  # the longest that another process may take to make the same entry
_POLL_S = 0.05


def cache_home(environ: Mapping[str, str] | None = None) -> Path:
    """Give the cache folder: FOREBAY_CACHE, else `forebay` in XDG_CACHE_HOME, else `~/.cache/forebay`."""
    env = os.environ if environ is None else environ
    if own := env.get("FOREBAY_CACHE"):
        return Path(own).expanduser().absolute()
    shared = env.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "forebay"


def make_once(name: str, make: Callable[[Path], None], *, root: Path | None = None) -> Path:
    """Give an entry's folder, made by `make(empty folder)` where it is not there yet.

    Args:
        name: The entry with its version, so that another version is another entry.
        make: Fills the folder; when it raises, nothing remains.
        root: The cache; the user's by default.

    Raises:
        LocalStackError: Another process made it for too long, or the cache cannot be written.
    """
    home = root or cache_home()
    entry = home / name
    if entry.is_dir():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with locked(home / "locks" / f"{name.replace('/', '-')}.lock", LOCK_S):
            if not entry.is_dir():
                _fill(entry, make)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        message = f"cannot write the cache {home} ({error.strerror}): set FOREBAY_CACHE to a folder of your own"
        raise LocalStackError(message) from None
    return entry


def _fill(entry: Path, make: Callable[[Path], None]) -> None:
    part = entry.with_name(f".{entry.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by one that was killed; the lock is ours
    part.mkdir()
    try:
        make(part)
        part.rename(entry)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def locked(path: Path, limit_s: float) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when its holder dies.

    Raises:
        LocalStackError: Held by another for longer than `limit_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    message = f"{path} is held by another process since {limit_s:.0f} s: wait for it or end it"
                    raise LocalStackError(message) from None
                time.sleep(_POLL_S)
        yield
