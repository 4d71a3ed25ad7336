"""Connections to Redis, and the one line that is said when it is not there."""

from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from schemas.addresses import REDIS_EXAMPLE
from schemas.config import RedisConfig
from schemas.errors import ConfigError


def connect(config: RedisConfig) -> Redis:
    """Make a client whose calls are tried twice: for what says no more when it is done twice.

    Raises:
        ConfigError: The URL, or an option in it, is none that Redis's client knows.
    """
    timeout_s = config.timeout_ms / 1000
    try:
        redis = Redis.from_url(
            config.url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
        )
        # An option that the client does not know is told by its first connection.
        redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        message = f"`redis.url`: {error}: expected a URL as in {REDIS_EXAMPLE}"
        raise ConfigError(message) from None
    return redis


def unreachable(config: RedisConfig, error: RedisError | OSError) -> ConnectionError:
    """Say in one line that Redis is not there, with its address and what to do."""
    message = (
        f"cannot reach Redis at {_without_password(config.url)} ({type(error).__name__}): "
        "start it with `forebay local up`, "
        "or set redis.url in forebay.toml / FOREBAY_REDIS__URL"
    )
    return ConnectionError(message)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))
