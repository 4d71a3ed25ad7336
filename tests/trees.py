"""The files of this repository, and copies of them."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("broker", "deploy", "dispatcher", "engine_consumers", "memory_coordinator", "schemas")


def tracked() -> list[Path]:
    """Every file of ours, below the root: under version control, or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=30,
    )
    names = listed.stdout.decode().split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def copy_tree(folder: Path) -> None:
    """Copy every file of ours into an empty folder."""
    for path in tracked():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
