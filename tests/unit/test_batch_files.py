"""A batch's files: the input's index, its lines, the journal, and the outputs. No cluster."""

import json
import os
import sys
from array import array
from pathlib import Path

import pytest

from broker.batch import CannotStart, Files, Plan, Settings, lines
from broker.batch.journal import Header, Journal
from broker.batch.reader import InputFile
from schemas.errors import ErrorCode
from schemas.messages import ErrorInfo, InferenceResult

SETTINGS = Settings("t1")
LINE_BYTES_MAX = 1_000


def chat_line(custom_id, **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


@pytest.fixture
def folder(tmp_path):
    return tmp_path


def written(folder, data):
    path = folder / "in.jsonl"
    path.write_bytes(data)
    return path


def opened(folder, data):
    return InputFile(written(folder, data), LINE_BYTES_MAX)


def files_in(folder):
    return Files(folder / "in.jsonl", folder / "out.jsonl", folder / "err.jsonl")


def plan_in(folder, data=None, settings=SETTINGS, **options):
    if data is not None:
        written(folder, data)
    return Plan(files_in(folder), settings, LINE_BYTES_MAX, **options)


def begun(folder, data, **options):
    plan = plan_in(folder, data, **options)
    plan.begin("forebay", 1, 10, 2**42)
    return plan


def refusal(folder, data, index=0):
    with pytest.raises(lines.BadLine) as caught:
        lines.parse(opened(folder, data), index, "r", SETTINGS)
    return caught.value


# -- the input ----------------------------------------------------------------------------------------------------


def test_blank_lines_a_mark_and_line_ends_of_windows_are_no_part_of_the_lines(folder):
    source = opened(folder, b"\xef\xbb\xbf" + chat_line("a") + b"\r\n\r\n  \n" + chat_line("b") + b"\r\n" + chat_line("c"))
    assert list(source.numbers) == [1, 4, 5]
    assert [json.loads(source.line(i))["custom_id"] for i in range(3)] == ["a", "b", "c"]
    assert source.is_cut_off
    assert not source.duplicates


def test_an_empty_file_has_no_lines(folder):
    assert len(opened(folder, b"")) == 0
    assert len(opened(folder, b"\xef\xbb\xbf\n \n")) == 0


def test_an_overlong_line_is_refused_and_its_neighbours_are_read(folder):
    source = opened(folder, chat_line("a") + b"\n" + chat_line("b" * 3_000_000) + b"\n" + chat_line("c") + b"\n")
    assert list(source.numbers) == [1, 2, 3]
    with pytest.raises(lines.BadLine, match="more than 1000 bytes"):
        lines.parse(source, 1, "r", SETTINGS)
    assert lines.parse(source, 2, "r", SETTINGS).custom_id == "c"


def test_a_custom_id_that_comes_again_is_refused_at_the_later_line(folder):
    source = opened(folder, b"\n".join([chat_line("a"), chat_line("b"), chat_line("a", n=2), b"x", chat_line("a")]))
    assert source.duplicates == {3: 1, 5: 1}
    assert lines.parse(source, 0, "r", SETTINGS).custom_id == "a"
    with pytest.raises(lines.BadLine, match="is that of line 1 already") as caught:
        lines.parse(source, 4, "r", SETTINGS)
    assert (caught.value.param, caught.value.custom_id) == ("custom_id", "a")


def test_the_digest_is_of_every_byte(folder):
    one, other = chat_line("a") + b"\n" + b"x" * 5_000, chat_line("a") + b"\n" + b"x" * 4_999 + b"y"
    assert opened(folder, one).digest != opened(folder, other).digest
    assert opened(folder, one).digest == opened(folder, one).digest


def test_a_file_changed_while_it_is_run_stops_the_run(folder):
    source = opened(folder, chat_line("a") + b"\n")
    with source.path.open("ab") as file:
        file.write(chat_line("b"))
    with pytest.raises(CannotStart, match="was changed"):
        source.line(0)


def test_utf16_is_refused_as_a_whole(folder):
    with pytest.raises(CannotStart, match="UTF-16"):
        opened(folder, '{"custom_id": "a"}\n'.encode("utf-16"))


@pytest.mark.parametrize(
    ("line", "param", "words"),
    [
        (b"{nonsense", None, "not JSON"),
        (b'{"custom_id":"\xff"}', None, "not JSON"),
        (b"[1]", None, "expected an object"),
        (b"[" * 900, None, "not JSON"),
        (b'{"method":"POST"}', "custom_id", "expected a text"),
        (b'{"custom_id":7}', "custom_id", "expected a text"),
        (b'{"custom_id":""}', "custom_id", "expected a text"),
        (b'{"custom_id":"a","method":"GET"}', "method", "expected POST"),
        (b'{"custom_id":"a","method":"POST"}', "url", "expected one of"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/embeddings"}', "url", "not supported: /v1/embeddings"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/completions"}', "body", "expected an object"),
        (b'{"custom_id":"a","priority":1}', "priority", "unknown field"),
        (chat_line("a", n=2), "n", "not supported"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(folder, line, param, words):
    error = refusal(folder, line + b"\n")
    assert error.param == param
    assert words in error.message


def test_a_last_line_without_an_end_that_does_not_parse_may_be_cut_off(folder):
    assert "cut off" in refusal(folder, chat_line("a") + b"\n" + chat_line("b")[:40], 1).message
    assert "cut off" not in refusal(folder, chat_line("a")[:40] + b"\n").message


# -- lines out ----------------------------------------------------------------------------------------------------


def test_output_and_error_lines_have_openais_shape(folder):
    call = lines.parse(opened(folder, chat_line("a")), 0, "r1", SETTINGS)
    answered = json.loads(lines.answer(call, InferenceResult("r1", "completed", output_text="yes"), 17))
    assert set(answered) == {"id", "custom_id", "response", "error"}
    assert (answered["custom_id"], answered["error"], answered["id"]) == ("a", None, "batch_req_r1")
    assert (answered["response"]["status_code"], answered["response"]["request_id"]) == (200, "r1")
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == "yes"
    assert answered["response"]["body"]["model"] == "m"
    error = ErrorInfo(ErrorCode.CONTEXT_OVERFLOW, "too long", "prompt")
    failed = json.loads(lines.failure(call, InferenceResult("r1", "rejected", error=error), 9))
    assert failed == {
        "id": "batch_req_r1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "context_overflow", "message": "line 9: too long", "line": 9, "param": "prompt"},
    }


@pytest.mark.parametrize(
    ("status", "code"), [("expired", "batch_expired"), ("cancelled", "batch_cancelled"), ("failed", "internal")]
)
def test_a_result_without_an_error_still_has_a_code(folder, status, code):
    call = lines.parse(opened(folder, chat_line("a")), 0, "r1", SETTINGS)
    error = json.loads(lines.failure(call, InferenceResult("r1", status), 2))["error"]
    assert (error["code"], error["message"]) == (code, f"line 2: the request was {status}")


# -- the journal --------------------------------------------------------------------------------------------------

NUMBERS = array("Q", [1, 2, 4])
HEADER = Header(1, "digest", "{}", "forebay", 2, 50, 1_000)


def journal_at(folder):
    return Journal(folder / "journal", NUMBERS)


def full_journal(folder):
    journal = journal_at(folder)
    journal.begin(HEADER)
    journal.add(2, "O", b'{"four":4}')
    journal.mark(2, 77)
    journal.add(0, "E", b'{"one":1}')
    journal.mark(4, 80)
    return journal


def test_a_journal_opened_again_knows_what_was_reached(folder):
    full_journal(folder).close()
    again = journal_at(folder)
    assert again.header == HEADER
    assert (again.sent, again.offset) == (4, 80)
    assert [again.has(i) for i in range(3)] == [True, False, True]
    assert (again.tally.answered, again.tally.errors) == (1, 1)
    again.add(1, "O", b'{"two":2}')
    assert list(again.read()) == [("E", b'{"one":1}\n'), ("O", b'{"two":2}\n'), ("O", b'{"four":4}\n')]


def test_a_journal_cut_at_any_byte_opens_and_can_be_continued(folder):
    full_journal(folder).close()
    path = folder / "journal"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        journal = journal_at(folder)
        if journal.header is None:
            assert path.read_bytes() == b""
            journal.begin(HEADER)
        for index in range(3):
            if not journal.has(index):
                journal.add(index, "O", b"%d" % index)
        assert len(list(journal.read())) == 3
        assert journal.tally.answered + journal.tally.errors == 3
        journal.close()
        assert [journal_at(folder).has(i) for i in range(3)] == [True] * 3


def test_garbage_after_a_power_cut_is_dropped_with_all_that_follows(folder):
    full_journal(folder).close()
    path = folder / "journal"
    with path.open("ab") as file:
        file.write(b"\0" * 40 + b'\nO 2 {"two":2}\n')
    again = journal_at(folder)
    assert not again.has(1)
    assert (again.sent, again.offset) == (4, 80)


def test_what_is_no_journal_is_not_touched(folder):
    (folder / "journal").write_bytes(b"dear diary\n")
    with pytest.raises(CannotStart, match="not a journal"):
        journal_at(folder)
    assert (folder / "journal").read_bytes() == b"dear diary\n"


def test_two_processes_cannot_run_one_batch(folder):
    held = journal_at(folder)
    with pytest.raises(CannotStart, match="another process"):
        journal_at(folder)
    held.close()
    journal_at(folder).close()


# -- the plan -----------------------------------------------------------------------------------------------------

THREE = b"\n".join([chat_line("a"), b"", chat_line("b"), chat_line("c")])


def test_ids_name_their_lines_and_belong_to_the_run(folder):
    plan = begun(folder, THREE)
    ids = [plan.request_id(i) for i in range(3)]
    assert len(set(ids)) == 3
    assert [plan.index_of(i.encode()) for i in ids] == [0, 1, 2]
    assert plan.index_of(plan.id_prefix.encode() + b"000002") is None  # a blank line
    assert plan.index_of(plan.id_prefix.encode() + b"x") is None
    assert plan.index_of(b"batch-other-000001") is None
    assert plan.index_of(None) is None
    plan.close()
    other = plan_in(folder, settings=Settings("t1", model="auto"), restart=True)
    assert other.id_prefix != plan.id_prefix


def test_what_remains_is_what_has_not_ended_and_is_looked_up_late(folder):
    plan = begun(folder, THREE)
    plan.journal.mark(3, 10)
    unsent = plan.unsent()
    assert list(plan.awaited()) == [0, 1]
    plan.journal.add(0, "O", b"{}")
    assert list(plan.awaited()) == [1]
    plan.journal.add(2, "O", b"{}")
    assert list(unsent) == []


def test_outputs_are_written_in_the_inputs_order_whatever_the_order_of_answers(folder):
    plan = begun(folder, THREE)
    for index, kind in ((2, "O"), (0, "O"), (1, "E")):
        plan.journal.add(index, kind, b'{"index":%d}' % index)
    assert plan.is_complete
    assert not plan.is_finished
    plan.write_outputs()
    assert (folder / "out.jsonl").read_text() == '{"index":0}\n{"index":2}\n'
    assert (folder / "err.jsonl").read_text() == '{"index":1}\n'
    assert sorted(p.name for p in folder.iterdir()) == ["err.jsonl", "in.jsonl", "out.jsonl", "out.jsonl.progress"]
    plan.close()
    again = plan_in(folder)
    assert again.is_finished
    assert (again.tally.answered, again.tally.errors) == (2, 1)
    again.close()
    (folder / "out.jsonl").unlink()
    anew = plan_in(folder)
    assert not anew.is_finished
    assert anew.header is None
    assert anew.tally.answered == 0


def finished(folder):
    plan = begun(folder, THREE)
    for index in range(3):
        plan.journal.add(index, "E", b"%d" % index)
    plan.write_outputs()
    plan.close()


def test_a_finished_run_with_another_error_file_is_refused_and_nothing_is_replaced(folder):
    finished(folder)
    for name in ("other.jsonl", "in2.jsonl"):
        (folder / "in2.jsonl").touch()
        files = Files(folder / "in.jsonl", folder / "out.jsonl", folder / name)
        with pytest.raises(CannotStart, match=r"its error file is .*/err\.jsonl: name that one with -e; --restart"):
            Plan(files, SETTINGS, LINE_BYTES_MAX)
        plan = Plan(files, SETTINGS, LINE_BYTES_MAX, restart=True)
        assert not plan.is_finished
        plan.close()
    assert (folder / "err.jsonl").read_text() == "0\n1\n2\n"
    assert plan_in(folder).is_finished


def test_a_finished_run_whose_error_file_is_gone_is_refused_while_its_output_is_there(folder):
    finished(folder)
    (folder / "err.jsonl").unlink()
    with pytest.raises(CannotStart, match=r"err\.jsonl is gone; --restart"):
        plan_in(folder)
    (folder / "out.jsonl").unlink()
    assert plan_in(folder).header is None


def test_a_finished_run_may_be_moved_with_its_files(folder, tmp_path_factory):
    finished(folder)
    moved = tmp_path_factory.mktemp("elsewhere") / "run"
    folder.rename(moved)
    assert plan_in(moved).is_finished
    folder.mkdir()  # pytest's own


def test_a_finished_journal_of_an_earlier_version_names_no_error_file_and_is_taken_as_it_is(folder):
    finished(folder)
    progress = folder / "out.jsonl.progress"
    first, _ = progress.read_bytes().splitlines()
    progress.write_bytes(first + b'\nF {"answered":0,"errors":3}\n')
    assert plan_in(folder).is_finished


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed by /proc")
def test_a_refused_start_lets_go_of_every_file(folder):
    def open_files():
        return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]

    begun(folder, THREE).close()
    refusals = [
        lambda: plan_in(folder, settings=Settings("t2")),
        lambda: plan_in(folder, THREE + b"\n"),
        lambda: opened(folder, '{"custom_id": "a"}'.encode("utf-16")),
        lambda: Plan(Files(folder / "in.jsonl", folder / "written.jsonl", folder / "e"), SETTINGS, LINE_BYTES_MAX),
        lambda: Plan(Files(folder / "in.jsonl", folder / "diary.jsonl", folder / "e"), SETTINGS, LINE_BYTES_MAX),
    ]
    (folder / "written.jsonl").write_text("precious\n")
    (folder / "diary.jsonl.progress").write_text("dear diary\n")
    for refused in refusals:
        with pytest.raises(CannotStart):
            refused()
        assert not [name for name in open_files() if name.startswith(str(folder))]


def test_an_error_file_may_be_a_device(folder):
    written(folder, THREE)
    os.mkfifo(folder / "pipe")
    plan = Plan(Files(folder / "in.jsonl", folder / "out.jsonl", folder / "pipe"), SETTINGS, LINE_BYTES_MAX)
    plan.begin("forebay", 0, 0, 1)
    for index in range(3):
        plan.journal.add(index, "E", b"%d" % index)
    reader = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    plan.write_outputs()
    assert os.read(reader, 100) == b"0\n1\n2\n"
    os.close(reader)


def test_another_input_or_other_settings_are_refused_until_told_to_begin_anew(folder):
    begun(folder, THREE).close()
    with pytest.raises(CannotStart, match="other settings"):
        plan_in(folder, settings=Settings("t2"))
    written(folder, THREE + b"\n" + chat_line("d"))
    with pytest.raises(CannotStart, match=r"has changed since.*--restart"):
        plan_in(folder)
    plan = plan_in(folder, restart=True)
    assert plan.header is None
    assert len(plan.source) == 4


def test_an_output_of_something_else_is_not_overwritten(folder):
    (folder / "out.jsonl").write_text("precious\n")
    with pytest.raises(CannotStart, match="not of this run"):
        plan_in(folder, THREE)
    plan_in(folder, THREE, restart=True).close()


@pytest.mark.parametrize(
    ("source", "output", "errors", "words"),
    [
        ("nothing.jsonl", "o", "e", "no such file"),
        (".", "o", "e", "not a regular file"),
        ("in.jsonl", "in.jsonl", "e", "three different files"),
        ("in.jsonl", "o", "o", "three different files"),
        ("in.jsonl", "o", "o.progress", "three different files"),
        ("in.jsonl", "gone/o", "e", "there is no folder"),
        ("in.jsonl", ".", "e", "not a regular file"),
        ("in.jsonl", "o", ".", "a folder, not a file"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(folder, source, output, errors, words):
    written(folder, THREE)
    with pytest.raises(CannotStart, match=words):
        Plan(Files(folder / source, folder / output, folder / errors), SETTINGS, LINE_BYTES_MAX)


def test_resend_takes_back_that_lines_were_sent_but_not_that_they_ended(folder):
    plan = begun(folder, THREE)
    plan.journal.add(0, "O", b"{}")
    plan.journal.mark(4, 12)
    plan.close()
    again = plan_in(folder, resend=True)
    assert list(again.unsent()) == [1, 2]
    assert list(again.awaited()) == []
