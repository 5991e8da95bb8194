"""Whose an error is."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import pytest

from integration.inspection.bundles import Container, Pod
from integration.inspection.procfs import Procfs
from integration.node.health.blame import Blame, How, Pids, blame
from integration.node.health.policy import Verdict
from integration.node.health.xids import Severity, about
from integration.node.ledger.values import DeviceUse, Holding, Ledger
from integration.node.monitor.values import GpuEvent

if TYPE_CHECKING:
    from pathlib import Path

ID: Final = "c" * 64
PID: Final = 4711


def holding(name: str, devices: tuple[str, ...], gpu: str = "GPU-0", *, own: str = "") -> Holding:
    pod = Pod("research", "train")
    container = Container(
        own or f"id-{name}", "k8s.io", "/b", pod, name, "pod", sandbox=False, pid=1
    )
    return Holding(container, devices, (gpu,))


WHOLE: Final = Verdict("GPU-0", about(79), Severity.FATAL, ("GPU-0",))
PART: Final = Verdict("GPU-0", about(94), Severity.SUSPECT, ("MIG-a",))


def event(pid: int = 0, when: float | None = None) -> GpuEvent:
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if when is None else when
    return GpuEvent(now, "xid", "GPU-0", xid=79, pid=pid)


def process(tmp_path: Path, cgroup: str, started: float = 0.0, *, state: str = "S") -> Procfs:
    """A procfs with one process."""
    here = tmp_path / str(PID)
    here.mkdir()
    ticks = int(started * os.sysconf("SC_CLK_TCK"))
    (here / "stat").write_text(f"{PID} (a ) b) {state} 1 {'0 ' * 17}{ticks} {'0 ' * 9}")
    (here / "cgroup").write_text(cgroup)
    return Procfs(str(tmp_path))


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
def test_by_the_process_that_the_kernel_names(tmp_path: Path, cgroup: str) -> None:
    ledger = Ledger(holdings=(holding("other", ("GPU-0",)), holding("mine", ("GPU-0",), own=ID)))
    whose = blame(event(PID), WHOLE, ledger, Pids(), process(tmp_path, cgroup))
    assert whose == Blame(("research/train/mine",), How.PROCESS)


def test_a_process_of_no_container_is_nobodys_and_one_with_the_same_number_is_another(
    tmp_path: Path,
) -> None:
    ledger = Ledger(holdings=(holding("a", ("GPU-0",), own=ID), holding("b", ("GPU-0",))))
    procfs = process(tmp_path, f"0::/kubepods/{ID}\n", started=50.0)
    assert blame(event(PID, 60.0), WHOLE, ledger, Pids(), procfs).how == How.PROCESS
    assert blame(event(PID, 40.0), WHOLE, ledger, Pids(), procfs) == Blame()
    (tmp_path / str(PID) / "cgroup").write_text("0::/user.slice\n")
    alone = Ledger(holdings=ledger.holdings[:1])
    assert blame(event(PID, 60.0), WHOLE, alone, Pids(), procfs) == Blame()
    assert blame(event(PID + 1, 60.0), WHOLE, alone, Pids(), procfs).how == How.HOLDER


def test_a_process_that_has_ended_is_remembered_for_a_while(tmp_path: Path) -> None:
    pids, mine = Pids(), holding("mine", ("GPU-0",))
    pids.remember([DeviceUse(mine, "GPU-0", (PID,)), DeviceUse(None, "GPU-0", (1,))], 100.0)
    ledger = Ledger(holdings=(mine, holding("other", ("GPU-0",))))
    procfs = Procfs(str(tmp_path))
    assert blame(event(PID, 200.0), WHOLE, ledger, pids, procfs).titles == ("research/train/mine",)
    assert blame(event(PID, 5000.0), WHOLE, ledger, pids, procfs) == Blame()
    assert blame(event(1, 200.0), WHOLE, ledger, pids, procfs) == Blame()
    pids.remember([DeviceUse(mine, "GPU-0", tuple(range(10, 9000)))], 200.0)
    assert pids.find(8999, 200.0) == "research/train/mine"
    assert not pids.find(10, 200.0)  # it does not grow


def test_a_number_that_another_process_has_by_now_blames_nobody(tmp_path: Path) -> None:
    pids, mine = Pids(), holding("mine", ("GPU-0",))
    pids.remember([DeviceUse(mine, "GPU-0", (PID,))], 100.0)
    procfs = process(tmp_path, "0::/user.slice\n", started=150.0)
    assert blame(event(PID, 200.0), WHOLE, Ledger(holdings=(mine,)), pids, procfs) == Blame()


def test_a_process_that_nobody_has_reaped_yet_has_ended(tmp_path: Path) -> None:
    pids, mine = Pids(), holding("mine", ("GPU-0",))
    ledger = Ledger(holdings=(mine,))
    # It is not in its cgroups any more.
    procfs = process(tmp_path, "4:freezer:/\n1:name=systemd:/\n0::/\n", state="Z")
    assert blame(event(PID, 200.0), WHOLE, ledger, pids, procfs).how == How.HOLDER
    pids.remember([DeviceUse(mine, "GPU-0", (PID,))], 100.0)
    assert blame(event(PID, 200.0), WHOLE, ledger, pids, procfs).how == How.PROCESS


def test_by_who_holds_the_device_alone(tmp_path: Path) -> None:
    procfs, a, b = Procfs(str(tmp_path)), holding("a", ("MIG-a",)), holding("b", ("MIG-b",))
    both = Ledger(holdings=(a, b))
    assert blame(event(), PART, both, Pids(), procfs) == Blame(("research/train/a",), How.HOLDER)
    assert blame(event(), WHOLE, both, Pids(), procfs) == Blame()
    only = Ledger(holdings=(b,))
    assert blame(event(), WHOLE, only, Pids(), procfs) == Blame(("research/train/b",), How.HOLDER)
    shared = Ledger(holdings=(a, holding("c", ("MIG-a",))))
    assert blame(event(), PART, shared, Pids(), procfs) == Blame()


def test_nobody_is_blamed_for_an_error_that_may_be_anothers(tmp_path: Path) -> None:
    verdict = Verdict("", about(79), Severity.SUSPECT, ("GPU-0",), certain=False)
    ledger = Ledger(holdings=(holding("a", ("GPU-0",)),))
    assert blame(event(), verdict, ledger, Pids(), Procfs(str(tmp_path))) == Blame()
