"""Real engines that share the CPU as one device: shares by weight, and no turn is lost with a holder killed or stopped."""

import signal

import pytest
from sharing import over_turns, sharing

from engine_consumers.errors import ENGINE_DEAD

TURNS = 1_000
LONG_MS = 600_000
UNLIKE_TURNS = 120  # a step of vLLM's takes longer than a slice
TURNS_LATE = 40  # that pass before the window's end is seen
WEIGHTS = {"heavy": 2.0, "light": 1.0}

INSTALL_S = 1_200

pytestmark = pytest.mark.timeout(900 + INSTALL_S)


def stopped_in_its_turn(engine) -> None:
    """Stop the process that uses the device while it holds the turn."""
    while True:
        engine.until(lambda: engine.is_holder)
        engine.signal(signal.SIGSTOP)
        if engine.is_holder:
            return
        engine.signal(signal.SIGCONT)


def test_two_alike_make_tokens_by_their_weights_and_a_killed_holder_frees_the_turn(tmp_path):
    kinds = {"heavy": "ssm", "light": "ssm"}
    with sharing(kinds, tmp_path, WEIGHTS, share_of="tokens", patience_ms=LONG_MS) as (heavy, light):
        over_turns([heavy, light], 20)  # they have warmed up
        of_heavy, of_light = over_turns([heavy, light], TURNS)
        assert TURNS <= of_heavy.turns <= TURNS + TURNS_LATE
        assert of_heavy.tokens / of_light.tokens == pytest.approx(2.0, rel=0.05)
        stopped_in_its_turn(heavy)
        assert heavy.is_holder, "it lost its turn before its patience of minutes was over"
        heavy.signal(signal.SIGKILL)
        light.goes_on()
        assert set(light.table().seats) == {light.seat}


def test_a_stopped_holder_is_passed_over_after_its_patience_and_comes_back(tmp_path):
    with sharing({"one": "ssm", "other": "ssm"}, tmp_path, {}, patience_ms=400) as (one, other):
        stopped_in_its_turn(one)
        other.goes_on()
        assert not one.is_holder
        one.signal(signal.SIGCONT)
        one.goes_on()
        other.goes_on()


def test_the_devices_time_is_shared_by_weight(tmp_path):
    with sharing({"heavy": "ssm", "light": "ssm"}, tmp_path, WEIGHTS, patience_ms=LONG_MS) as (heavy, light):
        of_heavy, of_light = over_turns([heavy, light], TURNS)
        assert of_heavy.used_ns / of_light.used_ns == pytest.approx(2.0, rel=0.05)


def test_unlike_engines_share_the_devices_time_and_vllms_killed_core_frees_the_turn(tmp_path):
    with sharing({"heavy": "transformer", "light": "ssm"}, tmp_path, WEIGHTS, patience_ms=LONG_MS) as (heavy, light):
        over_turns([heavy, light], 20)
        of_heavy, of_light = over_turns([heavy, light], UNLIKE_TURNS)
        assert of_heavy.used_ns / of_light.used_ns == pytest.approx(2.0, rel=0.05)
        assert min(of_heavy.tokens, of_light.tokens) > UNLIKE_TURNS / 4
        stopped_in_its_turn(heavy)
        heavy.signal(signal.SIGKILL)
        light.goes_on()
        assert heavy.ended() == ENGINE_DEAD
