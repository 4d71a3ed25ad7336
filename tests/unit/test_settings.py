"""Settings that are changed while it runs: their records, and what they come to."""

import pytest

from broker.transport.settings import KEEP_FROM_CHANGES, Settings
from schemas import InvalidMessage, parse_config
from schemas.control import (
    EngineSettings,
    KeptSettings,
    PoolPatch,
    TenantPatch,
    TenantSettings,
    change_of,
    decode_control,
    encode_control,
)
from schemas.policy import PoolSettings, TenantConfig

CONFIG = parse_config(
    {
        "engines": {
            "a": {"kind": "sim", "pool": "p", "tokens_per_s_max": 100.0},
            "b": {"kind": "sim", "pool": "p", "tokens_per_s_max": 100.0},
            "c": {"kind": "sim", "paused": True},
        },
        "tenants": {"research": {"weight": 3.0, "tokens_per_s": 50.0, "tokens_per_s_max": 80.0}},
        "dispatcher": {"steered_max": 3},
    }
)


def tenant(name="research", **given):
    return change_of(TenantSettings, tenant=name, **given)


def engine(name="c", **given):
    return change_of(EngineSettings, engine=name, **given)


def after(*changes):
    found = Settings(CONFIG)
    for offset, change in enumerate(changes):
        found.add(change, offset)
    return found


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_change_says_its_kind_and_what_was_given():
    assert encode_control(tenant(weight=2)) == b'{"kind":"tenant","weight":2.0,"tenant":"research"}'
    assert decode_control(b'{"kind":"engine","engine":"c","paused":null}') == EngineSettings(engine="c", paused=None)
    assert decode_control(b'{"kind":"tenant","tenant":"t","queue_max":"none"}') == TenantSettings(tenant="t", queue_max="none")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b'{"kind":"tenant","tenant":"a"}', "nothing is given"),
        (b'{"kind":"tenant","tenant":"a","reset":false}', "nothing is given"),
        (b'{"kind":"tenant","weight":1}', "`tenant`: required field is missing"),
        (b'{"kind":"tenant","tenant":"a","weight":0}', "`weight`"),
        (b'{"kind":"tenant","tenant":"a","tokens_per_s":-1}', "`tokens_per_s`"),
        (b'{"kind":"tenant","tenant":"a","weight":"many"}', "`weight`"),
        (b'{"kind":"tenant","tenant":"a","paused":"none"}', "`paused`"),
        (b'{"kind":"tenant","tenant":"a","burst_s":"none"}', "`burst_s`"),
        (b'{"kind":"tenant","tenant":"a","weight":1,"until":5}', "`until`: unknown field"),  # of tomorrow
        (b'{"kind":"tenant","tenant":"no spaces","weight":1}', "`tenant`"),
        (b'{"kind":"engine","engine":"a","weight":1}', "`weight`: unknown field"),
        (b'{"kind":"engine","engine":"a b","paused":true}', "`engine`"),
        (b'{"kind":"settings","tenants":{}}', "`as_of`"),
        (b'{"kind":"settings","as_of":1,"tenants":{"a":{"wait":1}}}', "unknown field"),
    ],
)
def test_what_cannot_be_read_for_sure_is_refused(value, said):
    with pytest.raises(InvalidMessage, match=said):
        decode_control(value)


# -- what holds -------------------------------------------------------------------------------------------------------


def test_without_changes_nothing_differs():
    assert (Settings(CONFIG).tenants(), Settings(CONFIG).pools(), len(Settings(CONFIG))) == ({}, {}, 0)


def test_changes_add_up_and_what_was_not_said_is_the_configurations():
    found = after(tenant(weight=5), tenant(paused=True), tenant("other", requests_per_s_max=2)).tenants()
    assert found == {
        "other": TenantConfig(requests_per_s_max=2.0),
        "research": TenantConfig(weight=5.0, tokens_per_s=50.0, tokens_per_s_max=80.0, paused=True),
    }


def test_null_goes_back_and_none_takes_the_bound_away():
    assert after(tenant(tokens_per_s_max="none")).tenants()["research"].tokens_per_s_max is None
    assert after(tenant(weight="none")).tenants()["research"].weight is None
    assert after(tenant(tokens_per_s_max=60), tenant(tokens_per_s_max=None)).tenants() == {}


def test_reset_goes_back_to_the_configuration_before_what_it_says_beside():
    assert after(tenant(weight=5, paused=True), tenant(reset=True)).tenants() == {}
    assert after(tenant(weight=5), tenant(reset=True, paused=True)).tenant_patches == {"research": TenantPatch(paused=True)}


def test_an_engines_settings_are_those_of_its_pool():
    found = after(engine("a", paused=True), engine("p", tokens_per_s_max=5), engine(paused=False), engine("gone", paused=True))
    assert found.pools() == {"c": PoolSettings(), "p": PoolSettings(tokens_per_s_max=5.0, paused=True)}
    assert found.pool_patches["gone"] == PoolPatch(paused=True)  # another dispatcher's configuration may know it


def test_what_no_configuration_may_say_is_passed_over_and_told():
    found = Settings(CONFIG)
    change = tenant(tokens_per_s=90)
    assert found.refusal(change) == "`tokens_per_s`: expected at most its `tokens_per_s_max` (80), got 90"
    assert found.add(change, 0) == found.refusal(change)
    assert found.tenants() == {}
    assert found.add(tenant(tokens_per_s=90, tokens_per_s_max=100), 1) is None


def test_no_more_is_guaranteed_to_all_together_than_the_cell_has():
    cell = parse_config(
        {
            "dispatcher": {"cell": {"tokens_per_s_max": 100.0}},
            "tenants": {"a": {"tokens_per_s": 60.0}, "b": {"tokens_per_s": 30.0}},
        }
    )
    found = Settings(cell)
    assert found.add(tenant("c", tokens_per_s=10), 0) is None
    assert found.add(tenant("d", tokens_per_s=1), 1) == (
        "`tokens_per_s`: all tenants together would be guaranteed 101, and the cell has 100"
    )
    assert found.add(tenant("a", tokens_per_s=50), 2) is None
    assert found.add(tenant("d", tokens_per_s=10), 3) is None
    assert found.add(tenant("c", paused=True), 4) is None


def test_a_bound_on_how_many_may_differ():
    found = after(*(tenant(name, weight=2) for name in "xyz"))
    assert "dispatcher.steered_max" in found.add(tenant("w", weight=2), 3)
    assert found.add(tenant("w", reset=True), 4) is None
    assert found.add(tenant("x", weight=3), 5) is None
    found.add(tenant("y", reset=True), 6)
    assert found.add(tenant("w", weight=2), 7) is None
    assert sorted(found.tenants()) == ["w", "x", "z"]
    for n in range(5):
        found.add(engine(f"e{n}", paused=True), 8 + n)
    assert len(found.pool_patches) == 3


def test_what_a_later_configuration_does_not_allow_stands_aside_until_it_is_mended():
    found = Settings(CONFIG)
    found.add(KeptSettings(0, {"research": TenantPatch(tokens_per_s=90.0)}), 0)
    assert found.tenants() == {}
    assert found.add(tenant(tokens_per_s_max=200), 1) is None
    assert found.tenants()["research"].tokens_per_s == 90.0


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_a_change_that_crosses_the_record_on_the_way_is_not_undone():
    found = after(tenant(weight=5), tenant("x", paused=True))
    record = found.kept(2)
    found.add(tenant(weight=7), 2)
    found.add(tenant("x", reset=True), 3)
    found.add(record, 4)
    assert found.tenant_patches == {"research": TenantPatch(weight=7.0)}


def test_of_several_records_the_one_that_knew_most_counts():
    first = after(tenant(weight=5)).kept(1)
    found = after(tenant(weight=5), tenant(reset=True), tenant("x", paused=True))
    second = found.kept(3)
    for records in ((first, second), (second, first)):
        reader = Settings(CONFIG)
        for offset, record in enumerate(records, 3):
            reader.add(record, offset)
        assert reader.tenant_patches == {"x": TenantPatch(paused=True)}


def test_one_that_is_older_than_the_log_is_of_no_use():
    stale = after(tenant(weight=5)).kept(1)
    found = Settings(CONFIG)
    found.restart(2)  # a reset and all before it were deleted since
    found.add(stale, 7)
    assert found.tenants() == {}


def test_one_that_says_it_stands_for_what_lies_behind_it_is_passed_over():
    found = after(tenant(weight=5))
    assert "lies at 1" in found.add(KeptSettings(1 << 40), 1)
    assert found.tenants()


def test_nothing_must_be_kept_where_nothing_would_be_lost():
    assert not Settings(CONFIG).must_be_kept(100)
    found = after(tenant(weight=5))
    assert not found.must_be_kept(0)
    assert found.must_be_kept(1)
    found.add(found.kept(1), 1)
    assert not found.must_be_kept(1)
    assert found.must_be_kept(2), "the record that keeps them would go itself"


def test_many_changes_are_kept_for_their_number_alone():
    found = after(*(tenant(weight=1 + n) for n in range(KEEP_FROM_CHANGES)))
    assert not found.are_many
    found.add(tenant(weight=1), KEEP_FROM_CHANGES)
    assert found.are_many
    found.add(found.kept(KEEP_FROM_CHANGES + 1), KEEP_FROM_CHANGES + 1)
    assert not found.are_many
