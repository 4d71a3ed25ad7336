"""One suite for every transport. The table says which cases apply to which adapter; nothing is decided while it runs."""

import pytest
from conformance import transport_data_cases as data
from conformance import transport_group_cases as groups
from conformance.transport_worlds import make_world

MEMORY, MEMORY_PLAIN = "memory", "memory-at-least-once"
KAFKA, KAFKA_PLAIN = "kafka", "kafka-at-least-once"
TANSU = "tansu"  # has no transactions, so at least once; what else it lacks can be read off the table

EVERYWHERE = (MEMORY, MEMORY_PLAIN, KAFKA, KAFKA_PLAIN, TANSU)
NOT_TANSU = (MEMORY, MEMORY_PLAIN, KAFKA, KAFKA_PLAIN)
TRANSACTIONS = (MEMORY, KAFKA)
PLAIN = (MEMORY_PLAIN, KAFKA_PLAIN)
EACH_BROKER = (MEMORY, KAFKA, TANSU)  # where delivery makes no difference
LIBRARY = (KAFKA, TANSU)  # faults of the library that only its adapter has

TABLE = {
    data.order_in_a_partition: EACH_BROKER,
    data.all_of_a_record_comes_through: EACH_BROKER,
    data.five_megabytes: EVERYWHERE,
    data.places_and_partitions: EVERYWHERE,
    data.unknown_topics_are_refused_quickly: EVERYWHERE,
    data.too_large_is_refused: EVERYWHERE,
    data.long_metadata_is_refused: EVERYWHERE,
    data.positions_round_trip: EVERYWHERE,
    data.metadata_round_trips: NOT_TANSU,  # it keeps the offset only
    data.only_committed_records_are_read: TRANSACTIONS,
    data.offsets_are_not_contiguous: TRANSACTIONS,
    data.a_newer_outbox_fences: TRANSACTIONS,
    data.a_successor_reads_what_was_settled: TRANSACTIONS,
    data.nothing_is_read_before_seek: EACH_BROKER,
    data.positions_pass_over_markers: TRANSACTIONS,
    data.the_brokers_time_is_the_records: EACH_BROKER,
    data.partitions_take_turns: EACH_BROKER,
    data.no_partition_gives_more_than_it_may: EACH_BROKER,
    data.bounds_of_partitions: EACH_BROKER,
    data.trimmed_records_are_gone: (MEMORY, KAFKA),
    data.trim_does_no_harm: (TANSU,),  # it cannot
    data.topics_are_made_once: EACH_BROKER,
    data.topics_are_mended: (MEMORY, KAFKA),
    data.what_cannot_be_mended_is_told: (TANSU,),
    data.unreachable_within_the_limit: (MEMORY, KAFKA),
    data.closing_is_quick: EVERYWHERE,
    groups.members_share_and_leave: EACH_BROKER,
    groups.positions_wait_for_seek_after_a_rebalance: EACH_BROKER,
    groups.polls_return_during_a_rebalance: EACH_BROKER,
    groups.the_dead_are_replaced: EVERYWHERE,
    groups.an_idle_member_stays: EACH_BROKER,
    groups.a_woken_zombie_is_told: (MEMORY, KAFKA),  # Tansu expires nobody while nobody joins
    groups.two_consumers_in_one_process: EACH_BROKER,
    groups.owners_are_known: (MEMORY, KAFKA),
    groups.unknown_owners_are_not_nobody: (TANSU,),  # it does not tell
    groups.only_owners_commit: PLAIN,  # with transactions it is the transactional id that fences
    groups.a_broken_consumer_joins_again: LIBRARY,
    groups.a_failing_listener_is_heard: LIBRARY,  # in memory it fails the loop at once
}


@pytest.mark.parametrize(
    ("case", "adapter"),
    [pytest.param(case, adapter, id=f"{case.__name__}-{adapter}") for case, adapters in TABLE.items() for adapter in adapters],
)
def test_transport(case, adapter, request):
    make_world(adapter, lambda broker: request.getfixturevalue(broker).kafka).run(case)


@pytest.mark.parametrize("cases", [data, groups], ids=["data", "groups"])
def test_every_case_is_in_the_table(cases):
    helpers = {"read", "nothing_comes", "reader", "write", "opened"}
    found = {
        f for name, f in vars(cases).items() if f.__class__.__name__ == "function" and f.__code__.co_varnames[:1] == ("world",)
    }
    assert {f for f in found if f.__name__ not in helpers} <= set(TABLE)
