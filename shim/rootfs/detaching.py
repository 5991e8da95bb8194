"""Taking a rootfs out of the tree without waiting for the disk.

When an overlay ends, the kernel writes its dirty data to disk, and whatever else waits for the same
file system. That takes between a millisecond and seconds. A client of Delete needs the mount to be
gone, not the data to be on disk; and the shim's one thread has other containers.

Rules
- Only a rootfs that is one overlay is detached, as nearly every rootfs is. Another file system
  may have to have ended when Delete returns: a snapshotter removes its device next.
- Only with ``index=off``, as containerd mounts overlays: then the kernel lets the same layers be
  mounted again while the old mount ends.
- Only if no process uses it and nothing is mounted in it. Otherwise :mod:`shim.rootfs.mounts`
  gives its users a moment.
- It is detached while a descriptor of it is open; closing that waits for the disk, and may happen
  in any thread. If this process ends before, the kernel closes it.

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

    A busy mount is tried again by the loop: the pod's other containers go on.
    """
    for pause in mounts.unmounting(path):
        await loop.sleep(pause)


def detach(rootfs: str, mounted: Sequence[Mount]) -> int | None:
    """Take an unused overlay out of the tree.

    Args:
        rootfs: where it is mounted.
        mounted: what was mounted there.

    Returns:
        A descriptor: the overlay ends when it is closed. None if it was not detached.
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
