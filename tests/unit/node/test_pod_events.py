"""What is said on pods of the faults that their containers had to do with."""

from __future__ import annotations

from typing import Final

from integration.node.causes.hits import Hit
from integration.node.causes.journal import GPU_MEMORY, Journal
from integration.node.ledger.pod_events import notices_of_faults
from shim.causes.record import Fault, Whose
from tests.unit.node.causes.holders import holding

A: Final = holding("a", pid=7).container


def said(*faults: Fault, since: float = 0.0) -> list[tuple[str, str]]:
    journal = Journal()
    for each in faults:
        journal.add(Hit(A, each))
    found = set(notices_of_faults(journal.entries, since))
    assert {(each.namespace, each.pod, each.pod_uid, each.container) for each in found} <= {
        ("research", "pod-a", "uid-a", "a")
    }
    return sorted((each.reason, each.message) for each in found)


def lost(at: float) -> Fault:
    return Fault(at, "xid", 79, "off the bus", "GPU-0", whose=Whose.DEVICE, sure=True)


def test_each_fault_is_said_once_however_often_and_by_however_many_processes() -> None:
    storm = [
        Fault(n, "xid", 31, "fault", "GPU-0", pid=n, whose=Whose.APPLICATION) for n in range(99)
    ]
    told = said(lost(0.0), *storm, lost(200.0))
    assert [reason for reason, _ in told] == ["GPUError", "GPUFailure"]


def test_the_same_fault_at_another_time_is_the_same_notice() -> None:
    """In a storm the first that is kept is not always the first that was."""
    journals = [Journal(), Journal()]
    for at, journal in enumerate(journals):
        journal.add(Hit(A, lost(float(at))))
    one, other = (list(notices_of_faults(each.entries, 0.0)) for each in journals)
    assert one == other
    assert one[0].message != other[0].message


def test_what_is_old_or_no_fault_is_not_said() -> None:
    assert said(lost(5.0), since=10.0) == []
    full = Fault(20.0, GPU_MEMORY, name="full", whose=Whose.APPLICATION)
    assert said(full, since=10.0) == []
    over = Fault(20.0, "memory-limit", name="6.0 GiB", whose=Whose.APPLICATION, sure=True)
    (told,) = said(over, since=10.0)
    assert told[0] == "GPUMemoryLimit"
