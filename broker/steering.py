"""Settings of tenants and engines, read and changed while it runs; `Client.settings` and `Client.steer` use this.

    async with Client() as client:
        await client.steer(tenant_change("alice", weight=3, tokens_per_s_max="none"))
        await client.steer(engine_change("llama", paused=True))

A field that is left out stays as it is, None goes back to the configuration's value, and "none" takes a bound away.
"""

from typing import Any

from broker.transport.control_log import ControlLog
from broker.transport.protocol import Outgoing, Transport
from broker.transport.settings import Settings
from schemas.config import Config
from schemas.control import Change, EngineSettings, TenantSettings, change_of, encode_control
from schemas.errors import InvalidMessage
from schemas.topics import Topics


def tenant_change(tenant: str, *, reset: bool = False, **fields: Any) -> Change:  # noqa: ANN401 - the schema checks them
    """Make a change of a tenant's settings.

    Args:
        tenant: Its name.
        reset: Everything else goes back to the configuration's first.
        fields: Those of `TenantConfig`.

    Raises:
        InvalidMessage: With one sentence and the field at fault.
    """
    return change_of(TenantSettings, tenant=tenant, reset=reset, **fields)


def engine_change(engine: str, *, reset: bool = False, **fields: Any) -> Change:  # noqa: ANN401 - the schema checks them
    """Make a change of the settings of an engine's pool.

    Args:
        engine: Its name, or its pool's.
        reset: Everything else goes back to the configuration's first.
        fields: Those of `PoolSettings`.

    Raises:
        InvalidMessage: With one sentence and the field at fault.
    """
    return change_of(EngineSettings, engine=engine, reset=reset, **fields)


async def read_settings(transport: Transport, config: Config) -> Settings:
    """Read what holds now: the control topic, up to its end.

    Raises:
        TransportError: It could not be read.
    """
    control = ControlLog(transport, Topics(config.kafka.topic_prefix), settings=(settings := Settings(config)))
    try:
        await control.replay()
    finally:
        await control.close()
    return settings


def steering(change: Change, settings: Settings, config: Config) -> Outgoing:
    """Write the record that makes a change.

    Raises:
        InvalidMessage: Everybody would pass it over, or it names an engine that is not configured.
    """
    if isinstance(change, EngineSettings):
        check_engine(change.engine, config)
    reason = settings.refusal(change)
    if reason is not None:
        raise InvalidMessage(reason)
    value = encode_control(change)
    return Outgoing(Topics(config.kafka.topic_prefix).control, value, value, partition=0)


def check_engine(engine: str, config: Config) -> None:
    """Make sure that the name is that of an engine or of a pool.

    Raises:
        InvalidMessage: Naming those that are.
    """
    if engine not in config.engines and engine not in config.pools:
        known = ", ".join(sorted({*config.engines, *config.pools})) or "none"
        message = f"no engine called {engine!r} is configured: known are {known}"
        raise InvalidMessage(message, "engine")
