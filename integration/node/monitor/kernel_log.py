"""Following the kernel's log for Xids; what counts in it is in :mod:`shim.causes.kernel_log`.

- What was in the log before is not read: it may be of another driver, or of GPUs long replaced.
- A storm of lines is read a batch at a time. Those that the kernel has dropped meanwhile are gone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final

import anyio

from integration.node.errors import KernelLogUnusable
from integration.node.monitor.values import GpuEvent, now
from shim.causes import kernel_log


def parse_record(record: str, when: float = 0.0) -> GpuEvent | None:
    """The Xid that a record of the log tells of.

    Args:
        record: its first line: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT".
        when: it was read, in seconds since boot.

    Returns:
        It, of a GPU that has an address without its function ("0000:18:00"), and no UUID yet; None
        if the record is of something else.
    """
    found = kernel_log.parse_record(record)
    if found is None:
        return None
    return GpuEvent(
        when,
        "xid",
        "",
        bus_id=found.bus_id,
        xid=found.xid,
        gpu_instance=found.gpu_instance,
        compute_instance=found.compute_instance,
        pid=found.pid,
        process=found.process,
        source="kernel",
        text=found.text,
    )


_BATCH: Final = 512
_PAUSE: Final = 0.1


async def follow(path: str, told: Callable[[GpuEvent], None]) -> None:
    """Tell of each Xid from now on. Returns when the log ends, which the kernel's does not.

    Args:
        path: of the log: /dev/kmsg, or a pipe that has the same lines.

    Raises:
        KernelLogUnusable: it cannot be read.
    """
    fd = _open(path)
    try:
        rest = b""
        while True:
            await anyio.wait_readable(fd)
            for _ in range(_BATCH):
                try:
                    read = os.read(fd, kernel_log.ROOM)
                except BlockingIOError:
                    break
                except OSError as error:
                    # Records that were dropped before they were read; one that has no room.
                    if error.errno in {errno.EPIPE, errno.EINVAL}:
                        continue
                    raise _unusable(path, str(error.strerror)) from error
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                rest = rest[-kernel_log.ROOM :]
                for line in lines:
                    xid = parse_record(line.decode(errors="replace"), now())
                    if xid is not None:
                        told(xid)
            # A storm must not keep this process busy, and nobody is waiting for so many.
            await anyio.sleep(_PAUSE)
    finally:
        os.close(fd)


def _open(path: str) -> int:
    """Open the log, where it ends now.

    Raises:
        KernelLogUnusable: it cannot be.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from error
    mode = os.fstat(fd).st_mode
    try:
        if stat.S_ISCHR(mode):
            os.lseek(fd, 0, os.SEEK_END)
        elif not stat.S_ISFIFO(mode):
            raise _unusable(path, "neither a device nor a pipe")
    except OSError as error:
        os.close(fd)
        raise _unusable(path, str(error.strerror)) from error
    except KernelLogUnusable:
        os.close(fd)
        raise
    return fd


def _unusable(path: str, found: str) -> KernelLogUnusable:
    return KernelLogUnusable(
        f"Xids in the kernel's log {path}",
        found=found,
        do="give the agent the device and CAP_SYSLOG; without it, NVML tells of Xids, and nobody "
        "of the process that an Xid is for",
    )
