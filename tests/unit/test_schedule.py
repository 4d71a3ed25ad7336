"""The slot loop's schedule, step by step."""

from engine_consumers.core.schedule import FAIR_EVERY, Schedule


def reading(slots=4, readers=3, piece=10, **prompts):
    schedule = Schedule(slots, readers, piece)
    for name, tokens in prompts.items():
        schedule.add(name, tokens)
    return schedule


def pieces(schedule, count):
    """Read so many pieces; gives whose they were and how long."""
    found = []
    for _ in range(count):
        schedule.admit()
        name, tokens = schedule.next_piece()
        schedule.read(name, tokens)
        found.append((name, tokens))
    return found


def test_a_prompt_is_read_in_pieces_and_then_decodes():
    schedule = reading(a=25)
    assert schedule.waiting == 1
    assert schedule.admit() == ["a"]
    assert schedule.waiting == 0
    assert pieces(schedule, 3) == [("a", 10), ("a", 10), ("a", 5)]
    assert schedule.decoding == ["a"]
    assert schedule.next_piece() is None


def test_short_prompts_are_read_between_the_pieces_of_a_long_one():
    schedule = reading(long=200, short=4, other=7)
    assert pieces(schedule, 4) == [("short", 4), ("other", 7), ("long", 10), ("long", 10)]


def test_one_step_reads_several_short_prompts_and_cuts_none_to_fit():
    schedule = reading(readers=4, long=200, short=4, other=5, third=3)
    schedule.admit()
    step = []
    while (piece := schedule.next_piece(sum(tokens for _, tokens in step))) is not None:
        schedule.read(*piece)
        step.append(piece)
    assert step == [("third", 3), ("short", 4)]
    assert pieces(schedule, 2) == [("other", 5), ("long", 10)]


def test_a_long_prompt_gets_its_share_however_many_short_ones_come():
    schedule = reading(slots=1000, long=30)
    for n in range(100):
        schedule.add(f"short{n}", 1)
    found = [name for name, _ in pieces(schedule, 3 * FAIR_EVERY)]
    assert found.count("long") == 3


def test_a_short_prompt_does_not_wait_for_the_turn_of_a_long_one_that_has_just_had_it():
    for before in range(1, 2 * FAIR_EVERY):
        schedule = reading(long=500)
        pieces(schedule, before)
        schedule.add("short", 3)
        assert pieces(schedule, 1) == [("short", 3)]


def test_one_place_is_kept_for_prompts_of_a_single_piece():
    schedule = reading(slots=10, readers=3, a=50, b=50, c=50, short=3)
    assert schedule.admit() == ["a", "b", "short"]
    assert schedule.waiting == 1


def test_priority_decides_who_waits_and_age_among_equals():
    schedule = Schedule(1, 2, 10)
    for name, priority in (("batch", 1), ("first", 0), ("second", 0)):
        schedule.add(name, 3, priority)
    order = []
    while schedule.waiting or schedule.reading:
        order += schedule.admit()
        pieces(schedule, 1)
        schedule.leave(order[-1])
    assert order == ["first", "second", "batch"]


def test_who_leaves_frees_its_place_wherever_it_stands():
    schedule = reading(slots=3, readers=2, a=1, b=1, c=50, waits=5)
    pieces(schedule, 2)
    schedule.admit()
    assert (schedule.decoding, list(schedule.reading), schedule.waiting) == (["a", "b"], ["c"], 1)
    assert schedule.leave("waits") is None
    assert schedule.leave("c") is None
    assert schedule.leave("a") == (1, 0)  # b's state moves into its row
    assert schedule.leave("unknown") is None
    assert schedule.leave("b") is None  # it was the last
    assert (schedule.decoding, schedule.reading, schedule.waiting) == ([], {}, 0)


def test_it_is_not_empty_while_somebody_waits_for_those_that_all_end_in_one_step():
    schedule = Schedule(1, 2, 16)
    assert schedule.is_empty
    for run in "ab":
        schedule.add(run, 4)
    assert schedule.admit() == ["a"]
    schedule.read("a", 4)
    schedule.leave("a")
    assert not schedule.decoding
    assert not schedule.is_empty
    assert schedule.admit() == ["b"]
    schedule.leave("b")
    assert schedule.is_empty
