"""Processes of a cgroup, on the kernel's own file system."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shim import cgroup

if TYPE_CHECKING:
    from collections.abc import Iterator


def _a_hierarchy() -> str:
    for name in ("pids", ""):
        path = os.path.join("/sys/fs/cgroup", name)
        if os.path.exists(os.path.join(path, "cgroup.procs")):
            return path
    pytest.skip("no cgroup hierarchy that a test can use")


@pytest.fixture
def group() -> Iterator[str]:
    path = os.path.join(_a_hierarchy(), f"nvshim-unit-{os.getpid()}")
    os.makedirs(os.path.join(path, "below"))
    yield path
    os.rmdir(os.path.join(path, "below"))
    os.rmdir(path)


def _join(pid: int, path: str) -> None:
    with open(os.path.join(path, "cgroup.procs"), "w") as file:
        file.write(str(pid))


def test_processes_of_a_group_and_of_those_below_it_are_found(group: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        try:
            _join(first.pid, group)
            _join(second.pid, os.path.join(group, "below"))
            found = cgroup.of(first.pid)
            assert found is not None
            assert group in found.directories.values()
            assert found.pids() == sorted([first.pid, second.pid])
        finally:
            first.kill()
            second.kill()


def test_a_process_in_the_root_group_has_no_group_of_its_own() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            for root in ("/sys/fs/cgroup", *(e.path for e in os.scandir("/sys/fs/cgroup"))):
                if os.path.exists(os.path.join(root, "cgroup.procs")):
                    _join(child.pid, root)
            assert cgroup.of(child.pid) is None
        finally:
            child.kill()


def test_a_group_that_we_are_in_ourselves_is_no_containers(group: str) -> None:
    with open(os.path.join(group, "cgroup.procs")) as file:
        assert not file.read()
    program = (
        "import os, subprocess; from shim import cgroup; "
        "open({0!r} + '/cgroup.procs', 'w').write(str(os.getpid())); "
        "child = subprocess.Popen(['sleep', '60']); "
        "print(cgroup.of(child.pid)); child.kill(); child.wait()"
    )
    argv = [sys.executable, "-c", program.format(group)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


def test_what_is_gone_has_neither_group_nor_processes() -> None:
    assert cgroup.of(2**22 + 1) is None
    assert cgroup.pids_in("/sys/fs/cgroup/no/such/group") == []
