"""Free ports below the range that the kernel gives to outgoing connections.

A port from that range may be taken by somebody's connection while its server is down, even by a client of that very
server that connects to itself; and then the server does not come back.
"""

import contextlib
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from deploy.local.errors import LocalStackError

HOST = "127.0.0.1"
FIRST, LAST = 20_000, 32_000
TRIES_MAX = 2_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def is_free(port: int) -> bool:
    """Whether a server could listen on it now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do; a living one is seen all the same
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(number: int, wished: Iterable[int] = ()) -> list[int]:
    """Give that many different free ports, those of an earlier run where they are still free.

    Raises:
        LocalStackError: No free ports.
    """
    last = LAST
    with contextlib.suppress(OSError, ValueError):
        last = max(FIRST + 1_000, min(LAST, int(_RANGE.read_text().split()[0]) - 1))
    pick = random.SystemRandom()
    found: list[int] = []
    wishes = list(wished)[:number]
    for attempt in range(TRIES_MAX):
        port = wishes[attempt] if attempt < len(wishes) else pick.randint(FIRST, last)
        if port not in found and is_free(port):
            found.append(port)
            if len(found) == number:
                return found
    message = f"found no {number} free ports between {FIRST} and {last}"
    raise LocalStackError(message)
