"""Processes of the machine: a family, open sockets, and a daemon's end."""

from __future__ import annotations

import os
from contextlib import suppress
from subprocess import Popen, TimeoutExpired
from typing import Any

from integration.timeouts import PATIENCE


def family(pid: int) -> list[int]:
    """A process, its children, and theirs."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{thread}/children", encoding="ascii") as file:
                    found += [int(number) for number in file.read().split()]
    return found


def sockets_of(pid: int) -> list[str]:
    """The inodes of the sockets that a process has open; none once it has ended."""
    found = []
    with suppress(FileNotFoundError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                found.append(target.removeprefix("socket:[")[:-1])
    return found


def end(process: Popen[Any], *, timeout: float = 10) -> None:
    """End a daemon as a service manager does: SIGTERM, and SIGKILL if that is not enough."""
    process.terminate()
    try:
        process.wait(timeout * PATIENCE)
    except TimeoutExpired:
        process.kill()
        process.wait()
