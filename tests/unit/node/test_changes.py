from __future__ import annotations

import socket

import anyio
import pytest

from integration.node.changes import announced, concerns_gpus
from integration.watcher import Watcher

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
    reads = 0

    class Counted(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            nonlocal reads
            reads += 1
            return super().recv(size, flags)

    one, kernels = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    ours = Counted(fileno=one.detach())
    ours.setblocking(False)
    with kernels, Watcher(0.3) as watcher, announced(watcher, lambda: ours) as why:
        assert why == ""

        async def announce() -> None:
            for _ in range(100):
                kernels.send(NETWORK_CARD)
                await anyio.sleep(0.001)
            kernels.send(GPU)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announce)
            assert await watcher.wait(10)
    # One read per message, and some that find the queue empty.
    assert 101 < reads < 150


async def test_what_cannot_be_heard_is_said() -> None:
    def refuse() -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    with Watcher(0) as watcher, announced(watcher, refuse) as why:
        assert why == "Address family not supported by protocol"
        assert not await watcher.wait(0.05)
