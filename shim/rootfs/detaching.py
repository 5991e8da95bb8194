"""Unmount a rootfs without waiting for the disk.

When an overlay ends, the kernel writes its dirty data to disk, and other data that waits for the
same file system. That takes between a millisecond and seconds. A client of Delete needs the mount
to be gone, not the data to be on disk. Besides, the shim's only thread also serves other
containers.

Rules
- Only a rootfs that is a single overlay is detached, which is nearly every rootfs. Another file
  system may need to be fully unmounted when Delete returns, because a snapshotter removes its
  device next.
- It is detached only if it has ``index=off``, with which containerd mounts overlays: the kernel
  then lets the same layers be mounted again while the old mount ends.
- It is detached only if no process uses it and nothing is mounted in it. Otherwise
  :mod:`shim.rootfs.mounts` gives its users a moment.
- It is detached while a descriptor of it is open. Closing the descriptor waits for the disk, and
  may happen in any thread. If this process exits before, the kernel closes it.

Source: umount(2), MNT_EXPIRE; kernel fs/overlayfs/super.c ovl_sync_fs, filesystems/overlayfs.rst.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from shim import loop, syscalls
from shim.rootfs import mounts
from shim.rootfs.mounts import Mount


async def unmount(path: str) -> None:
    """Unmount everything at and below a path, as :func:`shim.rootfs.mounts.unmount_rootfs` does.

    If a mount is busy, the loop tries again later, so the pod's other containers are not delayed.
    """
    for pause in mounts.unmounting(path):
        await loop.sleep(pause)


def detach(rootfs: str, mounted: Sequence[Mount]) -> int | None:
    """Detach an unused overlay.

    Args:
        rootfs: where the overlay is mounted.
        mounted: what was mounted there.

    Returns:
        A descriptor: the overlay ends when it is closed. None if the overlay was not detached.
    """
    if len(mounted) != 1:
        return None
    kind, _, target, options = mounted[0]
    if kind != "overlay" or target.strip("/") or "index=off" not in options:
        return None
    try:
        syscalls.umount(rootfs, syscalls.UMOUNT_NOFOLLOW | syscalls.MNT_EXPIRE)
    except BlockingIOError:
        pass  # it is unused: a second call would unmount it
    except OSError:
        return None
    else:
        return None  # another process had made the first call: it is unmounted
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
