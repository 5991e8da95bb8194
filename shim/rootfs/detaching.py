"""Unmount a rootfs without waiting for the disk.

When an overlay ends, the kernel writes its dirty data to disk, and other pending data of the same
file system, which takes between a millisecond and seconds. A client of Delete needs the mount to be
gone, not the data to be on disk, and the shim's only thread also serves other containers.

Rules
- Only a single overlay is detached, which is nearly every rootfs. Other file systems must be fully
  unmounted when Delete returns, because a snapshotter may remove their device next.
- It must have ``index=off``, containerd's default: the kernel then allows new mounts of the same
  layers while the old mount ends.
- No process may use it, and nothing may be mounted in it. Otherwise :mod:`shim.rootfs.mounts` gives
  its users a moment.
- A descriptor of it is open while it is detached. Closing the descriptor waits for the disk, and
  may happen in any thread. If this process exits first, the kernel closes it.

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
        mounted: its mounts.

    Returns:
        A descriptor, whose closing ends the overlay. None if the overlay was not detached.
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
        return None  # another process has made the first call, so it is unmounted
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
