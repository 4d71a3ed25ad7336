"""Run a command of ours that stops itself (SIGSTOP) once, in mid-transaction: records acknowledged, offsets not sent.

    python -m tests.integration.stops_in_transaction TOPIC dispatch --config forebay.toml

It happens in the first transaction that writes to TOPIC; whoever started it sends SIGCONT.
"""

import os
import signal
import sys

from broker.transport.kafka import outbox
from deploy.entry import main

STOPS = "stopping in mid-transaction"


def arm(topic: str) -> None:
    """Stop in the first transaction that writes to the topic."""
    inner, is_over = outbox.acknowledged, []

    async def acknowledged(batches, count):
        places = await inner(batches, count)
        if not is_over and any(batch.tp.topic == topic for batch in batches):
            is_over.append(True)
            sys.stderr.write(f"{STOPS}\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGSTOP)
        return places

    outbox.acknowledged = acknowledged


if __name__ == "__main__":
    arm(sys.argv.pop(1))
    main()
