"""How the long-running processes begin."""

import asyncio
import subprocess
import sys

import pytest
from virtual_loop import run_virtual

from broker.transport.errors import Unreachable
from deploy.processes import reach

ENDED = []
HANGS = """
import asyncio
from deploy.processes import ends_if_hung

async def main(spins):
    async with ends_if_hung(0.5):
        await asyncio.sleep(1.5)
        while spins:
            pass

asyncio.run(main(%s))
"""


class Slow:
    """Answers, or fails, after a while."""

    def __init__(self, name, after_s, error=None):
        self.name, self.after_s, self.error = name, after_s, error

    async def check(self):
        await asyncio.sleep(self.after_s)
        ENDED.append(self.name)
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("kafka", "redis", "raised"),
    [
        (Slow("kafka", 5), Slow("redis", 1, ConnectionError("no Redis")), ConnectionError),
        (Slow("kafka", 1, Unreachable("no Kafka")), Slow("redis", 5), Unreachable),
        (Slow("kafka", 5, Unreachable("no Kafka")), Slow("redis", 1, ConnectionError("no Redis")), Unreachable),
    ],
)
def test_what_is_not_there_is_told_once_nothing_is_left_half_connected(kafka, redis, raised):
    ENDED.clear()
    with pytest.raises(raised):
        run_virtual(reach(kafka, redis))
    assert sorted(ENDED) == ["kafka", "redis"]


@pytest.mark.parametrize(("spins", "code"), [(True, 1), (False, 0)])
def test_a_process_whose_event_loop_hangs_ends_and_says_where_and_no_other(spins, code):
    done = subprocess.run([sys.executable, "-c", HANGS % spins], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "in main" in done.stderr) == (code, spins)
