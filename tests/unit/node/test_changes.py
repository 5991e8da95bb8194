from __future__ import annotations

import os
import resource
import socket
import time
from typing import TYPE_CHECKING

import anyio
import pytest

from integration.node.changes import Changes, concerns_gpus

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

GPU = (
    b"add@/devices/pci0000:00/0000:00:1e.0\0ACTION=add\0SUBSYSTEM=pci\0PCI_CLASS=30200\0"
    b"PCI_ID=10DE:2330\0SEQNUM=4711\0"
)
NETWORK_CARD = GPU.replace(b"PCI_CLASS=30200", b"PCI_CLASS=20000")


@pytest.mark.parametrize(
    ("message", "matters"),
    [
        (GPU, True),
        (NETWORK_CARD, False),
        (b"add@/module/nvidia_uvm\0ACTION=add\0SUBSYSTEM=module\0", True),
        (b"add@/module/overlay\0ACTION=add\0SUBSYSTEM=module\0", False),
        (b"change@/devices/x/drm/card1\0ACTION=change\0SUBSYSTEM=drm\0HOTPLUG=1\0", True),
        (b"unbind@/devices/x\0ACTION=unbind\0DRIVER=nvidia\0SUBSYSTEM=pci\0", True),
        (b"bind@/devices/x\0ACTION=bind\0DRIVER=nouveau\0SUBSYSTEM=pci\0", True),
        (b"", False),
    ],
)  # fmt: skip
def test_which_announcements_matter(message: bytes, matters: bool) -> None:
    assert concerns_gpus(message) is matters


async def test_many_announcements_that_do_not_matter_wake_nobody_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    with Changes() as changes, kernels:
        changes._close_uevents()
        changes._uevents = ours
        reads = 0
        read = changes._read

        def counted() -> bool:
            nonlocal reads
            reads += 1
            return read()

        monkeypatch.setattr(changes, "_read", counted)

        async def announce() -> None:
            for _ in range(100):
                kernels.send(NETWORK_CARD)
                await anyio.sleep(0.001)
            kernels.send(GPU)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announce)
            assert await changes.wait(10)
        assert reads < 50


async def test_a_new_file_is_heard(tmp_path: Path) -> None:
    with Changes() as changes:
        changes.listen_to([str(tmp_path)], ("/nonexistent",))
        (tmp_path / "libcuda.so.1").write_bytes(b"")
        assert await changes.wait(10)
        assert not await changes.wait(0.05)


async def test_a_swarm_is_one_change(tmp_path: Path) -> None:
    with Changes() as changes:
        changes.listen_to([str(tmp_path)], ("/nonexistent",))

        async def install() -> None:
            for number in range(10):
                (tmp_path / str(number)).write_bytes(b"")
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(install)
            assert await changes.wait(10)
        assert not await changes.wait(0.05)


async def test_a_swarm_that_does_not_end_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("integration.node.changes._LONGEST_SWARM", 0.5)
    with Changes() as changes:
        changes.listen_to([str(tmp_path)], ("/nonexistent",))

        async def install() -> None:
            while True:
                (tmp_path / "file").write_bytes(b"")
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(install)
            begun = time.monotonic()
            assert await changes.wait(10)
            assert time.monotonic() - begun < 5
            tasks.cancel_scope.cancel()


async def test_what_is_written_to_a_node_is_not_heard_but_a_new_node_is(tmp_path: Path) -> None:
    (tmp_path / "null").write_bytes(b"")
    with Changes() as changes:
        changes.listen_to([], (str(tmp_path),))
        (tmp_path / "null").write_bytes(b"x")
        assert not await changes.wait(0.1)
        os.mkfifo(tmp_path / "nvidia0")
        assert await changes.wait(10)


async def test_directories_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Changes() as changes:
        changes.listen_to([str(tmp_path / "a")], ("/nonexistent",))
        changes.listen_to([str(tmp_path / "b"), "/nonexistent"], ("/nonexistent",))
        (tmp_path / "a" / "x").write_bytes(b"")
        assert not await changes.wait(0.1)
        (tmp_path / "b" / "x").write_bytes(b"")
        assert await changes.wait(10)


async def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with Changes() as changes:
        changes.listen_to([str(tmp_path)], ("/nonexistent",))
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_without_inotify_it_says_so_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("shim.syscalls.inotify_init", refuse)
    with Changes() as changes:
        changes.listen_to([str(tmp_path)], ("/nonexistent",))
        assert changes.deaf["files"] == "Too many open files"
        assert not await changes.wait(0.05)


async def test_what_could_not_be_watched_is_watched_once_it_can(tmp_path: Path) -> None:
    """No descriptor is free, once."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Changes() as changes:
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            assert not changes.listen_to([str(tmp_path)], ("/nonexistent",))
            assert changes.deaf["files"] == "Too many open files"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        # What has happened meanwhile is to be looked for.
        assert changes.listen_to([str(tmp_path)], ("/nonexistent",))
        assert "files" not in changes.deaf
        (tmp_path / "libcuda.so.1").write_bytes(b"")
        assert await changes.wait(10)


async def test_a_directory_that_is_made_anew_is_heard(tmp_path: Path) -> None:
    """Many file systems give it the number of the one before."""
    driver = tmp_path / "driver"
    driver.mkdir()
    with Changes() as changes:
        changes.listen_to([str(driver)], ("/nonexistent",))
        for _ in range(5):
            driver.rmdir()
            driver.mkdir()
            assert await changes.wait(10)
            assert changes.listen_to([str(driver)], ("/nonexistent",))
            (driver / "libcuda.so.1").write_bytes(b"")
            assert await changes.wait(10)
            (driver / "libcuda.so.1").unlink()
            assert await changes.wait(10)
