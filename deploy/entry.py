"""Where the `forebay` command begins: Ctrl-C is quiet from the first moment, also while the rest is being imported."""

import os
import signal

INTERRUPTED = 130


def _quietly(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)  # nothing was begun yet that would have to be ended


signal.signal(signal.SIGINT, _quietly)


def main() -> None:
    """Run the command line; from here on `deploy.cli.common.guarded` answers signals."""
    from deploy.cli.app import main as run  # noqa: PLC0415 - not before Ctrl-C is quiet

    run()
