r"""Read Xids from the kernel's log, which names the process that NVML does not name.

The format of the driver's lines has changed over the years, and depends on its knowledge::

    NVRM: Xid (0000:03:00): 14, Channel 00000001
    NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.
    NVRM: Xid (PCI:0000:01:00): 31, pid=1234, name=python3, Ch 00000008, intr 00000000. MMU Fault
    NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics Exception
    NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)
    NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception

Rules
- A record counts if its facility is the kernel's (0), which programs cannot write.
- A line counts only if it names a GPU by its address. Very old drivers write some lines without
  one, which cannot be attributed. Besides, if a program named ``NVRM: Xid: 79,`` crashes, the
  kernel writes a line with that prefix; a prefix with an address is longer than a name can be.
- A container chooses the name of its process, up to fifteen characters, and so part of the text
  after it. The GPU, the number and the process id precede the name and come from the kernel. The
  text after them is only displayed; no decision depends on it.

Source: Documentation/ABI/testing/dev-kmsg; kernel_rc.c and error_cont.c of NVIDIA's open kernel
    modules (krcReportXid); dmesg output in bug reports for older drivers.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import Final, Self

from api.errors import one_line
from api.values import dataclass

__all__ = ["Log", "LoggedXid", "parse_record", "read_xids", "text_of"]

_FACILITY_SHIFT: Final = 3
_RECORD: Final = re.compile(
    r"(\d{1,10}),(?:\d{1,20},(\d{1,18}),)?[^;]{0,200};(.*)", re.DOTALL | re.ASCII
)
_XID: Final = re.compile(r"NVRM: Xid \(([^()]{1,64})\): (\d{1,5})(?:, ?(.*))?")
_BUS: Final = re.compile(r"(?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_INSTANCE: Final = re.compile(r"(GPU-C?I):(\d{1,3})")
_PROCESS: Final = re.compile(r"pid='?(\d{1,10}|<unknown>)'?(?:, name=(.*?))?(?:, (.*)|$)")
_UNKNOWN: Final = "<unknown>"
_MOST_PIDS: Final = 1 << 22

# The most letters of a name to keep; the kernel's own have fifteen.
_LONGEST_NAME: Final = 64

_ROOM: Final = 1 << 16  # bytes for a read of the log, which returns one record


@dataclass(frozen=True, slots=True)
class LoggedXid:
    """An Xid from a line of the log."""

    # the time of its entry, in seconds of the log's clock; 0 if unknown
    at: float
    bus_id: str  # PCI address of the GPU without its function ("0000:18:00")
    xid: int  # the number
    gpu_instance: int | None = None  # in MIG mode; None if the line names none
    compute_instance: int | None = None  # in that GPU instance; None if the line names none
    pid: int = 0  # the process, in the host's pid namespace; 0 if unknown
    process: str = ""  # its name, for display only
    text: str = ""  # the rest, for display


def text_of(record: str) -> str:
    """Return the text of a record; "" if it is not a record of the kernel's.

    Args:
        record: the record's first line: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT".
    """
    parts = _kernels(record)
    return "" if parts is None else parts[3]


def _kernels(record: str) -> re.Match[str] | None:
    parts = _RECORD.fullmatch(record)
    return None if parts is None or int(parts[1]) >> _FACILITY_SHIFT else parts


def parse_record(record: str) -> LoggedXid | None:
    """Parse the Xid in a record of the log; return None for another kind of record.

    Args:
        record: as for :func:`text_of`.
    """
    parts = _kernels(record)
    if parts is None:
        return None
    match = _XID.fullmatch(parts[3].rstrip())
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
    return LoggedXid(
        at=int(parts[2] or 0) / 1e6,
        bus_id=f"{int(bus[1], 16):04x}:{bus[2].lower()}",
        xid=int(match[2]),
        gpu_instance=instances.get("GPU-I"),
        compute_instance=instances.get("GPU-CI"),
        pid=pid if pid <= _MOST_PIDS else 0,
        process=one_line(name[:_LONGEST_NAME]),
        text=one_line(rest),
    )


class Log:
    """The open kernel's log, with its unread part. The context closes it.

    Args:
        path: /dev/kmsg, or a pipe with the same lines.
        flags: more flags of open(2).

    Attributes:
        fd: readable when there is more.
        has_ended: whether no more records will come, which only a pipe reports.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str, flags: int = 0) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
        self.has_ended, self._rest = False, b""
        kind = os.fstat(self.fd).st_mode
        if not (stat.S_ISCHR(kind) or stat.S_ISFIFO(kind)):
            os.close(self.fd)
            raise OSError(errno.EINVAL, "neither a device nor a pipe", path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def skip(self) -> None:
        """Skip a device's present content."""
        if stat.S_ISCHR(os.fstat(self.fd).st_mode):
            os.lseek(self.fd, 0, os.SEEK_END)

    def read(self) -> list[str] | None:
        """Read the driver's new records; return None if there are none yet. Never waits.

        These are records of Xids, and of the errors of NVSwitches.

        Raises:
            OSError: it cannot be read.
        """
        try:
            read = os.read(self.fd, _ROOM)
        except BlockingIOError:
            return None
        except OSError as error:
            # Records dropped before the read, or too long for it.
            if error.errno in {errno.EPIPE, errno.EINVAL}:
                return []
            raise
        if not read:
            self.has_ended = True
            return None
        *lines, rest = (self._rest + read).split(b"\n")
        self._rest = rest[-_ROOM:]
        # Few of some thousand records are the driver's.
        return [line.decode(errors="replace") for line in lines if b"Xid" in line]


def read_xids(path: str, seconds: float) -> Iterator[LoggedXid]:
    """Return the Xids in the log's present content, oldest first. Never waits.

    Args:
        path: as for :class:`Log`; no link is followed.
        seconds: the time limit, after which the rest is left unread.

    Raises:
        OSError: it cannot be read.
        TimeoutError: the time limit passed.
    """
    deadline = time.monotonic() + seconds
    with Log(path, os.O_NOFOLLOW) as log:
        while time.monotonic() < deadline:
            found = log.read()
            if found is None:
                return
            yield from (xid for each in found if (xid := parse_record(each)) is not None)
    raise TimeoutError(errno.ETIMEDOUT, f"not read to its end within {seconds} s", path)
