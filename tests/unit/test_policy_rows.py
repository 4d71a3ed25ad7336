"""The benchmark of decisions and of fairness runs on the machine as it is, and tells other orders from ours."""

import sys

from trees import ROOT

sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

import policy_rows


def test_each_cell_decides_as_much_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr(policy_rows, "ROUNDS_EACH", 2)
    for cell in (policy_rows.Cell(1_000), policy_rows.Cell(1_000, scans=True), policy_rows.Machine(1_000)):
        assert cell.measure() > 0
        assert len(cell.queue) in {2_000, 800}, "as many as before, or less those that are sent"


def test_the_list_scan_decides_as_the_queue_does():
    served = []
    for scans in (False, True):
        cell = policy_rows.Cell(20, scans=scans)
        order = []
        for _ in range(40):
            head = cell.queue.head((), cell.now_ms)
            cell.queue.serve(head, 1.0 + head.work[1] % 3)
            order.append(head.tenant)
        served.append([order.count(f"t{n}") for n in range(20)])
    assert served[0] == served[1]


def test_other_orders_are_outside_the_bound_and_ours_is_not():
    found = policy_rows.gaps(runs=10, steps=200)
    assert found.pop("ours") <= 1 + policy_rows.CLOSE
    assert min(found.values()) > 2
    assert max(policy_rows.theorems(runs=3, steps=100).values()) <= 1 + policy_rows.CLOSE
