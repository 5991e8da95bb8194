"""Attach files to loop devices, to mount them as block devices.

The kernel names a free device, but another process may use it first. With ``LO_FLAGS_AUTOCLEAR`` a
device releases its file after its last user: the returned descriptor, and the mount made with it.
So there is nothing to undo, even if the shim is killed.

Source: loop(4); include/uapi/linux/loop.h; containerd core/mount/losetup_linux.go.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final

from shim.errors import MountFailed

_CONTROL: Final = "/dev/loop-control"
_CTL_GET_FREE: Final = 0x4C82
_CONFIGURE: Final = 0x4C0A

_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16

# struct loop_config: descriptor, block size; struct loop_info64, with only the flags and the name
# set; reserved bytes.
_CONFIG: Final = struct.Struct("=II 52xI 64s 112x 64x")
_LONGEST_NAME: Final = 63

# Attempts, since another process may be faster.
_ATTEMPTS: Final = 100


def attach(path: str, *, read_only: bool, direct: bool) -> tuple[str, int]:
    """Attach a file to a loop device.

    Args:
        path: the file.
        read_only: whether the device is read-only.
        direct: whether to bypass the cache of the file's own file system.

    Returns:
        The device's path, and a descriptor of the device; close it after mounting.

    Raises:
        MountFailed: no free device is available to this process.
        OSError: the file cannot be opened, or is unusable as a block device.
    """
    access = os.O_RDONLY if read_only else os.O_RDWR
    file = os.open(path, access | os.O_CLOEXEC)
    try:
        flags = _AUTOCLEAR | (_READ_ONLY if read_only else 0) | (_DIRECT_IO if direct else 0)
        config = _CONFIG.pack(file, 0, flags, os.fsencode(path)[:_LONGEST_NAME])
        for _ in range(_ATTEMPTS):
            device, fd = _open_free(path, access)
            try:
                fcntl.ioctl(fd, _CONFIGURE, config)
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:
                    raise
            else:
                return device, fd
    finally:
        os.close(file)
    raise _unavailable(path, "other processes were always faster to take a free one")


def _open_free(path: str, access: int) -> tuple[str, int]:
    device = _CONTROL
    try:
        control = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            device = f"/dev/loop{fcntl.ioctl(control, _CTL_GET_FREE)}"
        finally:
            os.close(control)
        return device, os.open(device, access | os.O_CLOEXEC)
    except OSError as error:
        reason = f"{device}: {os.strerror(error.errno or 0).lower()}"
        raise _unavailable(path, reason) from error


def _unavailable(path: str, found: str) -> MountFailed:
    return MountFailed(
        f"a loop device for {path}",
        found=found,
        do="load the kernel's module (modprobe loop), and see that /dev has its nodes",
    )
