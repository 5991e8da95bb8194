"""What went through the network interfaces of a process.

Source: proc_pid_net(5), /proc/PID/net/dev.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from shim import statfiles

# The columns of /proc/net/dev: eight of what was received, then eight of what was sent.
_BYTES, _PACKETS, _ERRORS, _DROPPED = range(4)
_SENT: Final = 8
_COLUMNS: Final = 16


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface, with its counters by the names that both messages have."""

    name: str
    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_dropped: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_dropped: int


def interfaces_of(pid: int) -> list[Interface]:
    """The interfaces of a container's network namespace.

    Args:
        pid: a process of the container.

    Returns:
        Each interface; none if the process has ended, or shares our network: what goes through
        the whole machine says nothing about a container.
    """
    try:
        shared = os.stat("/proc/self/ns/net").st_ino == os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return []
    return [] if shared else parse(statfiles.read(f"/proc/{pid}/net", "dev") or "")


def parse(text: str) -> list[Interface]:
    """The interfaces that a /proc/net/dev lists.

    Args:
        text: the file. Its two lines of heading, and others that are no interface, are skipped.
    """
    interfaces = []
    for line in text.splitlines():
        name, _, rest = line.rpartition(":")
        columns = [statfiles.to_number(word) for word in rest.split()]
        if not name or len(columns) < _COLUMNS or None in columns:
            continue
        wanted = (_BYTES, _PACKETS, _ERRORS, _DROPPED)
        counts = [columns[first + column] or 0 for first in (0, _SENT) for column in wanted]
        interfaces.append(Interface(name.strip(), *counts))
    return interfaces
