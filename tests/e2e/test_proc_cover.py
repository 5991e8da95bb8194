"""Covers that the shim mounts between create and start: procfs files, and device nodes.

/proc/version replaces a file of the driver, because every kernel has it.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from shim.rootfs import node_cover
from shim.rootfs.proc_cover import COVERED, UNCOVERED, cover, uncover
from tests.harness import loop_backend
from tests.harness.low_level import crun_for_this_host
from tests.harness.runtime import new_name
from tests.harness.waiting import eventually
from tools.images import busybox, unpack
from tools.parts import Parts

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop of a shim, which covers files."""
    loop_backend.register()
    return loop_backend.OURS


FILE: Final = "/proc/version"
SHOWN: Final = "what the container is to read\n"
LOOK: Final = """
cat /proc/version
echo changed 2>/dev/null >/proc/version && echo written
while read -r _ _ _ _ where options rest; do
    if [ "$where" = /proc/version ]; then echo "$options $rest"; fi
done </proc/self/mountinfo
"""
IDS: Final = [{"containerID": 0, "hostID": 200000, "size": 65536}]


class Container:
    """A container that was created and not started; its output goes to a file."""

    def __init__(self, runtime: str, directory: str, change: Any = None) -> None:
        self._runtime = runtime
        self._directory = directory
        self.name = new_name()
        rootfs = unpack(busybox().tree, os.path.join(directory, "rootfs"))
        os.chmod(directory, 0o755)  # so that root of a user namespace may enter
        subprocess.run(["runc", "spec", "--bundle", directory], check=True)
        path = os.path.join(directory, "config.json")
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
        spec["process"].update(terminal=False, args=["sh", "-c", LOOK])
        spec["linux"]["cgroupsPath"] = f"/{self.name}"
        if change is not None:
            change(spec, rootfs)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(spec, file)
        pid_file = os.path.join(directory, "pid")
        with open(os.path.join(directory, "said"), "wb") as said:
            self._call("create", "--bundle", directory, "--pid-file", pid_file, said=said)
        with open(pid_file, encoding="ascii") as file:
            self.pid = int(file.read())

    def _call(self, verb: str, *words: str, said: Any = None) -> None:
        argv = [self._runtime, "--root", f"{self._directory}/state", verb, *words, self.name]
        # Not /dev/null: crun 1.8 would change its owner to the container's user.
        subprocess.run(argv, input=b"", stdout=said, stderr=said, check=True)

    def run(self) -> list[str]:
        """Run the container to its end; return its output lines."""
        pidfd = os.pidfd_open(self.pid)
        try:
            self._call("start")
            assert select.select([pidfd], [], [], 10)[0]
        finally:
            os.close(pidfd)
        with open(os.path.join(self._directory, "said"), encoding="utf-8") as file:
            return file.read().splitlines()

    def mount(self, *words: str) -> None:
        """Mount something in the container before its program starts."""
        namespace = f"--mount=/proc/{self.pid}/ns/mnt"
        subprocess.run(["nsenter", namespace, "mount", *words], check=True)

    def remove(self) -> None:
        self._call("delete", "--force")


@pytest.fixture(params=["runc", "crun"])
def runtime(request: pytest.FixtureRequest, parts: Parts, tmp_path: Path) -> str:
    """Return each low-level runtime."""
    return crun_for_this_host(str(tmp_path), parts.crun) if request.param == "crun" else parts.runc


@contextmanager
def created(runtime: str, tmp_path: Path, change: Any = None) -> Iterator[Container]:
    """Yield a container; check at the end that it leaves nothing on the host."""
    directory = tmp_path / "bundle"
    directory.mkdir()
    before = mounts_of_host()
    container = Container(runtime, str(directory), change)
    try:
        yield container
    finally:
        container.remove()
    assert mounts_of_host() == before


def mounts_of_host() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return sorted(line.split(" ", 2)[2] for line in file if "/proc/version" in line)


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


_OTHERS: set[str] = set()


@pytest.fixture(autouse=True)
def _others() -> None:
    """Start threads that exist already, such as those of other tests' libraries."""
    _OTHERS.update(_threads())


def left_in_here() -> tuple[int, str, str]:
    """Return what entering a container could leave behind in this process."""
    eventually(lambda: not _threads() - _OTHERS, "it exited")
    gc.collect()  # close what earlier tests have left open
    namespace, root = os.readlink("/proc/self/ns/mnt"), os.readlink("/proc/self/root")
    return len(os.listdir("/proc/self/fd")), namespace, root


@pytest.fixture
def staged(tmp_path: Path) -> str:
    path = tmp_path / "staged"
    path.write_text(SHOWN)
    path.chmod(0o444)
    return str(path)


def real() -> str:
    with open(FILE, encoding="utf-8") as file:
        return file.read()


def in_user_namespace(spec: dict[str, Any], rootfs: str) -> None:
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"].update(uidMappings=IDS, gidMappings=IDS)
    for top, _, names in os.walk(rootfs):
        for path in (top, *(os.path.join(top, name) for name in names)):
            os.chown(path, 200000, 200000, follow_symlinks=False)
    directory = os.path.dirname(rootfs)
    while directory != "/":  # runc's init enters it as that user
        os.chmod(directory, os.stat(directory).st_mode | 0o011)
        directory = os.path.dirname(directory)


def shared(spec: dict[str, Any], rootfs: str) -> None:
    del rootfs
    spec["linux"]["rootfsPropagation"] = "shared"


def read_only(spec: dict[str, Any], rootfs: str) -> None:
    del rootfs
    spec["root"]["readonly"] = True


def privileged(spec: dict[str, Any], rootfs: str) -> None:
    del rootfs
    every = [f"CAP_{name}" for name in ("SYS_ADMIN", "DAC_OVERRIDE", "SYS_CHROOT", "MKNOD")]
    spec["process"]["capabilities"] = dict.fromkeys(("bounding", "effective", "permitted"), every)
    spec["linux"].pop("maskedPaths")
    spec["linux"].pop("readonlyPaths")


@pytest.mark.parametrize("change", [read_only, privileged, shared, in_user_namespace])
async def test_container_reads_what_was_staged_and_cannot_write_it(
    runtime: str, tmp_path: Path, staged: str, change: Any
) -> None:
    before = real()
    with created(runtime, tmp_path, change) as container:
        assert await cover(container.pid, {FILE: staged}) == {FILE: COVERED}
        assert real() == before
        assert mounts_of_host() == []
        first, *rest = container.run()
    assert first == SHOWN.strip()
    (options,) = rest  # nothing was written
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(options.split()[0].split(","))
    assert "shared:" not in options
    assert real() == before


def strange_mount_point(spec: dict[str, Any], rootfs: str) -> None:
    os.mkdir(os.path.join(rootfs, "a\rb"))
    spec["mounts"].append({"destination": "/a\rb", "type": "tmpfs", "source": "tmpfs"})


async def test_mount_point_with_a_carriage_return_is_one_like_others(
    runtime: str, tmp_path: Path, staged: str
) -> None:
    with created(runtime, tmp_path, strange_mount_point) as container:
        assert await cover(container.pid, {FILE: staged}) == {FILE: COVERED}


async def test_no_room_for_a_thread_is_told_and_leaves_nothing(
    runtime: str, tmp_path: Path, staged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with created(runtime, tmp_path) as container:
        before = left_in_here()
        monkeypatch.setattr("_thread.start_new_thread", refuse)
        told = await cover(container.pid, {FILE: staged})
        assert told == {FILE: "can't start new thread"}
        assert left_in_here() == before


async def test_what_is_covered_can_be_uncovered_and_covered_again(
    runtime: str, tmp_path: Path, staged: str
) -> None:
    with created(runtime, tmp_path) as container:
        before = left_in_here()
        for _ in range(2):
            assert await cover(container.pid, {FILE: staged}) == {FILE: COVERED}
            assert await uncover(container.pid, [FILE]) == {FILE: UNCOVERED}
        assert left_in_here() == before
        assert container.run() == [real().strip()]


async def test_odd_containers_are_left_alone(runtime: str, tmp_path: Path, staged: str) -> None:
    with created(runtime, tmp_path) as container:
        again = {
            "/proc/driver/nvidia/params": "its procfs does not have the file",
            "/proc/tty": "it is not a regular file of procfs",
            "/proc/self/status": "too many levels of symbolic links",
            "/proc/mounts": "too many levels of symbolic links",
            "/etc/hostname": "not a file of procfs",
        }
        assert await cover(container.pid, dict.fromkeys(again, staged)) == again
        missing = f"{staged}-not"
        told = await cover(container.pid, {FILE: missing})
        assert told == {FILE: f"to mount {missing}: no such file or directory"}
        container.mount("-o", "bind", "/usr/bin/busybox", FILE)
        told = await cover(container.pid, {FILE: staged})
        assert told == {FILE: "something is mounted there already"}
        container.mount("-t", "tmpfs", "none", "/proc")
        told = await cover(container.pid, {FILE: staged})
        assert told == {FILE: "its /proc is not a procfs"}
    own = await cover(os.getpid(), {FILE: staged})
    assert own == {FILE: "it has no mount namespace of its own"}
    gone = await cover(container.pid, {FILE: staged})
    assert gone == {FILE: "its mount namespace: no such file or directory"}
    assert mounts_of_host() == []


# -- nodes of devices ------------------------------------------------------------------------

# Every container has this device, and the owner and mode show which node it is.
NODE: Final = {
    "path": "/dev/full", "type": "c", "major": 1, "minor": 7,
    "fileMode": 0o640, "uid": 0, "gid": 44,
}  # fmt: skip
OPEN: Final = "stat -c '%u:%g %a %t:%T' /dev/full; (: </dev/full) && echo opened"


def opens(spec: dict[str, Any], rootfs: str) -> None:
    in_user_namespace(spec, rootfs)
    spec["process"]["args"] = ["sh", "-c", OPEN]


def shares(spec: dict[str, Any], rootfs: str) -> None:
    opens(spec, rootfs)
    shared(spec, rootfs)


@pytest.mark.parametrize("change", [opens, shares])
async def test_node_is_owned_by_who_has_its_numbers_in_the_container(
    runtime: str, tmp_path: Path, change: Any
) -> None:
    before = os.stat("/dev/full")
    with created(runtime, tmp_path, change) as container:
        assert await node_cover.cover(container.pid, [NODE], str(tmp_path)) == {
            "/dev/full": COVERED
        }
        (made,) = (tmp_path / "nodes").iterdir()
        assert (made.stat().st_uid, made.stat().st_gid) == (200000, 200044)
        assert tmp_path.joinpath("nodes").stat().st_mode & 0o777 == 0o700
        assert container.run() == ["0:44 640 1:7", "opened"]
    assert os.stat("/dev/full") == before
    assert b"/dev/full" not in Path("/proc/self/mountinfo").read_bytes()


async def test_node_that_is_uncovered_is_the_hosts_again_and_can_be_covered_again(
    runtime: str, tmp_path: Path
) -> None:
    with created(runtime, tmp_path, opens) as container:
        for _ in range(2):
            states = await node_cover.cover(container.pid, [NODE], str(tmp_path))
            assert states == {"/dev/full": COVERED}
            states = await node_cover.uncover(container.pid, ["/dev/full"])
            assert states == {"/dev/full": UNCOVERED}
        assert container.run() == ["65534:65534 666 1:7", "opened"]


async def test_nothing_but_the_same_device_is_covered(runtime: str, tmp_path: Path) -> None:
    def change(spec: dict[str, Any], rootfs: str) -> None:
        opens(spec, rootfs)
        os.symlink("full", f"{rootfs}/link")
        os.symlink("/dev", f"{rootfs}/way")

    paths = {
        "/dev/zero": "it is another device, or none",
        "/dev/pts": "it is another device, or none",
        "/dev/none": "no such file or directory",
        "/link": "too many levels of symbolic links",
        "/way/full": "too many levels of symbolic links",
    }
    with created(runtime, tmp_path, change) as container:
        nodes = [{**NODE, "path": path} for path in paths]
        assert await node_cover.cover(container.pid, nodes, str(tmp_path)) == paths
        assert container.run() == ["65534:65534 666 1:7", "opened"]


async def test_ids_that_a_container_does_not_have_are_its_roots(
    runtime: str, tmp_path: Path
) -> None:
    with created(runtime, tmp_path, opens) as container:
        node = {**NODE, "gid": 70000}
        await node_cover.cover(container.pid, [node], str(tmp_path))
        assert container.run() == ["0:0 640 1:7", "opened"]
