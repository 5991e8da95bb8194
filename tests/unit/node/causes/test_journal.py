"""What is kept of the faults of each container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from integration.node.faults.fault_log import GPU_MEMORY, KEPT, Journal, told
from integration.node.faults.hits import GPU_LOST, XID, Hit
from shim.causes.record import MOST, Fault, Whose
from shim.causes.xids import Action
from tests.unit.node.causes.holders import holding

A = holding("a", pid=7).container
KEY = ("k8s.io", "id-a")


def fault(at: float, code: int = 31, **more: Any) -> Fault:
    kind = more.pop("kind", XID)
    return Fault(at, kind, code, gpu="GPU-0", whose=more.pop("whose", Whose.APPLICATION), **more)


def kept(journal: Journal) -> list[tuple[float, int]]:
    return [(each.at, each.code) for each in journal.entries[KEY].faults]


def test_of_a_storm_the_first_and_the_latest_are_kept() -> None:
    journal = Journal()
    for n in range(10_000):
        journal.add(Hit(A, fault(float(n), pid=7)))
    assert kept(journal) == [(0.0, 31), (9999.0, 31)]


def test_a_storm_of_different_faults_hides_neither_the_first_nor_the_device_s() -> None:
    journal = Journal()
    journal.add(Hit(A, fault(0.0, 13)))
    journal.add(Hit(A, fault(1.0, 79, whose=Whose.DEVICE)))
    for n in range(1000):
        journal.add(Hit(A, fault(2.0 + n, pid=n + 1)))
    found = kept(journal)
    assert len(found) == MOST
    assert found[:2] == [(0.0, 13), (1.0, 79)]
    assert found[-1] == (1001.0, 31)


def test_a_full_memory_is_told_as_it_was_last_and_taken_back() -> None:
    journal = Journal()
    for at in (1.0, 2.0):
        journal.add(Hit(A, fault(at, 0, kind=GPU_MEMORY)))
    assert kept(journal) == [(2.0, 0)]
    assert list(journal.take_unwritten()) == [KEY]
    journal.drop(GPU_MEMORY, [KEY])
    assert KEY not in journal.entries
    assert journal.take_unwritten()[KEY].faults == ()  # its file is removed


def test_a_gpu_that_does_not_answer_is_not_told_beside_the_xid_that_says_why() -> None:
    journal = Journal()
    journal.add(Hit(A, fault(1.0, 0, kind=GPU_LOST, whose=Whose.DEVICE)))
    assert journal.has_failed(A, "GPU-0")
    journal.add(Hit(A, fault(1.5, 79, whose=Whose.DEVICE)))
    assert kept(journal) == [(1.5, 79)]


def test_what_the_driver_says_later_changes_what_was_said_of_the_gpu() -> None:
    journal = Journal()
    journal.add(Hit(A, fault(1.0, 48, whose=Whose.DEVICE, action=Action.REPLACE)))
    journal.add(Hit(A, fault(50.0, 31)))
    journal.add(Hit(A, fault(51.0, 13, whose=Whose.NEIGHBOUR)))
    journal.heed("GPU-1", Action.REBOOT, 40.0)
    assert [each.action for each in journal.entries[KEY].faults] == [Action.REPLACE, "", ""]
    journal.heed("GPU-0", Action.REBOOT, 40.0)
    assert [(each.whose, each.action) for each in journal.entries[KEY].faults] == [
        (Whose.DEVICE, Action.REPLACE),
        (Whose.DEVICE, Action.REBOOT),
        (Whose.DEVICE, Action.REBOOT),
    ]
    journal.take_unwritten()
    journal.heed("GPU-0", Action.REBOOT, 40.0)
    assert not journal.unwritten  # nothing new
    journal.heed("GPU-0", Action.NOTHING, 0.0)
    assert {each.action for each in journal.entries[KEY].faults} == {""}


def test_who_is_gone_is_kept_for_a_while() -> None:
    journal = Journal()
    journal.add(Hit(A, fault(1.0)))
    journal.take_unwritten()
    journal.look([A], 10.0)
    assert journal.next_look() is None
    journal.look([], 20.0)
    assert journal.next_look() == 20.0 + KEPT
    journal.look([], 20.0 + KEPT)
    assert KEY in journal.entries
    journal.look([], 20.1 + KEPT)
    assert KEY not in journal.entries
    assert list(journal.take_unwritten()) == [KEY]


def test_another_container_of_the_name_begins_anew() -> None:
    other = replace(A, pid=8)
    journal = Journal()
    journal.add(Hit(A, fault(1.0)))
    journal.add(Hit(other, fault(2.0, 13)))
    assert kept(journal) == [(2.0, 13)]
    assert not journal.has_failed(A, "GPU-0")
    journal.look([replace(A, pid=9)], 3.0)
    assert KEY not in journal.entries
    # One whose process has just ended, and whose bundle is still there, is the same.
    journal.add(Hit(A, fault(1.0)))
    journal.look([replace(A, pid=0)], 4.0)
    assert kept(journal) == [(1.0, 31)]


def test_people_are_told_the_first_of_each() -> None:
    journal = Journal()
    for at, pid in ((1.0, 7), (2.0, 7), (3.0, 8)):
        journal.add(Hit(A, fault(at, pid=pid)))
    journal.add(Hit(A, fault(4.0, 13)))
    assert [(f.at, f.code) for _, f in told(journal.entries)] == [(1.0, 31), (4.0, 13)]
