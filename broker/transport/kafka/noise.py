"""Keeps aiokafka's log quiet: while a broker is away it writes the same lines hundreds of times a second."""

import logging
import time

WINDOW_S = 10.0
_TEMPLATES_MAX = 256

# Told by our own errors and logs, or a normal part of every rebalance.
_TOLD_ELSEWHERE = (
    'Unable connect to "%s:%s": %s',
    "Unexpected error during InitProducerIdRequest: %s",
    "Heartbeat failed for group %s because it is rebalancing",
)


class Quiet(logging.Filter):
    """Lets each kind of line through once in a while, with how many alike were held back."""

    def __init__(self) -> None:
        super().__init__()
        self.last_reason = ""  # why the last connection failed; the library tells only its log
        self._seen: dict[str, tuple[float, int]] = {}  # template -> when it was last let through, held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on one line."""
        template = str(record.msg)
        if template in _TOLD_ELSEWHERE:
            if template == _TOLD_ELSEWHERE[0] and isinstance(record.args, tuple):
                self.last_reason = str(record.args[-1])
            return False
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        last, held = self._seen.get(template, (-WINDOW_S, 0))
        if now - last < WINDOW_S:
            self._seen[template] = last, held + 1
            return False
        if len(self._seen) >= _TEMPLATES_MAX:
            self._seen.clear()
        self._seen[template] = now, 0
        if held:
            record.msg = f"{record.getMessage()} ({held} more like this)"
            record.args = ()
        return True


_QUIET = Quiet()


def quieten() -> Quiet:
    """Attach the filter to every logger of the library; calling it again changes nothing."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("aiokafka"):
            logging.getLogger(name).addFilter(_QUIET)
    return _QUIET
