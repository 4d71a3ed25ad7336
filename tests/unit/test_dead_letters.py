"""Dead letters on the in-memory cluster: what is read of them, and putting them back once, whatever happens meanwhile."""

import asyncio
from collections import Counter

import pytest
from letter_world import BAD, BATCH, BOOM, DEAD, INTERACTIVE, START_MS, TOPICS, Letters, envelope_header, fields
from virtual_loop import run_virtual

from broker.dead_letters import DeadLetters, Place, parse_place
from broker.errors import NotReplayable, ReplayOvertaken
from broker.replay import CHUNK_RECORDS_MAX, flaw, obstacle
from broker.transport.errors import TransportError, Unreachable
from broker.transport.memory import MemoryTransport
from broker.transport.protocol import Outgoing, TopicPartition
from schemas import ErrorCode, ErrorInfo, headers


def on_letters(scenario, **named):
    async def main():
        return await scenario(Letters(**named))

    return run_virtual(main())


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [("0/12", Place(0, 12)), ("3/0", Place(3, 0)), ("12", None), ("a/1", None), ("1/2/3", None), ("-1/2", None), ("1/٣", None)],
)
def test_a_place_is_partition_and_offset(text, place):
    assert parse_place(text) == place
    if place is not None:
        assert str(place) == text


def test_what_a_worker_gave_up_tells_all_that_the_system_knew():
    async def scenario(world):
        await world.write(world.failed("r1", "batch", fields()))
        return await world.letters()

    (letter,) = on_letters(scenario)
    assert (letter.id, letter.tenant, letter.service_class) == ("r1", "t0", "batch")
    assert (letter.code, letter.reason) == ("internal", BOOM.message)
    assert letter.original == ("forebay.engine.sim", 3, 44)
    assert letter.envelope.origin == (BATCH, 1, 7)
    assert [attempt.worker for attempt in letter.envelope.route] == ["w1"]
    assert (letter.value_bytes, letter.is_cut, letter.put_back_at_ms) == (len(letter.value), False, None)
    assert letter.written_at_ms >= START_MS
    assert obstacle(letter) is None
    assert flaw(letter, 1_000) is None


def test_of_a_refused_record_it_is_told_what_can_be_read():
    async def scenario(world):
        await world.write(
            world.refused(b"not json", key=b"k"),
            world.refused(b'{"id":"x1","tenant":"alice","prompt":5}', topic=BATCH),
            world.refused(None),
            Outgoing(DEAD, b"of a stranger"),
        )
        return await world.letters()

    nothing, salvaged, empty, strange = on_letters(scenario)
    assert (nothing.id, nothing.tenant, nothing.service_class, nothing.key) == (None, None, "interactive", b"k")
    assert (salvaged.id, salvaged.tenant, salvaged.service_class) == ("x1", "alice", "batch")
    assert empty.value is None
    assert "no value" in flaw(empty, 1_000)
    assert "prompt" in flaw(salvaged, 1_000)
    assert "at most 5" in flaw(nothing, 5)
    assert (strange.code, strange.original, strange.service_class) == ("unknown", None, None)
    assert "--class" in obstacle(strange)
    assert obstacle(strange, "batch") is None


def test_a_cut_value_says_so():
    async def scenario(world):
        await world.write(world.refused(b'{"id":"big","prompt":"%s"}' % (b"x" * 9_000_000)))
        return await world.letters()

    (letter,) = on_letters(scenario)
    assert letter.is_cut
    assert letter.value_bytes == 9_000_024
    assert len(letter.value) < 9_000_000
    assert "9000024 bytes" in obstacle(letter)


def test_a_client_cannot_hide_its_letter_or_make_it_look_otherwise_by_headers():
    spoofed = [
        (headers.REPLAYED, b"0/0"),
        (headers.DEAD_BYTES, b"99"),
        (headers.DEAD_CODE, b"poison"),
        envelope_header(id="i", tenant="bob", service_class="batch", origin=("a", 0, 0), received_at_ms=0),
    ]

    async def scenario(world):
        await world.write(world.failed("r1"), world.refused(b'{"id":"mine","tenant":"eve","n":1}', spoofed))
        return await world.letters()

    first, second = on_letters(scenario)
    assert first.put_back_at_ms is None
    assert (second.id, second.tenant, second.service_class) == ("mine", "eve", "interactive")
    assert (second.code, second.is_cut) == ("invalid_request", False)


def test_letters_of_all_partitions_come_by_age_and_many_of_them():
    async def scenario(world):
        for n in range(3_000):
            await world.write(world.failed(f"r{n}", partition=n % 3))
        await world.put_back([letter for letter in await world.letters() if letter.id in {"r0", "r7", "r2999"}])
        return await world.names(), await world.letters(put_back=True)

    names, everything = on_letters(scenario, partitions=3)
    assert names == [f"r{n}" for n in range(3_000) if n not in {0, 7, 2_999}]
    assert [letter.id for letter in everything] == [f"r{n}" for n in range(3_000)]
    assert {letter.id for letter in everything if letter.put_back_at_ms} == {"r0", "r7", "r2999"}


def test_reading_ends_at_what_is_there_when_it_begins():
    async def scenario(world):
        await world.write(world.failed("r0"), world.failed("r1"))
        seen = []
        async for letter in DeadLetters(world.way, TOPICS).read():
            seen.append(letter.id)
            await world.write(world.failed("late"))
        return seen, await world.names()

    seen, after = on_letters(scenario)
    assert seen == ["r0", "r1"]
    assert after == ["r0", "r1", "late", "late"]


def test_an_absent_cluster_is_told_and_not_taken_for_an_empty_one():
    async def scenario(world):
        world.cluster.stop()
        with pytest.raises(Unreachable):
            await world.letters()

    on_letters(scenario)


# -- putting back -----------------------------------------------------------------------------------------------------


def test_a_letter_becomes_the_request_it_was_in_the_topic_of_its_class():
    async def scenario(world):
        own = fields((headers.REPLY_TOPIC, b"my.replies"), (headers.RESULT_PARTITION, b"\0\0\0\1"), (headers.REPLAY, b"9/9"))
        await world.write(world.failed("r1", "batch", own), world.failed("r2"))
        told = await world.put_back()
        return told, await world.read(BATCH), await world.read(INTERACTIVE), await world.names()

    told, (request,), (other,), left = on_letters(scenario)
    assert request.key == b"r1"
    assert request.value == b'{"id":"r1","tenant":"t0","prompt":"a"}'
    assert dict(request.headers) == {
        headers.CONTENT_TYPE: b"application/json",
        "x-mine": b"\x00\xff",
        headers.REPLY_TOPIC: b"my.replies",
        headers.RESULT_PARTITION: b"\0\0\0\1",
        headers.REPLAY: b"0/0",
    }
    assert dict(other.headers) == {headers.REPLAY: b"0/1"}
    assert [(t.place, t.id, t.topic, t.at) for t in told] == [
        (Place(0, 0), "r1", BATCH, (request.partition, request.offset)),
        (Place(0, 1), "r2", INTERACTIVE, (other.partition, other.offset)),
    ]
    assert left == []


def test_a_letter_is_put_back_once():
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(5)))
        letters = await world.letters()
        first = await world.put_back(letters[:2])
        again = await world.put_back(letters)  # read before the first two were put back
        nothing = await world.put_back()
        marked = await world.put_back(await world.letters(put_back=True))
        return first, again, nothing, marked, await world.requests()

    first, again, nothing, marked, requests = on_letters(scenario)
    assert [told.id for told in first] == ["r0", "r1"]
    assert [told.id for told in again] == ["r2", "r3", "r4"]
    assert nothing == marked == []
    assert Counter(r.key for r in requests) == Counter(f"r{n}".encode() for n in range(5))


def test_a_request_without_an_id_is_told_as_one_that_gets_a_new_one():
    async def scenario(world):
        await world.write(world.failed("01HDERIVED", value=b'{"prompt":"a"}'))
        (letter,) = await world.letters()
        return letter.id, await world.put_back([letter])

    known, (told,) = on_letters(scenario)
    assert known == "01HDERIVED"
    assert told.id is None


def test_the_class_can_be_named_and_must_be_where_nobody_knows_it():
    async def scenario(world):
        await world.write(Outgoing(DEAD, b'{"id":"r1","prompt":"a"}'), world.failed("r2"))
        letters = await world.letters()
        with pytest.raises(NotReplayable, match=r"dead letter 0/0: .*--class"):
            await world.put_back(letters)
        assert await world.requests() == []
        await world.put_back(letters, service_class="batch")
        return await world.requests()

    assert {r.topic for r in on_letters(scenario)} == {BATCH}


def test_a_cut_letter_is_never_put_back():
    async def scenario(world):
        await world.write(world.refused(b"x" * 9_000_000))
        with pytest.raises(NotReplayable, match="bytes were kept"):
            await world.put_back()
        return await world.requests()

    assert on_letters(scenario) == []


def test_many_letters_go_in_several_transactions_and_each_once():
    count = 2 * CHUNK_RECORDS_MAX + 3

    async def scenario(world):
        await world.write(*(world.failed(f"r{n}", partition=n % 2) for n in range(count)))
        told = await world.put_back()
        return told, await world.requests(), await world.names()

    told, requests, left = on_letters(scenario, partitions=2)
    assert Counter(t.id for t in told) == Counter(r.key.decode() for r in requests) == Counter(f"r{n}" for n in range(count))
    assert left == []


def test_large_letters_do_not_gather_in_memory_or_in_one_transaction():
    ends = []

    async def scenario(world):
        value = b'{"prompt":"%s"}' % (b"x" * 3_000_000)
        await world.write(*(world.failed(f"r{n}", value=value) for n in range(5)))

        async def watch(step):
            if (step.moment, step.operation) == ("after", "end") and "dead-letters" in step.subject:
                ends.append(step.subject)

        world.cluster.hook = watch
        return await world.put_back()

    assert len(on_letters(scenario)) == 5
    assert len(ends) == 6, "one to begin with, and one for each letter"


class Fault:
    """Acts once, at the n-th time that an operation on some subject comes to a moment."""

    def __init__(self, moment, operation, act, skip=0, subject=""):
        self.moment, self.operation, self.act, self.skip, self.subject = moment, operation, act, skip, subject

    async def __call__(self, step):
        if (step.moment, step.operation) != (self.moment, self.operation) or self.act is None or self.subject not in step.subject:
            return
        if self.skip:
            self.skip -= 1
            return
        act, self.act = self.act, None
        await act()


async def lost():
    message = "lost"
    raise TransportError(message)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("operation", ["init", "produce", "offsets", "end"])
@pytest.mark.parametrize("skip", [0, 1])
def test_an_answer_that_is_lost_neither_repeats_nor_drops_a_letter(moment, operation, skip):
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(4)))
        letters = await world.letters()
        world.cluster.hook = Fault(moment, operation, lost, skip)
        told = await world.put_back(letters)
        return told, await world.requests(), await world.names()

    told, requests, left = on_letters(scenario)
    assert Counter(t.id for t in told) == Counter(r.key.decode() for r in requests) == Counter(f"r{n}" for n in range(4))
    assert left == []


@pytest.mark.parametrize(("moment", "put_back"), [("before", False), ("after", True)])
def test_a_replay_killed_in_its_transaction_leaves_all_or_nothing_and_the_next_does_the_rest(moment, put_back):
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(4)))
        letters = await world.letters()
        killed = MemoryTransport(world.cluster, "killed")

        async def kill():
            killed.kill()
            await asyncio.sleep(0)

        world.cluster.hook = Fault(moment, "end", kill, skip=1)
        with pytest.raises(TransportError, match="killed"):
            await world.put_back(letters, way=killed)
        world.cluster.hook = None
        rest = await world.put_back()
        return rest, await world.requests()

    rest, requests = on_letters(scenario)
    assert len(rest) == (0 if put_back else 4)
    assert Counter(r.key for r in requests) == Counter(f"r{n}".encode() for n in range(4))


def test_of_two_that_put_back_at_once_one_is_told_and_nothing_is_repeated():
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(4)))
        letters = await world.letters()
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def wait():
            begun.set()
            await go_on.wait()

        world.cluster.hook = Fault("before", "end", wait, skip=1)
        first = asyncio.ensure_future(world.put_back(letters, way=MemoryTransport(world.cluster, "first")))
        await begun.wait()
        second = await world.put_back(letters, way=MemoryTransport(world.cluster, "second"))
        go_on.set()
        with pytest.raises(ReplayOvertaken, match="partition 0"):
            await first
        return second, await world.requests()

    second, requests = on_letters(scenario)
    assert [told.id for told in second] == ["r0", "r1", "r2", "r3"]
    assert Counter(r.key for r in requests) == Counter(f"r{n}".encode() for n in range(4))


def test_a_transaction_of_somebody_else_that_hides_the_markers_makes_nothing_repeat():
    async def scenario(world):
        await world.write(world.failed("r0"))
        letters = await world.letters()

        workers = []

        async def hang():
            world.cluster.hook = Fault("before", "end", lambda: asyncio.sleep(1e6), subject="somebody")
            workers.append(asyncio.ensure_future(world.write(world.failed("aborted"))))  # a worker that hangs in its transaction
            await asyncio.sleep(1)

        world.cluster.hook = Fault("before", "produce", hang, subject=INTERACTIVE)
        first = await world.put_back(letters)
        hidden = await world.names()
        second = await world.put_back(letters, way=MemoryTransport(world.cluster, "second"))
        return first, hidden, second, await world.requests(), await world.names()

    first, hidden, second, requests, left = on_letters(scenario)
    assert len(first) == 1
    assert hidden == ["r0"], "its marker lies behind the open transaction"
    assert second == []
    assert [r.key for r in requests] == [b"r0"]
    assert left == []


def test_without_transactions_the_requests_come_before_the_markers():
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(3)))
        world.cluster.hook = Fault("before", "produce", lost, skip=1, subject=DEAD)  # the markers, behind the first record
        letters = await world.letters()
        told = await world.put_back(letters)
        return told, await world.requests(), await world.names()

    told, requests, left = on_letters(scenario, delivery="at_least_once")
    assert Counter(t.id for t in told) == {"r0": 1, "r1": 1, "r2": 1}
    assert {r.key for r in requests} == {b"r0", b"r1", b"r2"}
    assert len(requests) == 6, "they may come twice, and are the same to a reader: both name their letter"
    assert {dict(r.headers)[headers.REPLAY] for r in requests} == {b"0/0", b"0/1", b"0/2"}
    assert left == []


def test_letters_whose_topic_was_trimmed_are_put_back_all_the_same():
    async def scenario(world):
        await world.write(*(world.failed(f"r{n}") for n in range(4)))
        admin = await world.way.admin()
        await admin.trim({TopicPartition(DEAD, 0): 2})
        return await world.put_back()

    assert [told.id for told in on_letters(scenario)] == ["r2", "r3"]


def test_a_replay_that_fails_again_is_a_letter_of_its_own():
    async def scenario(world):
        await world.write(world.failed("r1"))
        await world.put_back()
        await world.write(world.failed("r1", given=[(headers.REPLAY, b"0/0")], error=ErrorInfo(ErrorCode.POISON, "again")))
        (letter,) = await world.letters()
        told = await world.put_back()
        return letter, told, await world.requests()

    letter, (told,), requests = on_letters(scenario)
    assert letter.code == "poison"
    assert told.place == letter.place
    assert [dict(r.headers)[headers.REPLAY] for r in requests] == [b"0/0", str(letter.place).encode()]


def test_the_group_of_the_letters_tells_up_to_where_they_were_looked_at():
    async def scenario(world):
        await world.write(*(world.refused(b"x", error=BAD) for _ in range(2)), world.failed("r1"), world.failed("r2"))
        await world.put_back([letter for letter in await world.letters() if letter.id == "r1"])
        return world.cluster.committed["forebay.dead-letters", TopicPartition(DEAD, 0)]

    assert on_letters(scenario).offset == 3
    assert INTERACTIVE != BATCH
