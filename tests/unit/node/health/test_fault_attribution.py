"""Attributing an error to a container."""

from __future__ import annotations

from typing import Final

import pytest

from integration.containers.bundles import Container, Pod
from integration.node.faults.fault_attribution import How, attribute
from integration.node.faults.policy import Verdict
from integration.node.faults.xids import Severity, about
from integration.node.holders.recent_holders import RecentHolders
from integration.node.holders.values import DeviceUse, Holding, Ledger
from integration.nvml.values import GpuEvent

ID: Final = "c" * 64
PID: Final = 4711


def holding(
    name: str, devices: tuple[str, ...], gpu: str = "GPU-0", *, own: str = "", pid: int = 1
) -> Holding:
    pod = Pod("research", "train")
    container = Container(
        own or f"id-{name}", "k8s.io", f"/b/{name}", pod, name, "pod", sandbox=False, pid=pid
    )
    return Holding(container, devices, (gpu,))


WHOLE: Final = Verdict("GPU-0", about(79), Severity.FATAL, ("GPU-0",))
PART: Final = Verdict("GPU-0", about(94), Severity.SUSPECT, ("MIG-a",))
TITLE: Final = "research/train/mine"


def event(pid: int = 0, when: float = 200.0, cgroups: str = "") -> GpuEvent:
    return GpuEvent(when, "xid", "GPU-0", xid=79, pid=pid, cgroups=cgroups)


def kept(ledger: Ledger, when: float = 100.0) -> RecentHolders:
    recent = RecentHolders()
    recent.saw(ledger, when)
    return recent


def whose(of: GpuEvent, verdict: Verdict, ledger: Ledger, recent: RecentHolders) -> tuple[str, How]:
    found = attribute(of, verdict, ledger, recent)
    return (*found.titles, "")[0], found.how


NOBODY: Final = ("", How.UNKNOWN)


@pytest.mark.parametrize(
    "cgroup",
    [
        f"0::/kubepods/pod1/{ID}\n",
        f"1:name=systemd:/kubepods.slice/pod.slice/cri-containerd-{ID}.scope\n",
        f"0::/kubepods.slice/pod.slice:cri-containerd:{ID}\n",
        f"0::/kubepods/pod1/{ID}/of/its/own\n",
        f"0::/kubepods/pod1/{ID}/id-other\n",
    ],
)
def test_by_the_process_that_the_kernel_names(cgroup: str) -> None:
    holdings = (holding("other", ("GPU-0",)), holding("mine", ("GPU-0",), own=ID))
    for ledger in (
        Ledger(holdings=holdings),
        Ledger(holdings=holdings[:1], stopped=holdings[1:]),  # it has exited meanwhile
        Ledger(containers=tuple(each.container for each in holdings)),  # a privileged one
    ):
        found = whose(event(PID, cgroups=cgroup), WHOLE, ledger, kept(ledger))
        assert found == (TITLE, How.PROCESS)


def test_a_process_of_no_container_is_nobodys() -> None:
    ledger = Ledger(holdings=(holding("a", ("GPU-0",), own=ID),))
    outside = event(PID, cgroups="0::/user.slice\n")
    assert whose(outside, WHOLE, ledger, kept(ledger)) == ("", How.OUTSIDE)
    assert whose(event(PID), WHOLE, ledger, kept(ledger)) == ("research/train/a", How.HOLDER)


def test_a_process_that_has_ended_is_remembered_for_a_while() -> None:
    mine = holding("mine", ("GPU-0",))
    ledger = Ledger(holdings=(mine, holding("other", ("GPU-0",))))
    recent = kept(ledger)
    recent.used([DeviceUse(mine, "GPU-0", (PID,)), DeviceUse(None, "GPU-0", (1000,))], 100.0)
    assert whose(event(PID), WHOLE, ledger, recent) == (TITLE, How.ENDED)
    assert whose(event(PID, 5000.0), WHOLE, ledger, recent) == NOBODY
    assert whose(event(1000), WHOLE, ledger, recent) == NOBODY
    recent.used([DeviceUse(mine, "GPU-0", tuple(range(10, 9000)))], 200.0)
    assert recent.container_of(8999, 200.0) == mine.container
    assert recent.container_of(10, 200.0) is None  # the record does not grow


def test_who_held_the_device_a_moment_ago_still_counts() -> None:
    a, b = holding("a", ("GPU-0",), pid=7), holding("b", ("GPU-0",), pid=8)
    recent = kept(Ledger(holdings=(a, b)))
    recent.saw(Ledger(holdings=(b,), stopped=(a,)), 200.0)
    now = Ledger(holdings=(b,))
    assert whose(event(when=202.0), WHOLE, now, recent) == NOBODY  # one of two
    assert whose(event(7, 202.0), WHOLE, now, recent) == ("research/train/a", How.ENDED)
    assert whose(event(when=210.0), WHOLE, now, recent) == ("research/train/b", How.HOLDER)


def test_one_that_came_and_ended_between_two_looks_is_known_by_its_bundle() -> None:
    a = holding("a", ("GPU-0",))
    recent = kept(Ledger())
    for when in (200.0, 202.0):
        recent.saw(Ledger(stopped=(a,)), when)
        assert recent.holders("GPU-0", when) == (a,)
    recent.saw(Ledger(stopped=(a,)), 210.0)
    recent.saw(Ledger(stopped=(a,)), 211.0)
    assert recent.holders("GPU-0", 211.0) == ()
    # If it stopped before the agent started, the time is unknown.
    assert kept(Ledger(stopped=(a,))).holders("GPU-0", 100.0) == ()


def test_another_life_of_a_bundle_is_another_holder() -> None:
    one, other = holding("a", ("GPU-0",), pid=7), holding("a", ("GPU-1",), "GPU-1", pid=8)
    made = holding("a", ("GPU-1",), "GPU-1", pid=0)
    recent = kept(Ledger(holdings=(one,)))
    recent.saw(Ledger(holdings=(made,)), 200.0)
    recent.saw(Ledger(holdings=(other,)), 201.0)
    assert recent.holders("GPU-0", 202.0) == (one,)
    assert recent.holders("GPU-1", 202.0) == (other,)


def test_by_who_holds_the_device_alone() -> None:
    a, b = holding("a", ("MIG-a",)), holding("b", ("MIG-b",))
    both = Ledger(holdings=(a, b))
    assert whose(event(), PART, both, kept(both)) == ("research/train/a", How.HOLDER)
    assert whose(event(), WHOLE, both, kept(both)) == NOBODY
    only = Ledger(holdings=(b,))
    assert whose(event(), WHOLE, only, kept(only)) == ("research/train/b", How.HOLDER)
    shared = Ledger(holdings=(a, holding("c", ("MIG-a",))))
    assert whose(event(), PART, shared, kept(shared)) == NOBODY


def test_nobody_is_blamed_for_an_error_that_may_be_anothers() -> None:
    verdict = Verdict("", about(79), Severity.SUSPECT, ("GPU-0",), certain=False)
    ledger = Ledger(holdings=(holding("a", ("GPU-0",)),))
    assert whose(event(), verdict, ledger, kept(ledger)) == NOBODY
