"""The recorded faults of each container."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from integration.node.faults.fault_log import GPU_MEMORY, KEPT, FaultLog, first_faults
from integration.node.faults.hits import GPU_LOST, XID, Hit
from shim.causes.record import MOST, Fault, Whose
from shim.causes.xids import Action
from tests.unit.node.causes.holders import holding

A = holding("a", pid=7).container
KEY = ("k8s.io", "id-a")


def fault(at: float, code: int = 31, **more: Any) -> Fault:
    kind = more.pop("kind", XID)
    return Fault(at, kind, code, gpu="GPU-0", whose=more.pop("whose", Whose.APPLICATION), **more)


def kept(fault_log: FaultLog) -> list[tuple[float, int]]:
    return [(each.at, each.code) for each in fault_log.entries[KEY].faults]


def test_of_a_storm_the_first_and_the_latest_are_kept() -> None:
    fault_log = FaultLog()
    for n in range(10_000):
        fault_log.add(Hit(A, fault(float(n), pid=7)))
    assert kept(fault_log) == [(0.0, 31), (9999.0, 31)]


def test_a_storm_of_different_faults_hides_neither_the_first_nor_the_device_s() -> None:
    fault_log = FaultLog()
    fault_log.add(Hit(A, fault(0.0, 13)))
    fault_log.add(Hit(A, fault(1.0, 79, whose=Whose.DEVICE)))
    for n in range(1000):
        fault_log.add(Hit(A, fault(2.0 + n, pid=n + 1)))
    found = kept(fault_log)
    assert len(found) == MOST
    assert found[:2] == [(0.0, 13), (1.0, 79)]
    assert found[-1] == (1001.0, 31)


def test_a_full_memory_is_told_as_it_was_last_and_taken_back() -> None:
    fault_log = FaultLog()
    for at in (1.0, 2.0):
        fault_log.add(Hit(A, fault(at, 0, kind=GPU_MEMORY)))
    assert kept(fault_log) == [(2.0, 0)]
    assert list(fault_log.take_unwritten()) == [KEY]
    fault_log.drop(GPU_MEMORY, [KEY])
    assert KEY not in fault_log.entries
    assert fault_log.take_unwritten()[KEY].faults == ()  # its file is removed


def test_a_gpu_that_does_not_answer_is_not_told_beside_the_xid_that_says_why() -> None:
    fault_log = FaultLog()
    fault_log.add(Hit(A, fault(1.0, 0, kind=GPU_LOST, whose=Whose.DEVICE)))
    assert fault_log.has_failed(A, "GPU-0")
    fault_log.add(Hit(A, fault(1.5, 79, whose=Whose.DEVICE)))
    assert kept(fault_log) == [(1.5, 79)]


def test_what_the_driver_says_later_changes_what_was_said_of_the_gpu() -> None:
    fault_log = FaultLog()
    fault_log.add(Hit(A, fault(1.0, 48, whose=Whose.DEVICE, action=Action.REPLACE)))
    fault_log.add(Hit(A, fault(50.0, 31)))
    fault_log.add(Hit(A, fault(51.0, 13, whose=Whose.NEIGHBOUR)))
    fault_log.heed("GPU-1", Action.REBOOT, 40.0)
    assert [each.action for each in fault_log.entries[KEY].faults] == [Action.REPLACE, "", ""]
    fault_log.heed("GPU-0", Action.REBOOT, 40.0)
    assert [(each.whose, each.action) for each in fault_log.entries[KEY].faults] == [
        (Whose.DEVICE, Action.REPLACE),
        (Whose.DEVICE, Action.REBOOT),
        (Whose.DEVICE, Action.REBOOT),
    ]
    fault_log.take_unwritten()
    fault_log.heed("GPU-0", Action.REBOOT, 40.0)
    assert not fault_log.unwritten  # nothing new
    fault_log.heed("GPU-0", Action.NOTHING, 0.0)
    assert {each.action for each in fault_log.entries[KEY].faults} == {""}


def test_who_is_gone_is_kept_for_a_while() -> None:
    fault_log = FaultLog()
    fault_log.add(Hit(A, fault(1.0)))
    fault_log.take_unwritten()
    fault_log.expire([A], 10.0)
    assert fault_log.next_expiry() is None
    fault_log.expire([], 20.0)
    assert fault_log.next_expiry() == 20.0 + KEPT
    fault_log.expire([], 20.0 + KEPT)
    assert KEY in fault_log.entries
    fault_log.expire([], 20.1 + KEPT)
    assert KEY not in fault_log.entries
    assert list(fault_log.take_unwritten()) == [KEY]


def test_another_container_of_the_name_begins_anew() -> None:
    other = replace(A, pid=8)
    fault_log = FaultLog()
    fault_log.add(Hit(A, fault(1.0)))
    fault_log.add(Hit(other, fault(2.0, 13)))
    assert kept(fault_log) == [(2.0, 13)]
    assert not fault_log.has_failed(A, "GPU-0")
    fault_log.expire([replace(A, pid=9)], 3.0)
    assert KEY not in fault_log.entries
    # A container whose process has just exited, but whose bundle exists, is still the same.
    fault_log.add(Hit(A, fault(1.0)))
    fault_log.expire([replace(A, pid=0)], 4.0)
    assert kept(fault_log) == [(1.0, 31)]


def test_people_are_told_the_first_of_each() -> None:
    fault_log = FaultLog()
    for at, pid in ((1.0, 7), (2.0, 7), (3.0, 8)):
        fault_log.add(Hit(A, fault(at, pid=pid)))
    fault_log.add(Hit(A, fault(4.0, 13)))
    assert [(f.at, f.code) for _, f in first_faults(fault_log.entries)] == [(1.0, 31), (4.0, 13)]
