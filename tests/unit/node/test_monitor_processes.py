"""Finding the container of a process that the kernel's log names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from integration.containers.procfs import Procfs
from integration.node.services.monitor.processes import Processes

if TYPE_CHECKING:
    from pathlib import Path

PID: Final = 4711
MINE: Final = "0::/kubepods/mine\n"


def process(tmp_path: Path, cgroup: str, started: float = 0.0, *, state: str = "S") -> Path:
    here = tmp_path / str(PID)
    here.mkdir(exist_ok=True)
    ticks = int(started * os.sysconf("SC_CLK_TCK"))
    (here / "stat").write_text(f"{PID} (a ) b) {state} 1 {'0 ' * 17}{ticks} {'0 ' * 9}")
    (here / "cgroup").write_text(cgroup)
    return here


def test_a_process_is_where_its_cgroup_is(tmp_path: Path) -> None:
    process(tmp_path, MINE)
    processes = Processes(Procfs(str(tmp_path)))
    assert processes.cgroups_of(PID, 60.0) == MINE
    assert processes.cgroups_of(PID + 1, 60.0) == ""


def test_one_with_the_same_number_that_came_later_is_another(tmp_path: Path) -> None:
    process(tmp_path, MINE, started=50.0)
    processes = Processes(Procfs(str(tmp_path)))
    assert processes.cgroups_of(PID, 60.0) == MINE
    assert processes.cgroups_of(PID, 40.0) == ""


def test_one_that_has_ended_is_in_its_cgroup_of_version_2_alone(tmp_path: Path) -> None:
    process(tmp_path, "4:freezer:/\n1:name=systemd:/\n0::/\n", state="Z")
    assert Processes(Procfs(str(tmp_path))).cgroups_of(PID, 60.0) == ""
    process(tmp_path, MINE, state="Z")
    assert Processes(Procfs(str(tmp_path))).cgroups_of(PID, 60.0) == MINE


def test_in_a_storm_each_is_looked_for_once_in_a_while(tmp_path: Path) -> None:
    here = process(tmp_path, MINE)
    processes = Processes(Procfs(str(tmp_path)))
    assert processes.cgroups_of(PID, 60.0) == MINE
    (here / "cgroup").write_text("0::/user.slice\n")
    assert processes.cgroups_of(PID, 60.1) == MINE
    assert processes.cgroups_of(PID, 61.0) == "0::/user.slice\n"
