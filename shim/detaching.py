"""Taking a rootfs out of the tree without waiting for the disk.

When an overlay ends, the kernel writes to disk what was written in it, and whatever else waits
for the same file system: between a millisecond and seconds. Whoever asks for a Delete needs the
mount to be gone, not the data to be on disk; and the shim's one thread has other containers.

Rules
- Only what is one overlay, as nearly every rootfs is. A file system of the snapshotter's own
  making may have to have ended when Delete returns, since its device goes next.
- Only with ``index=off``, as containerd mounts overlays: then the kernel lets the same layers be
  mounted anew while the old mount ends.
- Only if nobody uses it and nothing is mounted in it; else :mod:`shim.mounts` is patient first.
- It is detached while a descriptor of it is open; what closes that, in whatever thread, waits for
  the disk. If this process ends before, the kernel closes it.

Source: umount(2), MNT_EXPIRE; kernel fs/overlayfs/super.c ovl_sync_fs, filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os

from api import aio
from shim import mounts, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from shim.mounts import Mount


async def unmount(path: str) -> None:
    """Unmount everything at and below a path, as :func:`shim.mounts.unmount_rootfs` does.

    What is busy is waited for without holding up the pod's other containers.
    """
    for pause in mounts.unmounting(path):
        await aio.sleep(pause)


def detach(rootfs: str, mounted: Sequence[Mount]) -> int | None:
    """Take an overlay that nobody uses out of the tree.

    Args:
        rootfs: where it is mounted.
        mounted: what was mounted there.

    Returns:
        A descriptor, with which the overlay ends; None if it is left as it is.
    """
    if len(mounted) != 1:
        return None
    kind, _, target, options = mounted[0]
    if kind != "overlay" or target.strip("/") or "index=off" not in options:
        return None
    try:
        syscalls.umount(rootfs, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_EXPIRE)
    except BlockingIOError:
        pass  # nobody uses it: asked a second time, it would be unmounted
    except OSError:
        return None
    else:
        return None  # somebody had asked before
    try:
        fd = os.open(rootfs, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        syscalls.umount(rootfs, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_DETACH)
    except OSError:
        os.close(fd)
        return None
    return fd
