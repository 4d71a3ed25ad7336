"""`forebay dispatch`: one dispatcher process."""

import click

from deploy.cli.common import config_option, on_stop, run
from deploy.processes import dispatch as run_dispatcher
from deploy.processes import log_to_stderr
from schemas.config import Config

LEVELS = ["debug", "info", "warning", "error"]


@click.command()
@config_option
@click.option("--name", help="Client id in the election. [default: host and process id]")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="What is logged to stderr.")
def dispatch(config: Config, name: str | None, log_level: str) -> None:
    r"""Run a dispatcher until SIGTERM.

    Start as many as you like: one is active, the others stand by and take over within seconds. Exits with 0 when it was told
    to stop, also by Ctrl-C.

    \b
    Example:
        forebay dispatch --config /etc/forebay.toml
    """
    log_to_stderr(log_level)
    raise SystemExit(run(run_dispatcher(config, on_stop, name)))
