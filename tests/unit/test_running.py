"""Charges and completions find each other, in whatever order they come, and once."""

from broker.transport.protocol import TopicPartition
from dispatcher.core import running
from dispatcher.core.running import Charge, Done, Running
from dispatcher.core.shaping import Band
from schemas.messages import Completion

SOURCE = TopicPartition("requests", 0)
CHARGE = Charge("t", "batch", "m", 10.0, 60.0, 100.0, 64, 40, Band.BORROWING, 8)


def done(offset, partition=3):
    return Done(1, Completion(partition, offset, 10, 5, 1.0, 2.0, 9.0))


def test_a_completion_settles_the_charge_of_its_record_once():
    kept = Running()
    kept.sending((SOURCE, 0), "llama", 3, CHARGE)
    assert kept.sent((SOURCE, 0), 17) == ("llama", 3, CHARGE, None)
    assert kept.completed("llama", done(18)) is None
    assert kept.completed("mamba", done(17)) is None
    assert kept.completed("llama", done(17)) is CHARGE
    assert kept.completed("llama", done(17)) is None
    assert len(kept) == 0


def test_a_completion_may_come_before_the_brokers_answer():
    kept = Running()
    kept.sending((SOURCE, 0), "llama", 3, CHARGE)
    assert kept.completed("llama", done(17)) is None
    assert kept.sent((SOURCE, 0), 17) == ("llama", 3, CHARGE, done(17))
    assert len(kept) == 0


def test_what_never_went_out_is_given_back_and_a_stranger_is_nobody():
    kept = Running()
    kept.sending((SOURCE, 0), "llama", 3, CHARGE)
    assert kept.sent((SOURCE, 0), None) == ("llama", 3, CHARGE, None)
    assert kept.sent((SOURCE, 0), 5) is None
    assert kept.completed("llama", done(5)) is None
    assert len(kept) == 0


def test_what_is_never_settled_is_bounded(monkeypatch):
    monkeypatch.setattr(running, "CHARGES_MAX", 10)
    monkeypatch.setattr(running, "EARLY_MAX", 10)
    kept = Running()
    for n in range(50):
        kept.sending((SOURCE, n), "llama", 3, CHARGE)
        kept.sent((SOURCE, n), n)
    assert len(kept) == 10
    kept.sending((SOURCE, 99), "llama", 3, CHARGE)
    for n in range(100, 150):
        kept.completed("llama", done(n))
    assert len(kept._early) == 10
