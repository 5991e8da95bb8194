from __future__ import annotations

import os
import socket
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


async def test_many_announcements_that_do_not_matter_wake_nobody_often() -> None:
    ours, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    reads = 0

    class Counted(Changes):
        def _read(self) -> bool:
            nonlocal reads
            reads += 1
            return super()._read()

    with kernels, Counted(lambda: ours) as changes:

        async def announce() -> None:
            for _ in range(100):
                kernels.send(NETWORK_CARD)
                await anyio.sleep(0.001)
            kernels.send(GPU)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announce)
            assert await changes.wait(10)
    assert 0 < reads < 50


async def test_files_and_nodes_are_heard_but_not_what_is_written_to_a_node(tmp_path: Path) -> None:
    files, dev = tmp_path / "files", tmp_path / "dev"
    files.mkdir()
    dev.mkdir()
    (dev / "null").touch()
    with Changes() as changes:
        assert changes.listen_to([str(files)], (str(dev),))
        assert not changes.listen_to([str(files)], (str(dev),))
        (dev / "null").write_bytes(b"x")
        assert not await changes.wait(0.1)
        os.mkfifo(dev / "nvidia0")
        assert await changes.wait(10)
        (files / "libcuda.so.1").touch()
        assert await changes.wait(10)


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
