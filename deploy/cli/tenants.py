"""`forebay tenants`: shares, rates and pauses of tenants, while it runs."""

import click
import msgspec

from broker.steering import tenant_change
from deploy.cli.common import config_option, json_option, run
from deploy.cli.numbers import Bound
from deploy.cli.steering import describe, given, print_facts, steer, tenant_facts, wanted
from schemas.config import Config


@click.group()
def tenants() -> None:
    """Shares, rates and pauses of tenants, while it runs."""


@tenants.command("set")
@click.argument("name")
@config_option
@click.option("--weight", type=Bound(), help="Its share beside other tenants that wait.")
@click.option("--requests-per-s", type=Bound(), help="Guaranteed: so much goes before what others borrow.")
@click.option("--tokens-per-s", type=Bound(), help="Guaranteed, of prompt and output together.")
@click.option("--requests-per-s-max", type=Bound(), help="No more than that, however idle the engines are.")
@click.option("--tokens-per-s-max", type=Bound(), help="No more than that, however idle the engines are.")
@click.option("--burst-s", type=Bound(no_bound=False), help="Seconds' worth of a rate that may be saved up.")
@click.option("--queue-max", type=Bound(whole=True), help="Requests that may wait; more are rejected.")
@click.option("--pause/--resume", "paused", default=None, help="Dispatch nothing of it, or go on; what runs is finished.")
@json_option("Print what holds then as one JSON object.")
def set_tenant(*, name: str, config: Config, as_json: bool, **fields: object) -> None:
    r"""Change a tenant's settings while it runs. A tenant needs no entry in the configuration.

    A bound may be `none` (no bound) or `config` (back to what the configuration says). It holds within a second, and
    over restarts, until it is changed or reset.

    \b
    Examples:
        forebay tenants set alice --weight 3 --tokens-per-s 2000
        forebay tenants set alice --tokens-per-s-max none
        forebay tenants set alice --pause
    """
    change = tenant_change(name, **given(fields))
    found = run(steer(config, change))
    if as_json:
        click.echo(msgspec.json.encode(tenant_facts(found, name)))
    else:
        click.echo(f"tenant {name}: {describe(found.tenants().get(name, found.tenant_base(name)))}")


@tenants.command("show")
@click.argument("name", required=False)
@config_option
@json_option("Print one JSON object: of each tenant what is configured, what was set, and what holds.")
def show_tenants(*, name: str | None, config: Config, as_json: bool) -> None:
    r"""Show the settings of tenants: what is configured, what was set, and what holds.

    Without NAME: of all that are configured or set; any other tenant has the defaults.

    \b
    Examples:
        forebay tenants show
        forebay tenants show alice --json
    """
    if name is not None:
        tenant_change(name, reset=True)  # it could be one
    found = run(wanted(config))
    names = sorted({*config.tenants, *found.tenant_patches}) if name is None else [name]
    print_facts("tenant", {one: tenant_facts(found, one) for one in names}, whole=name is not None, as_json=as_json)


@tenants.command("reset")
@click.argument("name")
@config_option
def reset_tenant(*, name: str, config: Config) -> None:
    r"""Go back to what the configuration says of a tenant.

    \b
    Example:
        forebay tenants reset alice
    """
    found = run(steer(config, tenant_change(name, reset=True)))
    click.echo(f"tenant {name}: {describe(found.tenant_base(name))}, as configured")
