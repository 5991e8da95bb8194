"""The cgroups that are killed with a container, on real cgroup file systems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from shim.bundle import RuntimeRecord
from shim.cgroup import cgroup
from shim.runtime import orphans

# In a mount namespace in which /sys/fs/cgroup is a v2 hierarchy if argv[1] is "v2".
_PROGRAM: Final = """
import os, subprocess, sys
if sys.argv[1] == "v2":
    subprocess.run(["umount", "--lazy", "--recursive", "/sys/fs/cgroup"], check=True)
    subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
from shim.bundle import RuntimeRecord
from shim.cgroup import cgroup
from shim.runtime import orphans
root = cgroup._mounted().mounts[cgroup.UNIFIED][1]
name = f"nvshim-unit-{os.getpid()}"
# Another container's cgroups, which look like the top from inside, and the container's own.
others = [os.path.join(root, other, name, "c1") for other in (f"{name}-other", "unified")]
own = os.path.join(root, name, "c1")
processes = {}
try:
    for path in (*others, own):
        os.makedirs(path)
        processes[path] = subprocess.Popen(["sleep", "60"])
        with open(os.path.join(path, "cgroup.procs"), "w") as file:
            file.write(str(processes[path].pid))
    print(orphans._cgroups_of(processes[own].pid) == [own])
    record = RuntimeRecord("runc", "/nonexistent", systemd_cgroup=False)
    print(orphans.end_container(record, "c1", 0, cgroup_path=f"/{name}/c1", ask_runtime=False))
    print(processes[own].wait(5), os.path.exists(own))
    print([processes[path].poll() for path in others])
finally:
    for path, process in processes.items():
        process.kill()
        process.wait()
    for path in (*others, own):
        while path != root:
            try:
                os.rmdir(path)
            except OSError:
                pass
            path = os.path.dirname(path)
"""


def _in_a_namespace(version: str) -> list[str]:
    argv = ["unshare", "--mount", sys.executable, "-c", _PROGRAM, version]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_on_version_2_only_the_container_s_own_cgroup_is_ended() -> None:
    assert _in_a_namespace("v2") == ["True", "[]", "-9 False", "[None, None]"]


def test_on_this_host_only_the_container_s_own_cgroup_is_ended() -> None:
    if cgroup.UNIFIED not in cgroup._mounted().mounts:
        return  # no v2 hierarchy
    assert _in_a_namespace("host") == ["True", "[]", "-9 False", "[None, None]"]


def test_a_pid_that_no_process_can_have_is_that_of_none(tmp_path: Path) -> None:
    state = tmp_path / "c1"
    state.mkdir()
    (state / "state.json").write_text(json.dumps({"init_process_pid": 1 << 40}))
    record = RuntimeRecord("runc", str(tmp_path), systemd_cgroup=False)
    problems = orphans.end_container(record, "c1", 0, cgroup_path="", ask_runtime=False)
    assert problems == ["runc delete c1: no time is left for it"]
    assert not state.exists()


@pytest.mark.parametrize(
    "state",
    [
        {"init_process_pid": True, "init_process_start": True},
        {"init_process_pid": [1], "cgroup_paths": ["/sys/fs/cgroup/x"]},
        {"cgroup_paths": {"a": "x\0y", "b": "\ud800", "c": 1, "d": None}},
    ],
)
def test_a_malformed_state_of_a_runtime_does_not_keep_the_container(
    tmp_path: Path, state: dict[str, object]
) -> None:
    for name in ("state.json", "status"):
        directory = tmp_path / "c1"
        directory.mkdir()
        (directory / name).write_text(json.dumps(state))
        assert orphans.read_state(str(directory), []).pid == 0
        record = RuntimeRecord("runc", str(tmp_path), systemd_cgroup=False)
        problems = orphans.end_container(record, "c1", 0, cgroup_path="", ask_runtime=False)
        assert problems == ["runc delete c1: no time is left for it"]
        assert not directory.exists()


def test_a_cgroup_is_looked_for_where_hierarchies_are_mounted() -> None:
    assert cgroup.named("") == []
    assert cgroup.named("/") == []
    assert cgroup.named("/../..") == []
    name = f"nvshim-unit-{os.getpid()}"
    points = {point for _, point in cgroup._mounted().mounts.values()}
    point = min(points)
    path = os.path.join(point, name)
    os.mkdir(path)
    try:
        assert cgroup.named(f"/no-such/../{name}") == [path]
        assert cgroup.named(f"../../{name}/") == [path]
    finally:
        os.rmdir(path)
