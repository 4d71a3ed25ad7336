"""Addresses in the configuration, checked where they are read: what a client library makes of a bad one helps nobody.

No message shows the address itself where it may hold a password.
"""

import re
from urllib.parse import SplitResult, urlsplit

BOOTSTRAP_EXAMPLE = "kafka-1:9092,kafka-2:9092"
REDIS_EXAMPLE = "redis://127.0.0.1:6379/0"
REDIS_PORT = 6379
PORT_MAX = 65_535

_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/@\[\],]+")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


def check_bootstrap(text: str) -> None:
    """Check Kafka's address: HOST:PORT, or several of them with commas between.

    Raises:
        ValueError: Naming the part at fault, with an example.
    """
    for part in text.split(","):
        one = part.strip(" ")
        host, _, port = one.rpartition(":")
        if not one:
            reason = "an address is empty"
        elif not _HOST.fullmatch(host):
            reason = f"{one!r} has no port" if ":" not in one else f"{one!r} is no address"
        elif not _is_port(port):
            reason = f"{one!r}: the port is a number from 1 to {PORT_MAX}"
        else:
            continue
        message = f"{reason}: expected HOST:PORT, or several with commas between, as in {BOOTSTRAP_EXAMPLE}"
        raise ValueError(message)


def check_redis_url(url: str) -> None:
    """Check Redis's address: a `redis://`, `rediss://` or `unix://` URL.

    Raises:
        ValueError: Saying what is wrong with it, with an example.
    """
    reason = _redis_fault(url)
    if reason is not None:
        message = f"{reason}: expected redis://HOST:PORT/DATABASE (or rediss://, or unix:///PATH), as in {REDIS_EXAMPLE}"
        raise ValueError(message)


def _redis_fault(url: str) -> str | None:
    if any(c.isspace() or not c.isprintable() for c in url):
        return "there are spaces in it"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return str(error)
    if parts.scheme not in _REDIS_SCHEMES or not url.startswith(f"{parts.scheme}://"):
        return "it does not begin with redis://"
    if parts.scheme == "unix":
        return None if parts.path else "the path of the socket is missing"
    return _host_fault(parts) or _database_fault(parts.path)


def _host_fault(parts: SplitResult) -> str | None:
    if not parts.hostname:
        return "the host is missing"
    port = parts.netloc.rpartition("@")[2].rpartition("]")[2].partition(":")[1:]
    return None if not any(port) or _is_port(port[1]) else f"the port is a number from 1 to {PORT_MAX}"


def _database_fault(path: str) -> str | None:
    number = path.removeprefix("/")
    return None if not number or (number.isascii() and number.isdigit()) else "the database is a number"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= PORT_MAX
