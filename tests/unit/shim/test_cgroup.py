"""Processes of a cgroup, on a real cgroup file system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shim.cgroup import cgroup
from tests.harness.cgroup import is_v2


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


@pytest.mark.parametrize("name", [b"\xff", b"x\r0::", b"x\r4:pids:"])
def test_a_process_whose_group_has_an_odd_name_is_found_and_signalled(
    group: str, name: bytes
) -> None:
    """Else a container could hide, or name another's cgroup on what would be taken for a line."""
    odd = os.path.join(group, os.fsdecode(name))
    inner = os.path.join(odd, "elsewhere")
    os.makedirs(inner)
    try:
        with (
            subprocess.Popen(["sleep", "60"]) as first,
            subprocess.Popen(["sleep", "60"]) as second,
        ):
            try:
                _join(first.pid, group)
                _join(second.pid, inner)
                found = cgroup.of(second.pid)
                assert found is not None
                assert inner in found.directories.values()
                of_container = cgroup.of(first.pid)
                assert of_container is not None
                of_container.signal(signal.SIGTERM)
                assert (first.wait(), second.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
            finally:
                first.kill()
                second.kill()
    finally:
        os.rmdir(inner)
        os.rmdir(odd)


def test_a_process_in_the_root_group_has_no_group_of_its_own() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            below = [] if is_v2() else [entry.path for entry in os.scandir("/sys/fs/cgroup")]
            for root in ("/sys/fs/cgroup", *below):
                if os.path.exists(os.path.join(root, "cgroup.procs")):
                    _join(child.pid, root)
            assert cgroup.of(child.pid) is None
        finally:
            child.kill()


def test_a_group_that_we_are_in_ourselves_is_no_containers(group: str) -> None:
    with open(os.path.join(group, "cgroup.procs")) as file:
        assert not file.read()
    program = (
        "import os, subprocess; from shim.cgroup import cgroup; "
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


V1 = b"""\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
"""
HYBRID = V1 + b"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
V2 = b"29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
# In a container that runs containers, without its own cgroup namespace.
NESTED = b"""\
35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory
36 31 0:32 / /host\\040cgroups/memory rw - cgroup cgroup rw,memory
37 31 0:33 /docker/abc /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids
"""


@pytest.mark.parametrize(
    ("mountinfo", "is_v2", "controller", "path", "directory"),
    [
        (V1, False, "cpu", "/a/b", "/sys/fs/cgroup/cpu,cpuacct/a/b"),
        (V1, False, "cpuacct", "/a/b", "/sys/fs/cgroup/cpu,cpuacct/a/b"),
        (V1, False, "name=systemd", "/a", "/sys/fs/cgroup/systemd/a"),
        (V1, False, "memory", "/", "/sys/fs/cgroup/memory"),
        (V1, False, "memory", "/../outside", None),
        (V1, False, "pids", "/a", None),
        (V1, False, "", "/a", None),
        (HYBRID, False, "", "/a", "/sys/fs/cgroup/unified/a"),
        (HYBRID, False, "memory", "/a", "/sys/fs/cgroup/memory/a"),
        (V2, True, "", "/a/b", "/sys/fs/cgroup/a/b"),
        (V2, True, "memory", "/a", None),
        # A v1 hierarchy that a tool has mounted on a v2 host.
        (V2 + V1.splitlines()[2], True, "", "/a", "/sys/fs/cgroup/a"),
        (NESTED, False, "memory", "/a", "/host cgroups/memory/a"),
        (NESTED, False, "pids", "/docker/abc/a", "/sys/fs/cgroup/pids/a"),
        (NESTED, False, "pids", "/docker/abc", "/sys/fs/cgroup/pids"),
        (NESTED, False, "pids", "/docker/abcd", None),
        (
            b"30 25 0:26 / /a\x0bb\\040c rw - cgroup cgroup rw,cpu\n",
            False,
            "cpu",
            "/d",
            "/a\x0bb c/d",
        ),
        (b"garbage\n\n - cgroup\n1 2 3 - cgroup cgroup rw,cpu\n", False, "cpu", "/a", None),
    ],
)
def test_a_path_is_found_where_its_hierarchy_is_mounted(
    mountinfo: bytes, is_v2: bool, controller: str, path: str, directory: str | None
) -> None:
    hierarchies = cgroup.parse_mounts(mountinfo.splitlines())
    assert hierarchies.is_v2 is is_v2
    assert hierarchies.directory(controller, path) == directory


@pytest.mark.parametrize(
    ("mountinfo", "paths", "file"),
    [
        (V2, {"": "/a"}, "/sys/fs/cgroup/a/cgroup.threads"),
        (HYBRID, {"memory": "/b", "": "/a"}, "/sys/fs/cgroup/unified/a/cgroup.threads"),
        (V1, {"memory": "/b", "": "/a"}, "/sys/fs/cgroup/memory/b/tasks"),
        (V1, {"": "/a"}, None),
        (b"", {"memory": "/b", "": "/a"}, None),
    ],
    ids=["v2", "hybrid", "v1", "v1 without a known controller", "no mount"],
)
def test_the_file_of_threads_is_that_of_the_newest_hierarchy(
    monkeypatch: pytest.MonkeyPatch, mountinfo: bytes, paths: dict[str, str], file: str | None
) -> None:
    hierarchies = cgroup.parse_mounts(mountinfo.splitlines())
    monkeypatch.setattr(cgroup, "_mounted", lambda: hierarchies)
    monkeypatch.setattr(cgroup, "_paths_of", lambda _: paths)
    assert cgroup.threads_file() == file


def test_paths_are_read_by_controller() -> None:
    text = "9:name=systemd:/s\n2:cpu,cpuacct:/a:b\n0::/u\n\ngarbage\n"
    assert cgroup.parse_paths(text.splitlines()) == {
        "name=systemd": "/s", "cpu": "/a:b", "cpuacct": "/a:b", "": "/u",
    }  # fmt: skip


def test_the_directory_of_a_controller_is_its_own_or_the_only_one() -> None:
    v1 = cgroup.Cgroup({"memory": "/m", "": "/u"}, is_v2=False)
    assert (v1.directory("memory"), v1.directory("cpu")) == ("/m", None)
    v2 = cgroup.Cgroup({"": "/u"}, is_v2=True)
    assert (v2.directory("memory"), v2.directory("cpu")) == ("/u", "/u")
