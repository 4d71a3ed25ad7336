"""The long-running commands on a cluster whose Redis is not there."""

import pytest


@pytest.mark.parametrize("command", [["dispatch"], ["work", "--engine", "sim"]], ids=" ".join)
def test_an_absent_redis_is_one_line(sim_stack, command):
    for _ in range(3):  # what else was said depended on who connected first
        done = sim_stack.forebay(*command, check=False, env={"FOREBAY_REDIS__URL": "redis://127.0.0.1:9/0"})
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith("forebay: cannot reach Redis at redis://127.0.0.1:9/0")
