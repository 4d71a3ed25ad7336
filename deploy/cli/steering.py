"""What `forebay tenants` and `forebay engines` share: a change is made and sent, and what holds is shown."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec
from msgspec import structs
from rich.table import Table

from broker import Client
from broker.transport.settings import Settings
from deploy.cli.numbers import CONFIGURED
from deploy.cli.tables import standard_output
from schemas.config import Config
from schemas.control import Change, PoolPatch, TenantPatch
from schemas.policy import PoolSettings, TenantConfig

Facts = dict[str, Any]


def given(fields: Mapping[str, object]) -> dict[str, Any]:
    """The fields that the command line names.

    Raises:
        click.UsageError: None.
    """
    found = {name: None if value == CONFIGURED else value for name, value in fields.items() if value is not None}
    if not found:
        message = "nothing is given: name what to change."
        raise click.UsageError(message, click.get_current_context())
    return found


async def wanted(config: Config) -> Settings:
    """Read what holds."""
    async with Client(config) as client:
        return await client.settings()


async def steer(config: Config, change: Change) -> Settings:
    """Make a change, and give what holds then."""
    async with Client(config) as client:
        return await client.steer(change)


def tenant_facts(settings: Settings, tenant: str) -> Facts:
    """What `--json` gives of a tenant: what is configured, what was set, and what holds."""
    base = settings.tenant_base(tenant)
    patch = settings.tenant_patches.get(tenant, TenantPatch())
    return _facts(base, patch, settings.tenants().get(tenant, base))


def engine_facts(settings: Settings, config: Config, pool: str) -> Facts:
    """What `--json` gives of an engine's pool."""
    base = settings.pool_base(pool)
    patch = settings.pool_patches.get(pool, PoolPatch())
    engines = [name for name in sorted(config.engines) if config.pool(name) == pool]
    return {"engines": engines, **_facts(base, patch, settings.pools().get(pool, base))}


def describe(settings: TenantConfig | PoolSettings) -> str:
    """A whole setting on one line; bounds that there are not are left out."""
    given = structs.asdict(settings).items()
    said = [f"{name} {_text(value)}" for name, value in given if value is not None and not isinstance(value, bool)]
    return ", ".join([*said, "paused" if settings.paused else "not paused"])


def print_facts(kind: str, facts: Mapping[str, Facts], *, whole: bool, as_json: bool) -> None:
    """Print what is configured, what was set and what holds.

    Args:
        kind: What the names are those of.
        facts: By name.
        whole: Also what is neither configured nor set.
        as_json: As JSON, else as a table.
    """
    if as_json:
        click.echo(msgspec.json.encode(facts))
        return
    table = Table(kind, "setting", "configured", "set", "holds", box=None)
    for name, fact in facts.items():
        there = {field for field, value in fact["holds"].items() if value is not None and value is not False}
        shown = [field for field in fact["holds"] if whole or field in fact["set"] or field in there]
        for place, field in enumerate(shown):
            was_set = _text(fact["set"][field]) if field in fact["set"] else ""
            table.add_row("" if place else name, field, _text(fact["configured"][field]), was_set, _text(fact["holds"][field]))
    standard_output().print(table)


def _facts(configured: TenantConfig | PoolSettings, patch: TenantPatch | PoolPatch, holds: TenantConfig | PoolSettings) -> Facts:
    return {
        "configured": structs.asdict(configured),
        "set": msgspec.to_builtins(patch),
        "holds": structs.asdict(holds),
    }


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
