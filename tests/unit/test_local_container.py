"""Kafka's image in place of Java: how it is found, and that the container ends with whoever holds it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local import container, parts
from deploy.local.errors import NotAvailable

LIMIT_S = 30
DOCKER = """#!{python}
import os, sys
from pathlib import Path
here = Path({here!r})
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]).replace("\\n", " ") + "\\n")
if sys.argv[1] == "run":
    at = sys.argv.index("--entrypoint")
    os.execvp(sys.argv[at + 1], [sys.argv[at + 1], *sys.argv[at + 3:]])
if (here / ("no-" + sys.argv[1])).exists():
    sys.exit("error: no " + sys.argv[1])
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A docker that runs its command right here, and the only program on PATH beside the shell."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER.format(python=sys.executable, here=str(tmp_path)))
    (programs / "docker").chmod(0o755)
    for name in ("sh", "env", "cat", "sleep"):
        (programs / name).symlink_to(next(p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return tmp_path


def calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def test_the_image_serves_where_there_is_no_java(docker):
    found = parts.kafka_runtime(docker)
    assert calls(docker) == ["version", "image"]
    assert f"type=bind,source={docker},target={docker}" in found.tool
    assert found.tool[-1] == found.server[-1] == "java"
    assert found.classpath.startswith("/opt/kafka")


def test_an_image_that_is_not_there_is_fetched(docker):
    (docker / "no-image").touch()
    parts.kafka_runtime(docker)
    assert calls(docker) == ["version", "image", "pull"]


@pytest.mark.parametrize(
    ("lacks", "told"), [(["version"], "reaches no daemon"), (["image", "pull"], r"cannot fetch apache/kafka:4\.4\.0")]
)
def test_every_reason_is_told(docker, lacks, told):
    for name in lacks:
        (docker / f"no-{name}").touch()
    with pytest.raises(NotAvailable, match=f"no `java` on PATH; .*{told}"):
        parts.kafka_runtime(docker)


def start(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """Start the launcher as a guard does, and wait for the command's first word."""
    argv = [sys.executable, "-I", "-S", container.__file__, str(folder / "bin/docker"), "image", str(folder), "sh", "-c", script]
    running = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert running.stdout.readline() == b"up\n"
    return running


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} was never written"
        os.sched_yield()
    return path.read_text().strip()


def test_the_commands_exit_status_is_the_launchers(docker):
    running = start(docker, "echo up; exit 7")
    assert running.wait(LIMIT_S) == 7
    running.stdout.close()


def test_a_stop_is_a_sigterm_to_the_command(docker):
    running = start(docker, "trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done")
    running.terminate()
    assert running.wait(LIMIT_S) == 3
    running.stdout.close()


def test_a_killed_launcher_ends_the_command(docker):
    ended = docker / "ended"
    running = start(docker, f"trap 'echo bye > {ended}; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    running.kill()
    running.wait(LIMIT_S)
    assert wait_for(ended) == "bye"
    running.stdout.close()
