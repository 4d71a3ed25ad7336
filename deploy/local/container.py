"""Runs a command in a container that ends with whoever holds its standard input.

    container.py RUNTIME IMAGE FOLDER PROGRAM ARGUMENTS...

`docker run` starts a process that is nobody's child here: killing the client would leave it. So the container's first
process watches its standard input, which this program holds: when it closes, because of SIGTERM here or because this
program or the client was killed, the command gets SIGTERM and, later, SIGKILL. The folder is the same inside and
outside, the network is the host's, and files are written as the user who runs this. Standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys

FAREWELL_S = 10  # between SIGTERM and SIGKILL inside of the container

# Without the copy of standard input a shell gives /dev/null to what it runs in the background.
WATCH = f"""
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
{{ cat <&3 >/dev/null; kill "$program"; sleep {FAREWELL_S}; kill -9 "$program"; }} 2>/dev/null &
exec 3<&-
wait "$program"
"""


def arguments(runtime: str, image: str, folder: str, *, is_attached: bool = True) -> list[str]:
    """Give what stands before the command: everything of the container, and no name, so that nothing can clash."""
    where = ["--mount", f"type=bind,source={folder},target={folder}", "--workdir", folder]
    where += ["--network", "host", "--user", f"{os.getuid()}:{os.getgid()}"]
    guarded = ["--interactive", "--entrypoint", "sh", image, "-c", WATCH, "sh"]
    plain = ["--entrypoint", "env", image]
    return [runtime, "run", "--rm", "--pull", "never", "--log-driver", "none", *where, *(guarded if is_attached else plain)]


def main() -> int:
    """Run the command; gives its exit status."""
    runtime, image, folder, *program = sys.argv[1:]
    with subprocess.Popen([*arguments(runtime, image, folder), *program], stdin=subprocess.PIPE, process_group=0) as client:

        def let_go(*_: object) -> None:
            if client.stdin is not None:
                with contextlib.suppress(OSError):
                    client.stdin.close()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, let_go)
        code = client.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
