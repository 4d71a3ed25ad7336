"""`forebay cancel`: end requests that are no longer wanted."""

import sys

import click

from broker import Client
from deploy.cli.common import EXIT_ERROR, config_option, run
from schemas.config import Config
from schemas.control import Cancel, cancel_of


def is_terminal() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin.isatty()


@click.command()
@click.argument("id", metavar="[ID]", required=False)
@config_option
@click.option("--tenant", help="Only of this tenant; without ID and --batch, all that it has asked.")
@click.option("--batch", help="Only of this batch; `forebay batch run` tells its name.")
@click.option("--yes", is_flag=True, help="Do not ask before all of a tenant is cancelled; needed off a terminal.")
def cancel(*, id: str | None, config: Config, tenant: str | None, batch: str | None, yes: bool) -> None:  # noqa: A002 - click's
    r"""Cancel what was sent until now: a request, a batch, or all of a tenant. What answers to all that is given ends.

    Each request that has not ended yet, waiting or running, ends in one result that is `cancelled`. What is sent
    later is not touched, also under the same id: stop a `batch run` that still sends before you cancel its batch.

    \b
    Examples:
        forebay cancel 01K9ZQ4V7W3M7Y1R2A3B4C5D6E
        forebay cancel --batch batch-4f6a1c52e0b79d3318a2c95b
        forebay cancel --tenant alice --yes
    """
    if id is None and tenant is None and batch is None:
        message = "nothing is given: name a request's ID, --tenant or --batch."
        raise click.UsageError(message)
    wanted = cancel_of(id, tenant, batch)
    what = _said(wanted)
    is_wide = id is None and batch is None
    if is_wide and not yes and not is_terminal():
        message = f"that would cancel {what}, and nobody is there to be asked: give --yes."
        raise click.UsageError(message)
    if is_wide and not yes and not click.confirm(f"Cancel {what}?", err=True):
        click.echo("forebay: nothing was cancelled", err=True)
        raise SystemExit(EXIT_ERROR)
    run(_cancel(config, wanted))
    click.echo(f"cancelling {what}: whatever was sent until now and has not ended yet ends as cancelled")


async def _cancel(config: Config, wanted: Cancel) -> None:
    async with Client(config) as client:
        await client.cancel(wanted.id, tenant=wanted.tenant, batch=wanted.batch)


def _said(wanted: Cancel) -> str:
    """Name what is cancelled."""
    whose = f"tenant {wanted.tenant}" if wanted.tenant else "any tenant"
    inside = f" in batch {wanted.batch}" if wanted.batch else ""
    if wanted.id is not None:
        return f"request {wanted.id}{inside} of {whose}"
    return f"batch {wanted.batch} of {whose}" if wanted.batch else f"all requests of {whose}"
