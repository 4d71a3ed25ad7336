"""Errors of the client.

    ClientError
    ├── ClientTimeout    no terminal result came in time; the request may still be answered
    ├── ClientClosed     the client was closed, or a call was made after that
    ├── TooManyWaiting   more requests wait for their results than the client's bound
    ├── NotReplayable    a dead letter that cannot be put back
    └── ReplayOvertaken  somebody else puts back the same dead letters

A request that the schema refuses is `schemas.InvalidMessage`; what Kafka does is `broker.transport.TransportError`.
"""


class ClientError(Exception):
    """Base of this package's errors."""


class ClientTimeout(ClientError, TimeoutError):
    """No terminal result came in time.

    Args:
        request_id: By which the result can still be read later.
        timeout_s: How long it was waited for.
    """

    def __init__(self, request_id: str, timeout_s: float) -> None:
        super().__init__(
            f"request {request_id}: no result within {timeout_s:g} s; it may still come: "
            f"`forebay results --request {request_id}` reads it"
        )
        self.request_id = request_id
        self.timeout_s = timeout_s


class ClientClosed(ClientError):
    """The client is closed."""


class TooManyWaiting(ClientError):
    """The client's bound of waiting requests is reached."""


class NotReplayable(ClientError):
    """A dead letter that was cut, or whose class nobody knows."""


class ReplayOvertaken(ClientError):
    """Somebody else puts back dead letters of the same partition."""
