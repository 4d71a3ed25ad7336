"""`forebay work`: one worker process."""

import click

from deploy.cli.common import config_option, on_stop, run
from deploy.cli.dispatch import LEVELS
from deploy.processes import log_to_stderr
from deploy.processes import work as run_worker
from schemas.config import Config


@click.command()
@config_option
@click.option("--engine", required=True, help="Which engine of the configuration this worker runs.")
@click.option("--name", help="This worker's name, unique in its pool. [default: engine, host and process id]")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="What is logged to stderr.")
def work(config: Config, engine: str, name: str | None, log_level: str) -> None:
    r"""Run a worker of an engine until SIGTERM; what runs then has `worker.drain_ms` to finish.

    Run it with the python of the engine's own environment. Exits with 0 when it was told to stop, also by Ctrl-C, and with 70
    when the engine itself died.

    \b
    Example:
        forebay work --engine transformer --config /etc/forebay.toml
    """
    log_to_stderr(log_level)
    raise SystemExit(run(run_worker(config, engine, on_stop, name)))
