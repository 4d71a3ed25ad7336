"""The status board's one line when Redis is not there."""

import asyncio

import pytest

from memory_coordinator import StatusBoard
from schemas.config import RedisConfig


def test_an_unreachable_redis_is_told_with_its_address_and_without_its_password():
    async def check():
        board = StatusBoard(RedisConfig(url="redis://me:secret@127.0.0.1:9/0", timeout_ms=500), "forebay")
        try:
            await board.check()
        finally:
            await board.close()

    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9.*forebay local up") as told:
        asyncio.run(check())
    assert "secret" not in str(told.value)
