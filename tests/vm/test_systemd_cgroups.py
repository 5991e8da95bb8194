"""Containers in cgroups that systemd creates, and limits that the current kernel enforces."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.harness import api
from tests.harness.cgroup import is_v2
from tests.harness.events import Recorder
from tests.harness.runtime import Container, Runtime, is_alive, new_name
from tests.harness.waiting import eventually
from tests.vm.unit import systemctl

MIB = 1 << 20


def _start(
    runtime: Runtime, *command: str, flags: Iterable[str] = (), systemd: bool = True
) -> Container:
    name = new_name()
    where = []
    if systemd:
        where = ["--cgroup", f"system.slice:nvshim:{name}"]
        where += [] if runtime.is_ours else ["--runc-systemd-cgroup"]
    return runtime.start(*command, name=name, flags=[*where, *flags])


def _scope(container: Container) -> str:
    return f"nvshim-{container.name}.scope"


def _read(container: Container, name: str) -> str:
    """Read a file of the cgroup that systemd created, or of crun's own cgroup in it."""
    scope = f"/sys/fs/cgroup/system.slice/{_scope(container)}"
    inner = f"{scope}/container"
    with open(os.path.join(inner if os.path.isdir(inner) else scope, name)) as file:
        return file.read()


def _cgroup(pid: int) -> str:
    with open(f"/proc/{pid}/cgroup") as file:
        return file.read().strip()


def test_host_is_what_these_tests_are_for() -> None:
    assert is_v2()
    assert os.path.isdir("/run/systemd/system")


@pytest.mark.parametrize(
    ("binary", "asked"), [("runc", True), ("runc", False), ("crun", False)],
    ids=["runc, by option", "runc, by the path", "crun, by the path"],
)  # fmt: skip
def test_systemd_makes_the_cgroup_and_everything_works_in_it(
    runtime: Runtime, tmp_path: Path, binary: str, asked: bool
) -> None:
    flags = runtime.low_level_flags(str(tmp_path), binary=shutil.which(binary))
    if asked and runtime.is_ours:
        with open(flags[-1], "a") as file:
            file.write("SystemdCgroup = true\n")
    container = _start(
        runtime, "sh", "-c", "sleep 1000 & exec sleep 1001",
        flags=[*flags, "--memory-limit", str(64 * MIB)],
    )  # fmt: skip
    container.wait_for_program("sleep")
    init, scope = container.pid, _scope(container)
    assert _cgroup(init).removesuffix("/container") == f"0::/system.slice/{scope}"
    assert systemctl("show", "--property=ActiveState", "--value", scope) == "active"
    if binary == "runc":  # crun 1.8 writes what systemd is not told
        assert systemctl("show", "--property=MemoryMax", "--value", scope) == str(64 * MIB)
    assert _read(container, "memory.max") == f"{64 * MIB}\n"

    api.update_task(
        runtime.containerd, container.name, b'{"memory":{"limit":50331648},"pids":{"limit":77}}'
    )
    systemctl("daemon-reload")
    assert _read(container, "memory.max") == f"{48 * MIB}\n"
    assert _read(container, "pids.max") == "77\n"
    assert len(container.pids) == 2

    runtime.containerd.ctr("tasks", "pause", container.name)
    assert container.status == "PAUSED"
    assert "frozen 1" in _read(container, "cgroup.events")
    runtime.containerd.ctr("tasks", "resume", container.name)
    assert "frozen 0" in _read(container, "cgroup.events")

    done = container.exec("sh", "-c", "cat /proc/self/cgroup; exit 3")
    assert done.code == 3
    pids = container.pids
    container.kill("KILL", flags=["--all"])
    assert container.exit_code() == 128 + 9
    assert not any(map(is_alive, pids))
    eventually(
        lambda: not os.path.exists(f"/sys/fs/cgroup/system.slice/{scope}"), "the scope is gone"
    )


@pytest.mark.parametrize("systemd", [True, False], ids=["systemd", "cgroupfs"])
def test_memory_limit_holds_and_its_end_is_told(runtime: Runtime, systemd: bool) -> None:
    limited = ["--memory-limit", str(32 * MIB)]
    greedy = "dd if=/dev/zero of=/dev/null bs=100M count=1"
    with Recorder(runtime.containerd) as recorder:
        child = _start(
            runtime, "sh", "-c", f"{greedy} & wait; exec sleep 1000",
            flags=limited, systemd=systemd,
        )  # fmt: skip
        recorder.wait_for(child.name, lambda names: "oom" in names)
        child.wait_for_program("sleep")
        init = _start(runtime, "sh", "-c", f"exec {greedy}", flags=limited, systemd=systemd)
        names = recorder.wait_for(init.name, lambda names: {"oom", "exit"} <= set(names))
        assert names.index("start") < names.index("exit")
        assert init.exit_code() == 128 + 9
        assert child.status == "RUNNING"


def test_limits_of_processes_and_of_processor_time_hold(runtime: Runtime) -> None:
    container = _start(
        runtime, "sh", "-c", "while :; do :; done",
        flags=["--cpu-quota", "10000", "--cpu-period", "100000"],
    )  # fmt: skip
    assert _read(container, "cpu.max") == "10000 100000\n"

    def stat() -> dict[str, int]:
        lines = _read(container, "cpu.stat").splitlines()
        return {name: int(value) for name, value in (line.split() for line in lines)}

    # The counters include the runtime's own work in the cgroup before the limit was set.
    before = stat()
    eventually(
        lambda: stat()["nr_throttled"] >= before["nr_throttled"] + 20, "it is held back", timeout=30
    )
    after = stat()
    # About a tenth of each period of 100 ms.
    periods = after["nr_periods"] - before["nr_periods"]
    assert after["usage_usec"] - before["usage_usec"] < 15_000 * (periods + 3)
    runtime.containerd.ctr("tasks", "kill", "--signal", "KILL", container.name)

    idle = _start(runtime, "sleep", "1000")
    api.update_task(runtime.containerd, idle.name, b'{"pids":{"limit":8}}')
    many = idle.exec("sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 5 & done; wait")
    assert many.code != 0
    assert "fork" in many.stderr
    assert "max 0" not in _read(idle, "pids.events")


def test_processes_of_a_shared_pid_namespace_end_with_their_init(runtime: Runtime) -> None:
    container = _start(
        runtime, "sh", "-c", "sleep 1000 & sleep 1001 & wait",
        flags=["--with-ns", "pid:/proc/1/ns/pid"],
    )  # fmt: skip
    pids = eventually(lambda: p if len(p := container.pids) == 3 else [], "all three run")
    container.kill("KILL")
    assert container.exit_code() == 128 + 9
    assert not any(map(is_alive, pids))
