r"""Reading Xids from the kernel's log, which names the process that NVML does not.

The driver writes, over the years and by what it knows::

    NVRM: Xid (0000:03:00): 14, Channel 00000001
    NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:01:00): 31, pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault
    NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception
    NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)
    NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception

Rules
- A record counts if its facility is the kernel's (0). What a program writes into the log has
  another one, which the kernel sees to.
- A line counts if it names a GPU by its address. Very old drivers have some without, of which
  nobody could say whose they are; and a program that calls itself ``NVRM: Xid: 79,`` and ends by
  a segmentation fault has the kernel write a line that begins so. With an address it is longer
  than a name can be.
- A container chooses the name of its process, up to fifteen letters of any kind, and so the text
  after it. The GPU, the number and the process id come before it, and are the kernel's own; what
  comes after them is for people, and nothing is decided by it.
- What was in the log before is not read: it may be of another driver, or of GPUs long replaced.
- A storm of lines is read a batch at a time. Those that the kernel has dropped meanwhile are gone.

Source: Documentation/ABI/testing/dev-kmsg; kernel_rc.c and error_cont.c of NVIDIA's open kernel
modules (krcReportXid), dmesg output in bug reports for what the older ones wrote.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Final

import anyio

from api.errors import one_line
from integration.node.errors import KernelLogUnusable
from integration.node.monitor.values import GpuEvent

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["follow", "parse_record"]

_FACILITY_SHIFT: Final = 3
_RECORD: Final = re.compile(r"(\d{1,10}),[^;]{0,200};(.*)", re.DOTALL)
_XID: Final = re.compile(r"NVRM: Xid \(([^()]{1,64})\): (\d{1,5})(?:, ?(.*))?")
_BUS: Final = re.compile(r"(?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_INSTANCE: Final = re.compile(r"(GPU-C?I):(\d{1,3})")
_PROCESS: Final = re.compile(r"pid='?(\d{1,10}|<unknown>)'?(?:, name=(.*?))?(?:, (.*)|$)")
_UNKNOWN: Final = "<unknown>"
_MOST_PIDS: Final = 1 << 22

# Letters of a name that are kept; the kernel's own have fifteen.
_LONGEST_NAME: Final = 64


def parse_record(record: str, when: float = 0.0) -> GpuEvent | None:
    """The Xid that a record of the log tells of.

    Args:
        record: its first line: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT".
        when: it was read, in seconds since boot.

    Returns:
        It, of a GPU that has an address without its function ("0000:18:00"), and no UUID yet; None
        if the record is of something else.
    """
    parts = _RECORD.fullmatch(record)
    if parts is None or int(parts[1]) >> _FACILITY_SHIFT:
        return None
    match = _XID.fullmatch(parts[2].rstrip())
    bus = _BUS.match(match[1]) if match is not None else None
    if match is None or bus is None:
        return None
    instances = {name: int(number) for name, number in _INSTANCE.findall(match[1])}
    rest, pid, name = match[3] or "", 0, ""
    process = _PROCESS.match(rest)
    if process is not None:
        pid = 0 if process[1] == _UNKNOWN else int(process[1])
        name = "" if process[2] in {None, _UNKNOWN} else process[2]
        rest = process[3] or ""
    return GpuEvent(
        when,
        "xid",
        "",
        bus_id=f"{int(bus[1], 16):04x}:{bus[2].lower()}",
        xid=int(match[2]),
        gpu_instance=instances.get("GPU-I"),
        compute_instance=instances.get("GPU-CI"),
        pid=pid if pid <= _MOST_PIDS else 0,
        process=one_line(name[:_LONGEST_NAME]),
        source="kernel",
        text=one_line(rest),
    )


# A record of /dev/kmsg comes with one read each, which has to have room for it.
_ROOM: Final = 1 << 16
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
                    read = os.read(fd, _ROOM)
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
                rest = rest[-_ROOM:]
                for line in lines:
                    now = time.clock_gettime(time.CLOCK_BOOTTIME)
                    xid = parse_record(line.decode(errors="replace"), now)
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
